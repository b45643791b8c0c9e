"""Faults of emulated runs: which are refused, what is told to whom, and what becomes of real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launched import Launched
from tests.launcher.test_emulate import namespaces_or_skip
from zmqtrain.errors import UsageError
from zmqtrain.launcher.emulate import Emulation
from zmqtrain.launcher.faults import EmulatedMachines, obeyed, refused
from zmqtrain.membership.description import RunDescription
from zmqtrain.net.conditions import Conditions
from zmqtrain.run.side_lines import LineReader, orders_for
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.toml_writer import write_value

HOSTS = """
[job]
name = "trial"
timeout = "20 s"
oversubscribe = true
steps = 1000000

[[hosts]]
name = "h[1-3]"
slots = 2

[compute]
groups = 3
batch_size = 4
device = "modelled"
profile = "lenet"

[exchange]
kind = "gossip"

[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
"""


def fault(kind: str, **values: object) -> str:
    return "\n".join(["[[faults]]", *(f"{name} = {write_value(value)}" for name, value in {"kind": kind, **values}.items()), ""])


def parsed(*faults: str, file: str = HOSTS) -> Topology:
    return parse_topology(file + "".join(faults))


# What cannot be -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "file", "words"),
    [
        (fault("corrupt", target="worker/0", at=1), HOSTS, r"faults\[0\]: corrupt flips a bit .* only zmqtrain simulate"),
        (fault("drop", target="worker/0", at=1), HOSTS, r"faults\[0\]: drop breaks connections.* only zmqtrain simulate"),
        (
            fault("slow", target="worker/0", at=1),
            HOSTS.replace('device = "modelled"\nprofile = "lenet"', 'device = "cpu"'),
            r'slow is for modelled devices, and \[compute\] device is "cpu".* only zmqtrain simulate',
        ),
        (fault("delay", target="worker/0", at=1), HOSTS.replace('latency = "100 us"', ""), "has none: add latency"),
    ],
)  # fmt: skip
def test_what_needs_another_world_is_refused(text: str, file: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Emulation().check(parsed(text, file=file))


def test_the_others_are_not() -> None:
    faults = [
        *(fault(kind, target="h2", at=1) for kind in ("kill", "restart", "drain", "slow", "delay")),
        fault("pause", target="worker/1", step=1, lasts="1 s"),
        fault("partition", sides=[["h1"], ["h2"]], at=2),
        fault("heal", at=3),
    ]
    assert not refused(parsed(*faults))


def test_scripts_tell_no_steps_and_searches_have_no_faults() -> None:
    emulation = Emulation()
    emulation.check_script(parsed(fault("kill", target="worker/0", at=1)))
    emulation.check_search(parsed())
    with pytest.raises(UsageError, match=r'give "at"'):
        emulation.check_script(parsed(fault("kill", target="worker/0", step=1)))
    with pytest.raises(UsageError, match=r"search carries out no \[\[faults\]\]"):
        emulation.check_search(parsed(fault("kill", target="worker/0", at=1)))


# Who is told what ---------------------------------------------------------------------------------------------------------------


class FakeFleet:
    """Agents as numbers of processes that get signals."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def signal(self, host: str, number: signal.Signals) -> None:
        self._seen.append(f"{host} gets {number.name}")

    async def start_again(self, host: str) -> None:
        self._seen.append(f"{host} starts")

    async def wait(self, host: str) -> int:
        return 7


class Scene:
    """Emulated machines whose orders are written down."""

    def __init__(self, folder: Path) -> None:
        topology = parsed()
        self.placement = place(topology)
        self.shaping, self.seen = folder / "shaping.json", list[str]()
        host_of = {role.peer: role.host for role in self.placement.roles} | {f"agent/{host}": host for host in self.placement.hosts}
        self.conditions = Conditions.create(folder / "conditions", host_of)
        self._readers = [self._reader(host) for host in self.placement.hosts]
        fleet: Any = FakeFleet(self.seen)
        assembly: Any = None
        say = self.seen.append
        self.machines = EmulatedMachines(self.placement, self.shaping, self.conditions, fleet, assembly, say, self._ended)

    def _reader(self, host: str) -> LineReader:
        path = orders_for(self.shaping, host)
        os.mkfifo(path)
        return LineReader(path, lambda line: self.seen.append(f"{host}: {line}"))

    def _ended(self, host: str, code: int) -> None:
        self.seen.append(f"{host} ended ({code})")

    async def heard(self) -> list[str]:
        """What has happened since the last call."""
        for _ in range(3):  # what was written is read at the next turn of the loop
            await asyncio.sleep(0)
        found = list(self.seen)
        self.seen.clear()
        return found

    def close(self) -> None:
        self.machines.release()
        for reader in self._readers:
            reader.close()
        self.conditions.close()


async def test_roles_are_hit_by_their_agents_and_agents_by_the_launcher(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    machines, stop, go_on = scene.machines, int(signal.SIGSTOP), int(signal.SIGCONT)
    await machines.kill("worker/1")
    assert await scene.heard() == ["h2: signal worker/1 9"]
    await machines.kill("h2")
    assert await scene.heard() == ["h2 gets SIGKILL"]
    await machines.restart("worker/2", 2.5)
    assert await scene.heard() == ["h3: restart worker/2 2.5"]
    await machines.restart("h1", 0.0)
    assert await scene.heard() == ["h1 gets SIGKILL", "h1 starts", "h1 ended (7)"]
    await machines.pause("h3")
    assert await scene.heard() == [f"h3: signal worker/2 {stop}", f"h3: signal agent/h3 {stop}"]
    await machines.resume("h3")
    assert await scene.heard() == ["h3 gets SIGCONT", f"h3: signal worker/2 {go_on}"]
    await machines.pause("worker/0")
    await scene.heard()
    scene.close()
    assert scene.seen == []
    await machines.kill("h9")  # left out by a restart


async def test_what_stands_still_goes_on_at_the_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    await scene.machines.pause("worker/0")
    await scene.machines.pause("h2")
    await scene.heard()
    scene.machines.release()
    go_on = int(signal.SIGCONT)
    assert await scene.heard() == ["h2 gets SIGCONT", f"h2: signal worker/1 {go_on}", f"h1: signal worker/0 {go_on}"]
    scene.close()


async def test_links_are_cut_by_all_partitions_on_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    cut = scene.conditions.cut
    first = await scene.machines.part(["h1"], ["h2", "h3"], one_way=True)
    second = await scene.machines.part(["h1"], ["h2"], one_way=False)
    assert [cut("h1", "h2"), cut("h1", "h3"), cut("h2", "h1"), cut("h3", "h1"), cut("h2", "h3")] == [True, True, True, False, False]
    await first()
    assert [cut("h1", "h2"), cut("h1", "h3"), cut("h2", "h1")] == [True, False, True]
    await second()
    assert not cut("h1", "h2")
    assert not cut("h2", "h1")
    await scene.machines.slow("h2", 3.0)
    await scene.machines.delay("worker/0", 5.0)
    assert [scene.conditions.slowdown(f"worker/{number}") for number in range(3)] == [1.0, 3.0, 1.0]
    assert [scene.conditions.delay(f"worker/{number}") for number in range(3)] == [5.0, 1.0, 1.0]
    scene.close()


class FakeAgent:
    """Writes down what it is to do."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def hit(self, *what: object) -> None:
        self.seen.append(what)

    def restart(self, role: Any, after_s: float) -> None:
        self.seen.append(("restart", role.peer, after_s))


async def test_an_agent_does_what_it_is_told(tmp_path: Path) -> None:
    scene, topology = Scene(tmp_path), parsed()
    agent: Any = FakeAgent()
    with obeyed(agent, RunDescription(topology, place(topology), ""), "", "h2"):
        pass  # a run without a network file has no faults
    scene._readers[1].close()
    with obeyed(agent, RunDescription(topology, place(topology), ""), str(scene.shaping), "h2"):
        await scene.machines.kill("worker/1")
        await scene.machines.restart("worker/1", 0.5)
        while len(agent.seen) < 2:  # noqa: ASYNC110 - the loop reads meanwhile
            await asyncio.sleep(0)
    assert agent.seen == [("worker/1", signal.SIGKILL), ("restart", "worker/1", 0.5)]
    scene._readers.pop(1)
    scene.close()


# Real processes -----------------------------------------------------------------------------------------------------------------


def emulated(folder: Path, *options: str, faults: str, awaited: list[str]) -> Launched:
    """A run that is interrupted once all these lines have been said."""
    (folder / "trial.toml").write_text(HOSTS + faults)
    with Launched(folder, "--emulate", *options, "trial.toml") as launched:
        for line in awaited:
            launched.wait_for(line)
        launched.signal(signal.SIGINT)
        assert launched.end() == 130, repr(launched)
    return launched


def test_workers_die_stand_still_and_come_back(tmp_path: Path) -> None:
    faults = (
        fault("restart", target="worker/1", step=5, lasts="0.1 s")
        + fault("pause", target="h3", step=8, lasts="0.2 s")
        + fault("delay", target="h1", step=10, factor=3.0)
        + fault("slow", target="worker/0", step=12, factor=2.0, lasts="0.2 s")
        + fault("partition", step=40, sides=[["h1"], ["h2", "h3"]], lasts="0.3 s")
        + fault("kill", target="worker/2", step=60)
    )
    awaited = [
        "^fault: restart worker/1 at step 5 of worker/1 for 0.1 s",
        "^worker/1 is back",
        "^fault: pause h3 at step 8 of worker/0 for 0.2 s",
        "^fault: slow worker/0 2 times at step 12 of worker/0 for 0.2 s",
        r"^fault: partition h1 \| h2,h3 at step 40",
        "^continuing without worker/2: worker/2 on h3 was killed by SIGKILL",
    ]
    launched = emulated(tmp_path, "--shaping", "paced", faults=faults, awaited=awaited)
    lost = [line for line in launched.lines if line.startswith("continuing without")]
    assert len(lost) == 2, repr(launched)  # what was short has cost nobody


def test_a_host_vanishes_and_another_one_is_cut_off(tmp_path: Path) -> None:
    """It ends its roles when it notices that the run has gone on without it."""
    namespaces_or_skip()
    faults = fault("restart", target="h2", at="0.1 s", lasts="0.1 s") + fault("partition", step=300, sides=[["h1", "h2"], ["h3"]])
    awaited = [
        "^continuing without agent/h2: lost the host h2",
        "^worker/1 is back",
        "^continuing without agent/h3: lost the host h3",
    ]
    launched = emulated(tmp_path, "--shaping", "namespaces", "--set", "job.timeout=6", faults=faults, awaited=awaited)
    assert launched.json("summary.json")["world"] == "emulated"
