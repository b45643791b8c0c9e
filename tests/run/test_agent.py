"""Of the same fault an agent tells the same, whether its roles are forked processes or coroutines of a simulated machine."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.run.roles.scripted_lives import live, marks
from zmqtrain.errors import ConnectivityError
from zmqtrain.launcher.forked import ForkedProcesses
from zmqtrain.launcher.forkserver import ForkServer
from zmqtrain.membership.agent_link import WITHDRAW, AgentLink
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import COORDINATOR, RoleEnvironment, net_settings
from zmqtrain.membership.view import Member, View
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.run.agent import Agent
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.cluster import Cluster
from zmqtrain.simulate.host import SimulatedProcesses, spawn
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.simulate.process import Process
from zmqtrain.topology.links import links_of
from zmqtrain.topology.placement import RolePlacement, place
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.payload import Value

AGENT, TIMEOUT_S = "agent/h1", 600.0
GRACE_S = Timeouts.of(TIMEOUT_S).grace_s


class FakeCoordinator:
    """Lets an agent in, and writes down what it says, role by role."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.heard: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.gives_up = False
        """Whether to answer heartbeats as if this host had been given up."""
        for name in ("join", "heartbeat", "exited", "report", "halt", "leave"):
            endpoint.serve(f"membership.{name}", getattr(self, f"_{name}"))
        endpoint.serve("preempt", self._preempt)

    async def tell(self, what: str, value: Value) -> None:
        """Push something to the agent, as the coordinator does."""
        await self._endpoint.request(AGENT, f"membership.{what}", value, timeout=TIMEOUT_S)

    async def ask(self, method: str) -> None:
        """Ask the agent for something."""
        await self._endpoint.request(AGENT, method, timeout=TIMEOUT_S)

    async def _join(self, caller: PeerId, _incarnation: Value, address: Value) -> Value:
        self._endpoint.add_peer(caller, str(address))
        return self.view(1).to_value()

    async def _heartbeat(self, _caller: PeerId, _alive: Value) -> Value:
        return not self.gives_up

    async def _exited(
        self, _caller: PeerId, peer: Value, code: Value, report: Value, stopped: Value, _pid: Value, _again: Value
    ) -> Value:
        self.heard[str(peer)].append(("exited", code, report["type"] if isinstance(report, dict) else None, stopped))
        return 1

    async def _report(self, _caller: PeerId, events: Value, _incarnation: Value, _number: Value) -> Value:
        assert isinstance(events, list)
        for event in events:
            assert isinstance(event, dict)
            said = "a traceback" if event.get("quiet") else event["text"]
            self.heard[str(event["peer"])].append((event["kind"], said))
        return None

    async def _halt(self, caller: PeerId, reason: Value) -> Value:
        assert isinstance(reason, dict)
        self.heard[caller].append(("halts", reason["message"], reason["exit_code"]))
        return None

    async def _leave(self, caller: PeerId) -> Value:
        self.heard[caller].append(("left",))
        return None

    async def _preempt(self, caller: PeerId) -> Value:
        self.heard[caller].append(("asks for a checkpoint",))
        return None

    @staticmethod
    def view(version: int, **lost: str) -> View:
        return View(version, True, {AGENT: Member(AGENT, "", "h1", "agent", -1)}, dict(lost))


class SkippingLoop(asyncio.SelectorEventLoop):
    """A real loop whose clock may be put forward, so that nothing depends on how fast this machine is."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


async def when(true: Callable[[], object]) -> None:
    """Wait until it is true. Another process may be who makes it so, and it cannot set an event of this one."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@dataclass
class Scene:
    """What a test lets happen on one host."""

    coordinator: FakeCoordinator
    agent: Agent
    script: Path

    async def until(self, peer: PeerId, mark: str) -> None:
        """Wait until a role has noted this."""
        await when(lambda: mark in marks(self.script, peer))

    async def pass_s(self, seconds: float) -> None:
        """So much time passes."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, SkippingLoop):
            loop.skipped_s += seconds
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(seconds)


async def nothing(scene: Scene) -> None:
    """All goes its own way."""


async def halt(scene: Scene) -> None:
    """The run is to stop, and the role takes no notice of what the coordinator says."""
    await scene.until("worker/0", "began")
    await scene.coordinator.tell("halt", {"kind": "halt", "message": "enough"})
    await scene.pass_s(GRACE_S / 2)


async def halt_and_insist(scene: Scene) -> None:
    await halt(scene)
    await scene.until("worker/0", "ignored")
    await scene.pass_s(GRACE_S / 2)


async def halt_for_a_bad_loss(scene: Scene) -> None:
    """The roles may still keep a checkpoint: that takes longer."""
    await scene.until("worker/0", "began")
    await scene.coordinator.tell("halt", {"kind": "nan", "message": "the loss is nan"})
    await scene.pass_s(GRACE_S)
    scene.coordinator.heard["worker/0"].append(("the grace time is over",))
    await scene.pass_s(TIMEOUT_S)


async def end_by_a_signal(scene: Scene) -> None:
    await scene.until("worker/0", "began")
    scene.agent.stop()
    await scene.pass_s(GRACE_S / 2)


async def be_asked_to_leave(scene: Scene) -> None:
    await scene.until("worker/0", "began")
    await scene.coordinator.ask(WITHDRAW)
    await scene.pass_s(GRACE_S / 2)


async def be_preempted(scene: Scene) -> None:
    await scene.until("worker/0", "began")
    scene.agent.preempt()
    await when(lambda: scene.coordinator.heard[AGENT])
    scene.agent.stop()
    await scene.pass_s(GRACE_S / 2)


async def lose(scene: Scene) -> None:
    """The run goes on without a worker that stands still."""
    await scene.until("worker/0", "began")
    await scene.coordinator.tell("view", scene.coordinator.view(2, **{"worker/0": "it stands still"}).to_value())
    await scene.pass_s(GRACE_S)


async def give_up(scene: Scene) -> None:
    await scene.until("worker/0", "began")
    scene.coordinator.gives_up = True
    await scene.pass_s(Timeouts.of(TIMEOUT_S).heartbeat_s)


async def restart(scene: Scene) -> None:
    """Somebody restarts the only role, with which the host's part would be done."""
    await scene.until("worker/0", "began")
    for _ in range(2):  # the second time it is being done already
        scene.agent.restart(scene.agent._description.placement.workers[0], 0.1)
    await when(lambda: scene.coordinator.heard["worker/0"])
    scene.coordinator.heard["worker/0"].append(("it is away",))


