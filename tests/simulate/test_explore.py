"""Random faults by seed: nothing breaks, a seed replays, and what does break is found."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.worlds import peers_topology, profile_file, topology_of
from zmqtrain.exchange.pushes import Pushes
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.run.faults import drain, partition, restart
from zmqtrain.server.shard import TensorEntry
from zmqtrain.server.staleness import StalenessMachine
from zmqtrain.simulate.explore import explore, faults_for, horizon_of, try_seed
from zmqtrain.simulate.faults import WEIGHTS, random_faults
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    return topology_of(profile_file(tmp_path), compute={"noise": {"kind": "exponential"}}, network={"jitter": "50 us"})


@pytest.mark.parametrize("staleness", ["async", "sync", {"bound": 1}], ids=str)
def test_random_faults_break_nothing(tmp_path: Path, staleness: Any) -> None:
    """A sample; `zmqtrain simulate FILE --seeds 1000 --faults random` tries as many as one likes."""
    topology = topology_of(profile_file(tmp_path), exchange={"staleness": staleness})
    trials = list(explore(topology, range(100, 105), faults="random"))
    assert [(trial.seed, trial.broken) for trial in trials if trial.broken] == []
    assert {trial.status for trial in trials} == {"done", "failed"}


def test_a_seed_replays(topology: Topology) -> None:
    horizon_s = horizon_of(topology)
    for seed in range(2):
        assert try_seed(seed, topology, "random", horizon_s) == try_seed(seed, topology, "random", horizon_s)


def test_seeds_make_many_kinds_of_schedules(topology: Topology) -> None:
    placement, timeouts = place(topology), Timeouts.of(20)
    kinds = {fault.kind for seed in range(60) for fault in random_faults(placement, timeouts, 1.0, random.Random(seed))}
    assert kinds == set(WEIGHTS)
    assert faults_for(topology, 1, "none", 0.0) == ()
    assert faults_for(topology, 1, "file", 0.0) is None


def test_now_and_then_a_host_leaves_an_elastic_run_without_servers() -> None:
    shape = peers_topology('kind = "averaging"\nevery = 4')
    faults = [fault for seed in range(30) for fault in faults_for(shape, seed, "random", 1.0) or ()]
    leaving = [fault.target for fault in faults if fault.kind == "drain"]
    assert 3 < len(leaving) < 15
    assert set(leaving) <= {"h1", "h2", "h3", "h4"}
    horizon_s = horizon_of(shape)
    alone = simulate(shape, options=Options(faults=[drain("h2", at=horizon_s / 2)]))
    assert (alone.ending.status, alone.broken) == ("done", [])


def test_a_host_that_leaves_while_its_launcher_dies_does_so_at_the_time_that_all_this_takes() -> None:
    """Asking a host to leave is done in the launcher's process, and ends with it. A dead one went on asking, for ten seconds, and
    where it got through to an agent, that agent no longer heard the new launcher."""
    shape = peers_topology('kind = "averaging"\nevery = 4')
    horizon_s = horizon_of(shape)
    cut = partition(["h3", "h4"], ["h1", "h2"], at=horizon_s / 4, lasts=2.0)
    death = restart(COORDINATOR, at=horizon_s / 3, after=0.01)
    for moment in (horizon_s / 3 - 0.001, horizon_s / 3 + 0.005):  # before it dies, and when there is none
        result = simulate(shape, options=Options(faults=[cut, death, drain("h3", at=moment)]))
        assert (result.ending.status, result.broken) == ("done", [])
        assert result.seconds < 6


class TestSabotage:
    """The auditor sees what it is there for: here something is broken on purpose."""

    def _broken(self, topology: Topology, words: str, seeds: range = range(12)) -> bool:
        """Whether one of the seeds finds what has these words; those behind it are not tried."""
        return any(words in text for trial in explore(topology, seeds, faults="random") for text in trial.broken)

    def test_an_update_that_is_applied_twice(self, topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
        update = TensorEntry.update
        calls = iter(range(1, 1 << 30))

        def twice(self: TensorEntry, *args: Any) -> None:
            update(self, *args)
            if next(calls) % 50 == 0:
                update(self, *args)
                self.version -= 1

        monkeypatch.setattr(TensorEntry, "update", twice)
        assert self._broken(topology, "server/", range(6))

    def test_a_bound_that_is_not_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        topology = topology_of(
            profile_file(tmp_path), exchange={"staleness": {"bound": 1}}, compute={"noise": {"kind": "exponential"}}
        )
        ready = StalenessMachine._ready

        def all_of_them(self: StalenessMachine) -> tuple[tuple[int, int], ...]:
            self._policy = replace(self._policy, bound=100)
            return ready(self)

        monkeypatch.setattr(StalenessMachine, "_ready", all_of_them)
        assert self._broken(topology, "the bound is 1")

    def test_a_worker_that_waits_for_ever(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        topology = topology_of(profile_file(tmp_path), job={"elastic": False})
        exchange = Pushes.go

        async def forgets(self: Pushes, bucket: Any, step: int, *rest: Any) -> Any:
            if step == 4 and self._settings.group == 2:
                await asyncio.get_running_loop().create_future()
            return await exchange(self, bucket, step, *rest)

        monkeypatch.setattr(Pushes, "go", forgets)
        assert self._broken(topology, "", range(2))
