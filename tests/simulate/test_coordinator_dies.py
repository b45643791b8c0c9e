"""The coordinator dies at any moment, and another one goes on with its journal: no step is lost, and each event arrives once."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Mapping
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

DRAWS = int(os.environ.get("ZMQTRAIN_DRAWS", "3"))


class Records:
    """A journal in memory: what one process has written, another one reads."""

    def __init__(self, data: bytearray) -> None:
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


class Succession(Simulation):
    """A simulation whose coordinator dies at some moments, each with the seconds until another one begins."""

    def __init__(self, topology: Topology, options: Options, deaths: list[tuple[float, float]], alone_s: float) -> None:
        super().__init__(topology, options)
        self.deaths, self.alone_s, self.data = deaths, alone_s, bytearray()
        self.led = 0

    async def _live(self, loop: VirtualLoop, cluster: Cluster, injector: Injector) -> Outcome:
        description = RunDescription(self._topology, self._placement, os.getcwd(), alone_s=self.alone_s)
        agents: list[asyncio.Task[Any]] = []
        closing: list[asyncio.Task[None]] = []
        while True:
            self.led += 1
            settings = replace(net_settings(self._timeouts, ""), epoch=self.led)
            endpoint = cluster.network.endpoint(COORDINATOR, self._topology.hosts[0].name, settings)
            journal = Records(self.data)
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
            await asyncio.wait({leading, running}, return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            if self.deaths:
                at, away = self.deaths.pop(0)
                await asyncio.wait({leading}, timeout=max(0.0, at - loop.time()))
            else:
                await asyncio.wait({leading})
            if leading.done():
                break
            journal.superseded = True
            cluster.network.kill(COORDINATOR)
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
    topology: Topology, deaths: list[tuple[float, float]], folder: Path, alone_s: float = 600.0, task: Task | None = None
) -> tuple[Result, Any, int]:
    events: Counter[tuple[Any, ...]] = Counter()

    def report(peer: str, reported: list[dict[str, Any]]) -> None:
        for event in reported:
            if event["kind"] not in ("span", "log"):
                events[peer, event["kind"], event.get("step")] += 1

    options = Options(on_report=report, checkpoints=folder, task=task)
    topology = resolved(topology, 1)
    simulation = Succession(topology, options, list(deaths), alone_s)
    return run_virtual(simulation.run(), seed=1, limit_s=topology.simulation.time_limit), events, simulation.led


def job(kind: str, folder: Path) -> Topology:
    topology = topology_of(profile_file(folder))
    exchange = topology.exchange.model_dump(exclude_unset=True)
    document = topology.to_dict()
    document["exchange"] = {"kind": kind} if kind != "model_server" else exchange
    return Topology.from_dict(document)


@pytest.mark.parametrize("kind", ["model_server", "gossip", "allreduce"])
def test_no_step_is_lost_and_each_event_arrives_once(kind: str, tmp_path: Path) -> None:
    topology = job(kind, tmp_path)
    whole, expected, _ = life(topology, [], tmp_path / "whole")
    assert (whole.ending.status, whole.broken) == ("done", [])
    steps = {key: count for key, count in expected.items() if key[1] == "step"}
    assert set(steps.values()) == {1}
    leaders = 0
    for draw in range(DRAWS):
        chance = random.Random(f"{kind} {draw}")
        times = sorted(chance.uniform(0.1, 1.05) * whole.seconds for _ in range(chance.choice([1, 1, 2])))
        deaths = [(at, chance.choice([0.01, 1.0, 8.0, 30.0, 90.0])) for at in times]
        result, events, led = life(topology, deaths, tmp_path / str(draw))
        assert (result.ending.status, result.ending.error, result.broken) == ("done", None, []), (draw, deaths, led)
        assert {key: count for key, count in events.items() if key[1] == "step"} == steps, (draw, deaths)
        leaders += led
    assert leaders > DRAWS  # some of them did die


def test_nobody_comes_back(tmp_path: Path) -> None:
    """Everything ends by itself once the time alone is over."""
    topology = job("model_server", tmp_path)
    whole, _, _ = life(topology, [], tmp_path / "whole")
    result, _, led = life(topology, [(whole.seconds / 2, 500.0)], tmp_path / "alone", alone_s=100.0)
    assert led == 2
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
    whole, _, _ = life(topology, [], tmp_path / "whole", task=recipe.task())
    assert (whole.ending.status, whole.broken) == ("done", []), whole.ending.error
    expected = find_checkpoints(tmp_path / "whole")
    for draw in range(max(1, DRAWS // 2)):
        chance = random.Random(f"{exchange} {draw}")
        deaths = [(chance.uniform(0.1, 1.0) * whole.seconds, chance.choice([0.01, 1.0, 30.0]))]
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