async def restart_too_late(scene: Scene) -> None:
    """The host ends while the role is away."""
    await scene.until("worker/0", "began")
    scene.agent.restart(scene.agent._description.placement.workers[0], TIMEOUT_S)
    await when(lambda: scene.coordinator.heard["worker/0"])
    scene.agent.stop()
    await scene.pass_s(GRACE_S / 2)


async def end_without_it(scene: Scene) -> None:
    """The run ends while a process is new that has been started again."""
    await when(lambda: marks(scene.script, "worker/0").count("began") == 2)
    await scene.coordinator.tell("finish", None)
    await scene.pass_s(GRACE_S / 2)


@dataclass(frozen=True)
class Case:
    """Lives of the host's roles, what happens to them, and what is told."""

    lives: Mapping[str, list[str]]
    act: Callable[[Scene], Awaitable[None]]
    told: Mapping[str, list[tuple[Any, ...]]]
    restarts: int = 0
    raises: str | None = None
    """The error that the agent ends with; without one it leaves."""


KILLED = ("exited", -9, None, False)


def again(left: int) -> tuple[Any, ...]:
    more = {0: "for the last time", 1: "after that at most 1 time"}[left]
    return ("log", f"worker/0 was lost and is started again ({more})\n")


TOLD = ("halts", "the agent of h1 was told to end (SIGTERM)", 143)

CASES = {
    "all end well": Case({"worker/0": ["ends well"]}, nothing, {"worker/0": [("exited", 0, None, False)]}),
    "a worker is killed": Case({"worker/0": ["dies"]}, nothing, {"worker/0": [KILLED]}),
    "a worker's own fault": Case(
        {"worker/0": ["fails", "ends well"]},
        nothing,
        {"worker/0": [("log", "a traceback"), ("exited", 3, "TaskError", False)]},
        restarts=1,
    ),
    "killed and started again": Case(
        {"worker/0": ["dies", "loses another", "ends well"]},
        nothing,
        {
            "worker/0": [
                KILLED,
                again(1),
                ("log", "a traceback"),
                ("exited", 128, "PeerLostError", False),
                again(0),
                ("exited", 0, None, False),
            ]
        },
        restarts=2,
    ),
    "killed too often": Case({"worker/0": ["dies", "dies"]}, nothing, {"worker/0": [KILLED, again(0), KILLED]}, restarts=1),
    "a halt": Case({"worker/0": ["waits", "waits"]}, halt, {"worker/0": [("exited", 143, None, True)]}, restarts=1),
    "a role that ignores SIGTERM": Case(
        {"worker/0": ["ignores SIGTERM"]}, halt_and_insist, {"worker/0": [("exited", -9, None, True)]}
    ),
    "a bad loss": Case(
        {"worker/0": ["waits"]},
        halt_for_a_bad_loss,
        {"worker/0": [("the grace time is over",), ("exited", 143, None, True)]},
    ),
    "a signal to the agent": Case(
        {"worker/0": ["waits"]},
        end_by_a_signal,
        {"worker/0": [("exited", 143, None, True)], AGENT: [TOLD]},
    ),
    "a host that is asked to leave": Case(
        {"worker/0": ["waits"]},
        be_asked_to_leave,
        {"worker/0": [("exited", 143, None, True)]},  # by the coordinator, which needs none of its roles
    ),
    "a preempted host": Case(
        {"worker/0": ["waits"]},
        be_preempted,
        {"worker/0": [("exited", 143, None, True)], AGENT: [("asks for a checkpoint",), TOLD]},
    ),
    "a worker that the run goes on without": Case(
        {"worker/0": ["waits", "ends well"]}, lose, {"worker/0": [KILLED, again(0), ("exited", 0, None, False)]}, restarts=1
    ),
    "a worker that comes when the run is over": Case(
        {"worker/0": ["dies", "waits"]},
        end_without_it,
        {"worker/0": [KILLED, again(0), ("exited", 143, None, True)]},
        restarts=1,
    ),
    "a worker that is restarted": Case(
        {"worker/0": ["waits", "ends well"]}, restart, {"worker/0": [KILLED, ("it is away",), ("exited", 0, None, False)]}
    ),
    "a worker that is away when its host ends": Case(
        {"worker/0": ["waits", "ends well"]}, restart_too_late, {"worker/0": [KILLED], AGENT: [TOLD]}
    ),
    "a host that is given up": Case({"worker/0": ["waits"]}, give_up, {}, raises="PeerLostError"),
}


