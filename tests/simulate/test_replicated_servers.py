"""Model servers whose shards are kept twice: whole runs in simulated time go on without those that are lost. The auditor compares
what is served in the end with one process, bit by bit, and counts every batch and every answer
(`zmqtrain.simulate.slot_audit`)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.simulate.test_training import Recipe, topology_of
from tests.simulate.worlds import POLICIES, servers_topology
from zmqtrain.run.faults import Fault, kill, pause, restart
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology


def topology(staleness: str, *, servers: int = 3, epochs: bool = False, job: str = "") -> Topology:
    return servers_topology(staleness, servers=servers, epochs=epochs, job=job, exchange="replicas = 1")


def run(faults: Sequence[Fault], staleness: str = '"async"', *, seed: int = 1, **how: Any) -> tuple[Result, list[tuple[str, int]]]:
    """Returns also which server took over which shard."""
    took: list[tuple[str, int]] = []

    def hear(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        took.extend((peer, event["values"]["shard"]) for event in events if event["kind"] == "took over")

    result = simulate(topology(staleness, **how), seed=seed, options=Options(faults=faults, on_report=hear))
    assert result.broken == []
    return result, took


def survives(faults: Sequence[Fault], staleness: str = '"async"', **how: Any) -> list[tuple[str, int]]:
    result, took = run(faults, staleness, **how)
    assert result.ending.status == "done", result.ending.error
    assert result.seconds < 15
    return took


@pytest.mark.parametrize("staleness", POLICIES)
def test_a_backup_serves_at_once(staleness: str) -> None:
    assert survives([kill("server/1", at=0.012)], staleness, epochs=True) == [("server/2", 1)]


def test_two_servers_are_lost_one_after_the_other_and_the_last_one_serves_all() -> None:
    took = survives([kill("server/1", at=0.008), kill("server/2", at=0.016)], '"sync"', epochs=True)
    assert {shard for _, shard in took} == {1, 2}


def test_with_a_host_a_worker_and_its_server_are_lost() -> None:
    survives([kill("s1", at=0.01), kill("worker/0", at=0.01)], '"async"', epochs=True)


def test_one_that_stands_still_is_gone_on_without() -> None:
    survives([pause("server/0", 60.0, at=0.01)], '"sync"')


def test_a_new_process_becomes_the_backup() -> None:
    took = survives([restart("server/0", at=0.006, after=0.003), kill("server/1", at=0.02)], '"async"', servers=2, epochs=True)
    # It gets a shard of server/1, which had taken over before, and has not lived to say so; and the other one when that is lost.
    assert sorted(took) == [("server/0", 0), ("server/0", 1)]


def test_if_both_are_lost_the_run_ends_and_names_the_last() -> None:
    result, _ = run([kill("server/0", at=0.01), kill("server/1", at=0.0102)], servers=2)
    assert result.ending.status == "failed"
    assert result.ending.error is not None
    assert "server/1" in str(result.ending.error["message"])
    assert result.seconds < 10


def test_before_it_has_a_backup_a_server_is_not_spared() -> None:
    result, _ = run([kill("server/0", at=0.001)])
    assert result.ending.status == "failed"


def faults_of(draw: random.Random, servers: int) -> list[Fault]:
    """Losses of some servers, and perhaps of a worker, at any moment after the first copies."""
    faults, at = [], draw.uniform(0.0025, 0.03)
    for victim in draw.sample(range(servers), draw.randint(1, servers - 1)):
        peer = f"server/{victim}"
        faults.append(draw.choice((kill(peer, at=at), restart(peer, at=at, after=0.003), pause(peer, 60.0, at=at))))
        at += draw.uniform(0.0, 0.01)
    worker, at = f"worker/{draw.randrange(3)}", draw.uniform(0.003, 0.03)
    return [*faults, *draw.choice(([], [kill(worker, at=at)], [restart(worker, at=at, after=0.002)]))]


@pytest.mark.parametrize("seed", range(6))
def test_random_losses_break_nothing(seed: int) -> None:
    """Where nobody has a shard any more, the run may end; the auditor knows."""
    draw = random.Random(seed)
    servers = draw.choice((2, 3, 4))
    job = draw.choice(("", "eval_every = 5", "checkpoint_every = 4\neval_every = 6"))
    run(faults_of(draw, servers), POLICIES[seed % len(POLICIES)], seed=seed, servers=servers, epochs=draw.random() < 0.5, job=job)


def test_it_ends_although_the_last_part_of_a_checkpoint_is_on_disk_after_the_others_have_ended(tmp_path: Path) -> None:
    """The server that has taken over writes two parts, and its backup has ended before the second one is on disk."""
    hosts = [{"name": "h[1-3]", "slots": 1}, {"name": "s[1-3]", "slots": 1}]
    exchange = {"shards": 3, "replicas": 1, "split_size": "256 B"}
    job = {"steps": 14, "checkpoint_every": 3}
    asked = topology_of(tmp_path, 3, 1, hosts=hosts, exchange=exchange, job=job)
    recipe = Recipe()
    recipe._optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # type: ignore[method-assign,assignment]
    faults, checkpoints = [kill("server/1", at=0.2528)], tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    result = simulate(asked, options=Options(task=recipe.task(), checkpoints=checkpoints, faults=faults, preempt_at_s=0.4634))
    assert result.broken == []
    assert result.seconds < 1
