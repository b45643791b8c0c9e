"""The coordinator dies at any moment, and another one goes on with its journal: no step is lost, and each event arrives once."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulate import test_training as training
from tests.simulate.worlds import profile_file, topology_of
from zmqtrain import Task
from zmqtrain.membership.actions import Outcome
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import net_settings
from zmqtrain.membership.journal import Ledger, apply, encode, replay
from zmqtrain.run.assembly import Assembly, Listeners
from zmqtrain.simulate.clock import VirtualLoop, run_virtual
from zmqtrain.simulate.cluster import Cluster
from zmqtrain.simulate.host import Plan, SimulatedHost, spawn
from zmqtrain.simulate.inject import Injector
from zmqtrain.simulate.run import Options, Result, Simulation, _torch_device, resolved
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints
from zmqtrain.wire.payload import Value

#: When so many records are written all members know that all have joined.
FIRST_RECORD = 6
DRAWS = int(os.environ.get("ZMQTRAIN_DRAWS", "3"))


class Records:
    """A journal in memory: what one process has written, another one reads."""

    def __init__(self, data: bytearray, die_after: int | None, die: Callable[[], None]) -> None:
        """``die()`` is called right after so many records."""
        self.count, self._die_after, self._die = 0, die_after, die
        self.superseded = False  # once its process is dead, which cannot even clear up
        self.data, self.ledger = data, replay(bytes(data))[0]
        self._staged: Ledger = {}

    def stage(self, changes: Mapping[str, Value]) -> None:
        self._staged.update(changes)

    def write(self, changes: Mapping[str, Value], *, durable: bool) -> None:
        new = {**self._staged, **changes}
        self._staged.clear()
        if self.superseded:
            return
        self.data += encode(new)
        apply(self.ledger, new)
        self.count += 1
        if self.count == self._die_after:
            self.superseded = True
            self._die()


def draw_deaths(chance: random.Random, whole: Result, records: int, most: int = 2) -> list[tuple[float | int, float]]:
    """``records``: of an undisturbed run. A death among the first ones would be one before all have joined."""
    deaths: list[tuple[float | int, float]] = []
    for _ in range(chance.randint(1, most)):
        moment = chance.choice([chance.uniform(0.1, 1.05) * whole.seconds, chance.randint(FIRST_RECORD, records)])
        deaths.append((moment, chance.choice([0.01, 1.0, 8.0, 30.0, 90.0])))
    return deaths


class Succession(Simulation):
    """A simulation whose coordinator dies at some moments, each with the seconds until another one begins.

    A moment is a time, or a number of records: it dies when its journal has so many, before anybody has heard of the last one."""

    def __init__(self, topology: Topology, options: Options, deaths: list[tuple[float | int, float]], alone_s: float) -> None:
        super().__init__(topology, options)
        self.deaths, self.alone_s, self.data = deaths, alone_s, bytearray()
        self.led = self.records = 0

    async def _live(self, loop: VirtualLoop, cluster: Cluster, injector: Injector) -> Outcome:
        description = RunDescription(self._topology, self._placement, os.getcwd(), alone_s=self.alone_s)
        agents: list[asyncio.Task[Any]] = []
        closing: list[asyncio.Task[None]] = []
        while True:
            self.led += 1
            settings = replace(net_settings(self._timeouts, ""), epoch=self.led)
            endpoint = cluster.network.endpoint(COORDINATOR, self._topology.hosts[0].name, settings)
            dead = asyncio.Event()

            def die(dead: asyncio.Event = dead) -> None:
                cluster.network.kill(COORDINATOR)
                dead.set()

            moment, away = self.deaths.pop(0) if self.deaths else (None, 0.0)
            journal = Records(self.data, moment if isinstance(moment, int) else None, die)
            assembly = Assembly(
                endpoint,
                description,
                checkpoints=self._options.checkpoints,
                listeners=Listeners(self._event, self._report, self._options.on_checkpoint),
                journal=journal,
            )
            if not agents:
                plan = Plan(
                    description=assembly.description,
                    cluster=cluster,
                    token="",
                    coordinator=endpoint.address,
                    task=self._options.task,
                    make_device=_torch_device if self._topology.trains else None,
                    audit=self._hear(injector),
                )
                for host in self._topology.hosts:
                    agent = spawn(cluster, f"agent/{host.name}", host.name)
                    agents.append(agent.run(loop.create_task, SimulatedHost(plan, host.name).run()))
                    agents[-1].set_name(f"agent/{host.name}")
            leading = asyncio.create_task(assembly.run(), name="coordinator")
            running = asyncio.create_task(assembly.coordinator.running.wait(), name="all have joined")
            dying = asyncio.create_task(dead.wait(), name="the coordinator's death")
            await asyncio.wait({leading, running, dying}, return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            limit = max(0.0, moment - loop.time()) if isinstance(moment, float) else None
            await asyncio.wait({leading, dying}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            self.records = journal.count
            if leading.done() and not dead.is_set():
                break
            journal.superseded = True
            die()
            leading.cancel()
            await asyncio.wait({leading})
            closing.append(asyncio.create_task(endpoint.close(), name="close a dead endpoint"))
            await asyncio.sleep(away)
        await self._wait_for_agents(cluster, agents)
        await endpoint.close()
        if closing:
            await asyncio.wait(closing)
        return leading.result()


def life(
    topology: Topology, deaths: list[tuple[float | int, float]], folder: Path, alone_s: float = 600.0, task: Task | None = None
) -> tuple[Result, Any, Succession]:
    events: Counter[tuple[Any, ...]] = Counter()

    def report(peer: str, reported: list[dict[str, Any]]) -> None:
        for event in reported:
            if event["kind"] not in ("span", "log"):
                events[peer, event["kind"], event.get("step")] += 1

    options = Options(on_report=report, checkpoints=folder, task=task)
    topology = resolved(topology, 1)
    simulation = Succession(topology, options, list(deaths), alone_s)
    return run_virtual(simulation.run(), seed=1, limit_s=topology.simulation.time_limit), events, simulation


def job(kind: str, folder: Path) -> Topology:
    topology = topology_of(profile_file(folder))
    exchange = topology.exchange.model_dump(exclude_unset=True)
    document = topology.to_dict()
    document["exchange"] = {"kind": kind} if kind != "model_server" else exchange
    return Topology.from_dict(document)


@pytest.mark.parametrize("kind", ["model_server", "gossip", "allreduce"])
def test_no_step_is_lost_and_each_event_arrives_once(kind: str, tmp_path: Path) -> None:
    topology = job(kind, tmp_path)
    whole, expected, undisturbed = life(topology, [], tmp_path / "whole")
    assert (whole.ending.status, whole.broken) == ("done", [])
    steps = {key: count for key, count in expected.items() if key[1] == "step"}
    assert set(steps.values()) == {1}
    leaders = 0
    for draw in range(DRAWS):
        chance = random.Random(f"{kind} {draw}")
        deaths = draw_deaths(chance, whole, undisturbed.records)
        result, events, simulation = life(topology, deaths, tmp_path / str(draw))
        assert (result.ending.status, result.ending.error, result.broken) == ("done", None, []), (draw, deaths)
        assert {key: count for key, count in events.items() if key[1] == "step"} == steps, (draw, deaths)
        leaders += simulation.led
    assert leaders > DRAWS  # some of them did die


def test_nobody_comes_back(tmp_path: Path) -> None:
    """Everything ends by itself once the time alone is over."""
    topology = job("model_server", tmp_path)
    whole, _, _ = life(topology, [], tmp_path / "whole")
    result, _, simulation = life(topology, [(whole.seconds / 2, 500.0)], tmp_path / "alone", alone_s=100.0)
    assert simulation.led == 2
    assert result.ending.status == "failed"
    assert "silent" in str(result.ending.error)


@pytest.mark.parametrize(
    ("exchange", "every"),
    [({"kind": "allreduce", "staleness": "async"}, 3), ({"shards": 2}, "0.2 s"), ({"kind": "gossip", "staleness": "async"}, 4)],
    ids=["allreduce", "servers", "gossip"],
)
def test_checkpoints_and_the_model_are_those_of_a_run_that_was_never_disturbed(
    exchange: dict[str, Any], every: int | str, tmp_path: Path
) -> None:
    topology = training.topology_of(tmp_path, 4, 1, job={"steps": 12, "checkpoint_every": every}, exchange=exchange)
    recipe = training.Recipe()
    whole, _, undisturbed = life(topology, [], tmp_path / "whole", task=recipe.task())
    assert (whole.ending.status, whole.broken) == ("done", []), whole.ending.error
    expected = find_checkpoints(tmp_path / "whole")
    for draw in range(max(1, DRAWS // 2)):
        chance = random.Random(f"{exchange} {draw}")
        deaths = draw_deaths(chance, whole, undisturbed.records, most=1)
        folder = tmp_path / str(draw)
        result, _, _ = life(topology, deaths, folder, task=recipe.task())
        assert (result.ending.status, result.ending.error, result.broken) == ("done", None, []), (draw, deaths)
        found = find_checkpoints(folder)
        assert found[-1].name == expected[-1].name == "step-00000012", (draw, deaths)
        assert not [path for path in folder.iterdir() if path not in found]
        if exchange.get("kind") != "gossip":  # which partner's weights come first is a matter of time
            for name, mine in Checkpoint(found[-1]).part("model")[0].items():
                its = Checkpoint(expected[-1]).part("model")[0][name]
                torch.testing.assert_close(mine.tensor, its.tensor, rtol=1e-12, atol=1e-13)
