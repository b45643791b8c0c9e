"""Every engine in one form, however few methods it has: where its hosts are, how they are reached, and what is started there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from zmqtrain.errors import EngineError
from zmqtrain.launcher.engine import EngineRun, Gathered, Gathering, Handle
from zmqtrain.launcher.fleet import Fleet, gathered_hosts
from zmqtrain.membership.environment import BIND, COORDINATOR_ADDRESS, HOST, PEER, TOKEN
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.topology.schema import Host, Topology

COMMAND = ("python", "-m", "something")


class Ended:
    """What was started has ended already."""

    async def wait(self) -> int:
        return 5


class Plain:
    """Starts and stops, as the smallest plug-in does."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.environments: dict[str, Mapping[str, str]] = {}

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
        assert tuple(command) == COMMAND
        self.done.append(f"start {host.name}")
        self.environments[host.name] = environ
        return Ended()

    async def stop(self, handle: Handle, grace: float) -> None:
        self.done.append(f"stop after {grace:g} s")


class Remote(Plain):
    """Sees to its hosts first."""

    async def open(self, run: EngineRun) -> None:
        self.done.append(f"open {', '.join(run.coordinators)}")
        self.run = run

    async def close(self) -> None:
        self.done.append("close")


class Finding(Remote):
    """Finds its hosts."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    async def gather(self, gathering: Gathering) -> Gathered:
        self.done.append("gather")
        hosts = (Host(name="found", address=self.address, slots=1),)
        return Gathered(gathering.topology.with_hosts(hosts), {"found": self.address}, token="its own")


def topology_of(*addresses: str) -> Topology:
    hosts = [{"name": f"h{number}", "address": address, "slots": 1} for number, address in enumerate(addresses)]
    return Topology.from_dict({"job": {"name": "trial", "timeout": 20.0}, "hosts": hosts})


async def use(engine: Plain, topology: Topology, folder: Path) -> Fleet:
    """A whole life of what an engine starts."""
    async with (
        gathered_hosts(engine, Gathering(topology, folder, print), "token") as fleet,
        await open_zeromq("coordinator", settings=fleet.settings(encrypted=False)) as endpoint,
    ):
        await fleet.open(endpoint, fleet.gathered.topology.hosts, folder, say=print, log=print)
        await fleet.start(COMMAND, "thing")
        assert [await fleet.wait(host) for host in fleet.handles] == [5] * len(fleet.handles)
        await fleet.stop(2.0)
    return fleet


async def test_an_engine_that_starts_and_stops_has_its_hosts_here(tmp_path: Path) -> None:
    engine, topology = Plain(), topology_of("127.0.0.1", "127.0.0.1")
    fleet = await use(engine, topology, tmp_path)
    assert sorted(engine.done) == ["start h0", "start h1", "stop after 2 s", "stop after 2 s"]
    assert (fleet.gathered.topology, dict(fleet.gathered.towards)) == (topology, {})
    environ = engine.environments["h1"]
    assert (environ[PEER], environ[TOKEN], environ[HOST], environ[BIND]) == ("agent/h1", "token", "127.0.0.1", "")


async def test_hosts_of_a_remote_engine_are_told_where_they_reach_this_machine(tmp_path: Path) -> None:
    engine = Remote()
    fleet = await use(engine, topology_of("127.0.0.1", "localhost"), tmp_path)
    assert engine.done[0] == "open h0, h1"
    assert engine.done[-1] == "close"
    assert dict(fleet.gathered.towards) == {"h0": "127.0.0.1", "h1": fleet.gathered.towards["h1"]}
    assert fleet.settings(encrypted=False).host in ("0.0.0.0", "::")
    for name, environ in engine.environments.items():
        assert environ[COORDINATOR_ADDRESS] == engine.run.coordinators[name]
    assert engine.environments["h1"][HOST] == "localhost"


async def test_an_engine_that_finds_its_hosts_says_who_they_are_and_what_the_token_is(tmp_path: Path) -> None:
    engine = Finding("127.0.0.1")
    fleet = await use(engine, topology_of("10.0.0.9"), tmp_path)
    assert engine.done == ["gather", "open found", "start found", "stop after 2 s", "close"]
    assert fleet.settings(encrypted=False).host == "127.0.0.1"
    assert engine.environments["found"][TOKEN] == "its own"


async def test_the_coordinator_listens_where_found_hosts_reach_it(tmp_path: Path) -> None:
    async with gathered_hosts(Finding("10.1.2.3"), Gathering(topology_of(), tmp_path, print), "token") as fleet:
        assert fleet.settings(encrypted=False).host == "0.0.0.0"
        assert fleet.settings(encrypted=True).identity is not None


async def test_engines_are_closed_whatever_fails_but_not_before_they_were_opened(tmp_path: Path) -> None:
    remote = Remote()
    with pytest.raises(KeyError):
        async with gathered_hosts(remote, Gathering(topology_of("127.0.0.1"), tmp_path, print), "token"):
            raise KeyError
    assert remote.done == []

    class Lost(Finding):
        async def gather(self, gathering: Gathering) -> Gathered:
            raise RuntimeError("nobody came")

    finding = Lost("127.0.0.1")
    with pytest.raises(EngineError, match="could not gather the hosts: RuntimeError: nobody came"):
        async with gathered_hosts(finding, Gathering(topology_of(), tmp_path, print), "token"):
            raise AssertionError("it has no hosts")
    assert finding.done == ["close"]


async def test_what_is_no_handle_is_refused(tmp_path: Path) -> None:
    class Wrong(Plain):
        async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> Handle:
            return 7  # type: ignore[return-value]

    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(use(Wrong(), topology_of("127.0.0.1"), tmp_path), 20)
    assert caught.group_contains(EngineError, match="start the thing of h0: TypeError: its start returned int")