def description_of(case: Case, script: Path) -> RunDescription:
    topology = Topology.from_dict(
        {
            "job": {"name": "scripted", "timeout": TIMEOUT_S, "elastic": bool(case.restarts), "restarts": case.restarts},
            "hosts": [{"name": "h1", "slots": len(case.lives)}],
            "compute": {"groups": len(case.lives), "device": "cpu", "threads": 1},
            "exchange": {"kind": "gossip"},
        }
    )
    return RunDescription(topology, place(topology), "", data_path=str(script))


async def _play(case: Case, scene: Scene, life: asyncio.Task[None]) -> dict[str, list[tuple[Any, ...]]]:
    """Let it happen; what the agent has told, and what it ended with."""
    acting = asyncio.create_task(case.act(scene))
    heard = scene.coordinator.heard
    try:
        await asyncio.gather(life, acting)
    except ConnectivityError as error:
        heard[AGENT].append(("raises", type(error).__name__))
    return dict(heard)


async def told_by_the_real_agent(case: Case, script: Path) -> dict[str, list[tuple[Any, ...]]]:
    network, description = MemoryNetwork(), description_of(case, script)
    environment = RoleEnvironment(AGENT, "memory://coordinator", "secret", timeout_s=TIMEOUT_S)
    coordinator = FakeCoordinator(network.endpoint(COORDINATOR, net_settings(environment.timeouts, "")))
    endpoint = network.endpoint(AGENT, net_settings(environment.timeouts, ""))
    async with asyncio.timeout(2 * TIMEOUT_S), ForkServer("scripted_lives:main") as forks:
        link = await AgentLink.join(endpoint, coordinator_address=environment.coordinator, timeouts=environment.timeouts)
        agent = Agent(link, description, environment, ForkedProcesses(forks, description, None))
        told = await _play(case, Scene(coordinator, agent, script), asyncio.create_task(agent.run()))
        await endpoint.close()
    await coordinator._endpoint.close()
    return told


async def told_by_the_simulated_agent(case: Case, script: Path) -> dict[str, list[tuple[Any, ...]]]:
    loop, description = asyncio.get_running_loop(), description_of(case, script)
    network = SimulatedNetwork(links_of(description.topology), random.Random(1))
    cluster = Cluster(network, description.placement)
    environment = RoleEnvironment(AGENT, f"{COORDINATOR}@h1", "secret", timeout_s=TIMEOUT_S)
    coordinator = FakeCoordinator(network.endpoint(COORDINATOR, "h1", net_settings(environment.timeouts, "")))
    endpoint = network.endpoint(AGENT, "h1", net_settings(environment.timeouts, ""))
    kills: list[asyncio.Task[None]] = []

    async def become(role: RolePlacement, _environment: RoleEnvironment, _process: Process) -> None:
        await live(script, role.peer, lambda: outside(role.peer))

    def outside(peer: PeerId) -> None:
        kills.append(Process("outside").run(loop.create_task, cluster.kill(peer)))

    link = await AgentLink.join(endpoint, coordinator_address=coordinator._endpoint.address, timeouts=environment.timeouts)
    agent = Agent(link, description, environment, SimulatedProcesses(cluster, become))
    life = spawn(cluster, AGENT, "h1").run(loop.create_task, agent.run())
    told = await _play(case, Scene(coordinator, agent, script), life)
    for role in description.placement.roles:
        await cluster.kill(role.peer)
    await endpoint.close()
    await coordinator._endpoint.close()
    return told


@pytest.mark.parametrize("name", CASES)
def test_both_worlds_tell_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent / 'roles'}:{Path(__file__).parents[2]}")
    scripts = {}
    for world in ("real", "simulated"):
        (tmp_path / world).mkdir()
        scripts[world] = tmp_path / world / "script.json"
        scripts[world].write_text(json.dumps(case.lives))
    simulated = run_virtual(told_by_the_simulated_agent(case, scripts["simulated"]))
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        real = runner.run(told_by_the_real_agent(case, scripts["real"]))
    last = ("left",) if case.raises is None else ("raises", case.raises)
    expected = {**case.told, AGENT: [*case.told.get(AGENT, []), last]}
    assert simulated == expected
    assert real == expected
