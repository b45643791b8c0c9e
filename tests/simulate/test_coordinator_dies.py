"""The coordinator dies at any moment, and another one goes on with its journal: no step is lost, and each event arrives once."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulate import test_training as training
from tests.simulate.worlds import profile_file, servers_topology, topology_of
from zmqtrain import Task
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.run.faults import pause, restart
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.simulate.succession import Death
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints

#: When so many records are written all members know that all have joined.
FIRST_RECORD = 6
DRAWS = int(os.environ.get("ZMQTRAIN_DRAWS", "3"))


def draw_deaths(chance: random.Random, whole: Result, most: int = 2) -> list[Death]:
    """``whole``: an undisturbed run. A death among its first records would be one before all have joined."""
    deaths: list[Death] = []
    for _ in range(chance.randint(1, most)):
        moment = chance.choice([chance.uniform(0.1, 1.05) * whole.seconds, chance.randint(FIRST_RECORD, whole.records)])
        deaths.append((moment, chance.choice([0.01, 1.0, 8.0, 30.0, 90.0])))
    return deaths


def life(
    topology: Topology, deaths: list[Death], folder: Path, alone_s: float = 600.0, task: Task | None = None
) -> tuple[Result, Any]:
    events: Counter[tuple[Any, ...]] = Counter()

    def report(peer: str, reported: list[dict[str, Any]]) -> None:
        for event in reported:
            if event["kind"] not in ("span", "log"):
                events[peer, event["kind"], event.get("step")] += 1

    topology = topology.model_copy(update={"job": topology.job.model_copy(update={"alone": alone_s})})
    options = Options(on_report=report, checkpoints=folder, task=task, launcher_deaths=deaths)
    return simulate(topology, seed=1, options=options), events


def job(kind: str, folder: Path) -> Topology:
    topology = topology_of(profile_file(folder))
    exchange = topology.exchange.model_dump(exclude_unset=True)
    document = topology.to_dict()
    document["exchange"] = {"kind": kind} if kind != "model_server" else exchange
    return Topology.from_dict(document)


@pytest.mark.parametrize("kind", ["model_server", "gossip", "allreduce"])
def test_no_step_is_lost_and_each_event_arrives_once(kind: str, tmp_path: Path) -> None:
    topology = job(kind, tmp_path)
    whole, expected = life(topology, [], tmp_path / "whole")
    assert (whole.ending.status, whole.broken) == ("done", [])
    steps = {key: count for key, count in expected.items() if key[1] == "step"}
    assert set(steps.values()) == {1}
    leaders = 0
    for draw in range(DRAWS):
        chance = random.Random(f"{kind} {draw}")
        deaths = draw_deaths(chance, whole)
        result, events = life(topology, deaths, tmp_path / str(draw))
        assert (result.ending.status, result.ending.error, result.broken) == ("done", None, []), (draw, deaths)
        assert {key: count for key, count in events.items() if key[1] == "step"} == steps, (draw, deaths)
        leaders += result.launchers
    assert leaders > DRAWS  # some of them did die


def test_nobody_comes_back(tmp_path: Path) -> None:
    """Everything ends by itself once the time alone is over."""
    topology = job("model_server", tmp_path)
    whole, _ = life(topology, [], tmp_path / "whole")
    result, _ = life(topology, [(whole.seconds / 2, 500.0)], tmp_path / "alone", alone_s=100.0)
    assert result.launchers == 2
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
    whole, _ = life(topology, [], tmp_path / "whole", task=recipe.task())
    assert (whole.ending.status, whole.broken) == ("done", []), whole.ending.error
    expected = find_checkpoints(tmp_path / "whole")
    for draw in range(max(1, DRAWS // 2)):
        chance = random.Random(f"{exchange} {draw}")
        deaths = draw_deaths(chance, whole, most=1)
        folder = tmp_path / str(draw)
        result, _ = life(topology, deaths, folder, task=recipe.task())
        assert (result.ending.status, result.ending.error, result.broken) == ("done", None, []), (draw, deaths)
        found = find_checkpoints(folder)
        assert found[-1].name == expected[-1].name == "step-00000012", (draw, deaths)
        assert not [path for path in folder.iterdir() if path not in found]
        if exchange.get("kind") != "gossip":  # which partner's weights come first is a matter of time
            for name, mine in Checkpoint(found[-1]).part("model")[0].items():
                its = Checkpoint(expected[-1]).part("model")[0][name]
                torch.testing.assert_close(mine.tensor, its.tensor, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("victim", ["server/0", "worker/1"])
def test_one_that_stands_still_since_before_is_gone_on_without(victim: str) -> None:
    """The next coordinator never has a link to it, so none is lost."""
    shape = servers_topology('"async"', servers=3, exchange="replicas = 1")
    faults = [pause(victim, 60.0, at=0.010), restart(COORDINATOR, at=0.012, after=0.01)]
    result = simulate(shape, options=Options(faults=faults))
    assert (result.ending.status, result.broken) == ("done", [])
    assert result.seconds < 10
