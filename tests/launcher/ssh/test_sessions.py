"""The talk with one host, by both clients, with a real sshd: what the remote program does, and what goes wrong."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launcher.ssh.machines import Machines, machines
from zmqtrain.errors import HostLostError, HostsError, PlacementError, SshError
from zmqtrain.launcher.engine import EngineRun
from zmqtrain.launcher.ssh.clients import make_client
from zmqtrain.launcher.ssh.engine import SshEngine
from zmqtrain.launcher.ssh.handle import SshHandle
from zmqtrain.launcher.ssh.room import lacks_room, with_room, with_room_here
from zmqtrain.launcher.ssh.session import Login
from zmqtrain.launcher.ssh.target import Target
from zmqtrain.processors import processors
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.timeouts import Timeouts

TIMEOUTS = Timeouts.of(12.0)
CLIENTS = ("asyncssh", "system")
#: An agent that talks, and ends well when it is asked to.
TALKS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("one", os.environ["WORD"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("two", flush=True)
time.sleep(600 if os.path.exists("stay") else 0)
sys.stdout.write("three")
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(2, tmp_path_factory.mktemp("machines")) as made:
        yield made


def target(made: Machines, name: str) -> Target:
    host = next(host for host in parse_topology("[job]\n" + made.hosts()).hosts if host.name == name)
    return Target.of(host, sys.executable)


@asynccontextmanager
async def logged_in(made: Machines, kind: str, name: str = "m1", run: str = "trial") -> AsyncIterator[Login]:
    client = make_client(kind)  # type: ignore[arg-type]
    session = await Login.open(client, target(made, name), run, connect_s=10.0)
    try:
        yield session
    finally:
        await session.close()


class Heard:
    """What somebody says, as it comes."""

    def __init__(self) -> None:
        self.text = ""
        self._more = asyncio.Event()

    def add(self, text: str) -> None:
        self.text += text
        self._more.set()

    async def until(self, words: str) -> None:
        while words not in self.text:
            self._more.clear()
            await self._more.wait()


async def start(session: Login, folder: Path) -> None:
    """Start an agent."""
    command = [sys.executable, "-c", TALKS]
    await session.ask("start", command=command, environ={"WORD": "secret"}, folder=str(folder))


@pytest.mark.parametrize("kind", CLIENTS)
async def test_an_agent_is_followed_to_its_end(two: Machines, tmp_path: Path, kind: str) -> None:
    heard = Heard()
    async with logged_in(two, kind, run=f"follow-{kind}") as session:
        assert session.state["agent"] == "none"
        packages = ["msgpack", "no_such_package"]
        checked = await session.ask("check", packages=packages, folder=str(tmp_path), files=["t.py"])
        assert checked["python"] == ".".join(map(str, sys.version_info[:3]))
        assert checked["packages"]["msgpack"]
        assert checked["packages"]["no_such_package"] is None
        assert [what for what, _ in checked["faults"]] == [f"no t.py in {tmp_path}"]
        session.on_log(lambda text, offset: heard.add(text))
        await start(session, tmp_path)
        with pytest.raises(HostsError, match="already"):
            await start(session, tmp_path)
        (tmp_path / "go").touch()
        async with asyncio.timeout(10):
            assert await session.follow(0) == 0
        assert heard.text == "one secret\ntwo\nthree"
        assert (await session.ask("stop", grace_s=1, offset=len(heard.text)))["stopped"] == 0
        await session.ask("remove")
    assert heard.text == "one secret\ntwo\nthree"
    assert two.left() == []


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_broken_connection_is_made_again(two: Machines, tmp_path: Path, kind: str) -> None:
    notes, heard = Heard(), Heard()
    (tmp_path / "stay").touch()
    run = f"broken-{kind}"
    async with logged_in(two, kind, run=run) as session:
        await start(session, tmp_path)
        client = make_client(kind)  # type: ignore[arg-type]
        handle = SshHandle(session, client, run, TIMEOUTS, say=notes.add, log=lambda host, text: heard.add(text))
        async with asyncio.timeout(20):
            waiting = asyncio.create_task(handle.wait())
            await heard.until("one")
            assert two.break_connections("m1") > 0
            await notes.until("m1: the ssh connection is lost")
            await notes.until("m1: the ssh connection is back")
            (tmp_path / "go").touch()
            await heard.until("two")
            waiting.cancel()
            await asyncio.wait([waiting])
            # It is lost once more, and stopped nevertheless.
            two.break_connections("m1")
            assert await handle.stop(5.0)
            assert await handle.wait() == 7
        assert heard.text == "one secret\ntwo\n"  # nothing is told twice
    assert two.left() == []


async def test_what_cannot_be_reached_is_said_and_left_for_later(two: Machines, tmp_path: Path) -> None:
    notes = Heard()
    async with logged_in(two, "asyncssh", "m2", run="later") as session:
        await start(session, tmp_path)
        quick = replace(TIMEOUTS, connect_s=1.0)
        handle = SshHandle(session, make_client("asyncssh"), "later", quick, say=notes.add, log=lambda host, text: None)
        two.stop_server("m2")
        assert not await handle.stop(1.0)
        assert "`zmqtrain stop` tries again" in notes.text
    assert two.processes("m2")
    two.start_server("m2")
    async with asyncio.timeout(10):
        while True:
            try:
                async with logged_in(two, "asyncssh", "m2", run="later") as session:
                    assert session.state["agent"] == "running"
                    assert (await session.ask("stop", grace_s=5, offset=0))["stopped"] == 7
                    await session.ask("remove")
                    break
            except SshError:
                await asyncio.sleep(0.05)  # sshd is starting
    assert two.left() == []


async def test_a_killed_supervisor_takes_its_agent_along(two: Machines, tmp_path: Path) -> None:
    """Roles end with their agent (`zmqtrain.death`); a stand-in does not, but is ended when somebody stops the run."""
    async with logged_in(two, "asyncssh", run="supervisor") as session:
        await start(session, tmp_path)
        agent = next(process for process in two.processes("m1") if TALKS in process.cmdline())
        os.kill(agent.ppid(), signal.SIGKILL)
        async with asyncio.timeout(10):
            assert await session.follow(0) == -signal.SIGKILL
            await session.ask("stop", grace_s=1, offset=0)
        assert agent not in two.processes("m1")
        await session.ask("remove")
    assert two.left() == []


async def test_only_plain_files_are_unpacked(two: Machines) -> None:
    async with logged_in(two, "asyncssh", run="unpack") as session:
        for name, kind in (("../out", tarfile.REGTYPE), ("/out", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = kind, "/etc/passwd"
                archive.addfile(entry)
            with pytest.raises(HostsError, match="must not be in"):
                await session.ask("unpack", size=len(buffer.getvalue()), data=buffer.getvalue())
        await session.ask("remove")
    assert two.left() == []


def login(*, port: int | None = None, host: str | None = None, **options: object) -> str:
    """``ssh`` of ``[[hosts]]``, as TOML."""
    named = {"host": host, "port": port}
    given = ", ".join(f"{name} = {json.dumps(value)}" for name, value in named.items() if value is not None)
    chosen = ", ".join(f"{name} = {json.dumps(str(value))}" for name, value in {"IdentitiesOnly": "yes", **options}.items())
    return f"{{ {given}{given and ', '}options = {{ {chosen} }} }}"


# Faults -----------------------------------------------------------------------------------------------------------------------


async def look(made: Machines, hosts: str, folder: Path, *, client: str = "asyncssh", coordinator: str = "127.0.0.1:9,9") -> str:
    """What the first look at these hosts finds wrong."""
    topology = parse_topology(f'[job]\n[compute]\ngroups = 2\n[engine]\nkind = "ssh"\nclient = "{client}"\n{hosts}')
    notes: list[str] = []
    run = EngineRun(
        topology=topology,
        hosts=topology.hosts,
        coordinators={host.name: f"tcp://{coordinator}" for host in topology.hosts},
        folder=folder,
        directory=folder,
        script=None,
        timeouts=TIMEOUTS,
        say=notes.append,
        log=lambda host, text: None,
    )
    engine = SshEngine()
    try:
        with pytest.raises((HostsError, HostLostError)) as caught:
            await engine.open(run)
    finally:
        await engine.close()
    assert made.left() == []
    assert not (folder / "hosts.json").exists()
    return f"{caught.value.exit_code}: {caught.value}"


@pytest.mark.parametrize("client", CLIENTS)
async def test_logins_that_fail(two: Machines, tmp_path: Path, client: str) -> None:
    nobody = login(IdentityFile="/dev/null", UserKnownHostsFile=two.known_hosts)
    strange = login(IdentityFile=two.key, UserKnownHostsFile="/dev/null")
    said = await look(two, two.hosts("m1", ssh=nobody) + two.hosts("m2", ssh=strange), tmp_path, client=client)
    assert said.startswith("2: 2 of 2 hosts cannot take part"), said
    assert "ermission denied" in said
    assert "ost key" in said
    by_hand = f"ssh -o IdentitiesOnly=yes -o IdentityFile={two.key} -o UserKnownHostsFile=/dev/null {two.address('m2')}"
    assert f"`{by_hand}`" in said


@pytest.mark.parametrize("client", CLIENTS)
async def test_hosts_that_are_not_there_are_worth_another_try(two: Machines, tmp_path: Path, client: str) -> None:
    closed = login(port=23, IdentityFile=two.key)
    said = await look(two, two.hosts("m1", ssh=closed) + two.hosts("m2"), tmp_path, client=client)
    assert said.startswith("129: 1 of 2 hosts"), said
    assert "onnect" in said


async def test_what_hosts_lack_is_told_for_all_of_them(two: Machines, tmp_path: Path) -> None:
    said = await look(two, two.hosts("m1", python='"/nowhere/python"') + two.hosts("m2"), tmp_path)
    assert "m1    there is no Python at /nowhere/python" in said
    bare = tmp_path / "python"  # as if nothing were installed
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -I "$@"\n')  # type: ignore[attr-defined]
    bare.chmod(0o755)
    said = await look(
        two, two.hosts("m1", environment={"PYTHONPATH": ""}, python=f'"{bare}"') + two.hosts("m2", folder='"/nowhere"'), tmp_path
    )
    assert said.startswith("2: 2 of 2 hosts"), said
    assert "no zmqtrain" in said
    assert "no torch" in said
    assert "no folder /nowhere" in said


async def test_ways_that_are_closed(two: Machines, tmp_path: Path) -> None:
    said = await look(two, two.hosts("m1", bind='"198.51.100.1"') + two.hosts("m2"), tmp_path)
    assert "m1    cannot listen on 198.51.100.1" in said
    elsewhere = login(host=two.address("m2"), IdentityFile=two.key, UserKnownHostsFile=two.known_hosts)
    moved = two.hosts("m2", address='"no.such.name.invalid"', ssh=elsewhere)
    said = await look(two, two.hosts("m1") + moved, tmp_path, coordinator=f"{two.namespaces.address}:9,9")
    assert f"m1    cannot reach the launcher at {two.namespaces.address} (Connection refused)" in said
    assert "m1    cannot reach m2 at no.such.name.invalid" in said


async def test_an_advertised_address_that_leads_nowhere(two: Machines, tmp_path: Path) -> None:
    outer = two.hosts("m2", address='"203.0.113.2"', bind='"0.0.0.0"', ssh=two.login(two.address("m2")))
    with two.cut_off("m1", "203.0.113.2"):
        said = await look(two, two.hosts("m1") + outer, tmp_path, coordinator=f"{two.namespaces.address}:9,9")
    assert "m1    cannot reach m2 at 203.0.113.2 (No route to host)" in said
    assert "give addresses on a network that they share" in said


# The person's own configuration -----------------------------------------------------------------------------------------------


async def test_the_users_own_configuration_counts(two: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, keys, known hosts and jump hosts, as in ~/.ssh/config."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(
        f"Host gate\n  HostName {two.address('m1')}\n"
        f"Host lab\n  HostName {two.address('m2')}\n  ProxyJump gate\n"
        f"Host *\n  User root\n  IdentityFile {two.key}\n  UserKnownHostsFile {two.known_hosts}\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    plain = Target("lab", "lab", sys.executable, environment=target(two, "m2").environment)
    session = await Login.open(make_client("asyncssh"), plain, "config", connect_s=10.0)
    try:
        assert session.state["agent"] == "none"
        said = (two.folder / "sshd-m2.log").read_text()
        assert f"from {two.address('m1')}" in said  # it came through there
    finally:
        await session.close()
    # The same from the topology file alone.
    jumped = replace(target(two, "m2"), jump="gate")
    session = await Login.open(make_client("asyncssh"), jumped, "config", connect_s=10.0)
    await session.close()


@pytest.mark.parametrize("kind", CLIENTS)
async def test_hosts_are_asked_for_the_slots_that_the_file_leaves_out(two: Machines, kind: str) -> None:
    """Each host has one worker then, with all processors of it, and all of them are one group."""
    hosts = two.hosts().replace("slots = 1\n", "", 1)
    topology = parse_topology(f'[job]\n{hosts}[engine]\nkind = "ssh"\nclient = "{kind}"\n')
    assert [host.slots for host in topology.hosts] == [0, 1]
    assert lacks_room(topology)
    with pytest.raises(PlacementError, match="found out only at launch"):
        place(topology)
    said: list[str] = []
    found = await with_room(topology, said.append)
    assert [host.slots for host in found.hosts] == [processors(), 1]
    assert [(role.host, role.threads, role.group) for role in place(found).workers] == [("m1", processors(), 0), ("m2", 1, 0)]
    assert said == []
    assert [host.slots for host in with_room_here(topology).hosts] == [processors(), 1]
