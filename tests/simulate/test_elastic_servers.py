"""Model servers go on without the workers that are lost, and with those that come back: whole runs in simulated time. The auditor
compares what servers hold with one process, bit by bit, and counts every batch (`zmqtrain.simulate.slot_audit`)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.simulate.worlds import POLICIES, STEPS, servers_topology
from zmqtrain.simulate.faults import Fault, kill, pause, restart
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.schema import Topology


def topology(staleness: str = '"async"', *, epochs: bool = False, job: str = "") -> Topology:
    return servers_topology(staleness, servers=2, epochs=epochs, job=f"elastic = true\n{job}")


class Heard:
    """What the roles of a run report."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}
        self.views: list[tuple[str, ...]] = []

    def __call__(self, peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "step":
                self.steps.setdefault(peer, []).append(event["step"])
            elif event["kind"] == "view" and peer == "worker/0":
                self.views.append(tuple(event["values"]["members"]))


def run(faults: Sequence[Fault], staleness: str = '"async"', *, seed: int = 1, **how: Any) -> tuple[Result, Heard]:
    heard = Heard()
    result = simulate(topology(staleness, **how), seed=seed, options=Options(faults=faults, on_report=heard))
    assert result.ending.status == "done", result.ending.error
    assert result.broken == []
    return result, heard


@pytest.mark.parametrize("staleness", POLICIES)
def test_the_others_train_what_a_lost_worker_has_left(staleness: str) -> None:
    """The auditor requires all batches of both epochs."""
    result, heard = run([kill("worker/1", step=8)], staleness, epochs=True)
    assert heard.views == [("worker/0", "worker/2")]
    assert len(heard.steps["worker/0"]) > 20
    assert result.seconds < 5  # nobody waits for a time-out


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
def test_the_first_worker_is_lost(staleness: str) -> None:
    _, heard = run([kill("worker/0", step=8)], staleness)
    assert heard.steps["worker/1"][:STEPS] == heard.steps["worker/2"][:STEPS] == list(range(STEPS))


def test_a_host_that_is_lost_without_a_word_holds_up_only_those_that_wait_for_it() -> None:
    for staleness in ('"async"', '"sync"'):
        result, _ = run([kill("h2", at=0.01)], staleness)
        assert result.seconds < 10


def test_a_worker_that_stands_still_is_gone_on_without() -> None:
    run([pause("worker/2", 60.0, at=0.01)], '"sync"', epochs=True)


@pytest.mark.parametrize("staleness", POLICIES)
def test_an_agent_starts_its_lost_worker_again(staleness: str) -> None:
    _, heard = run([kill("worker/1", step=5)], staleness, epochs=True, job="restarts = 1")
    assert [len(members) for members in heard.views] in ([2, 3], [3])
    assert heard.steps["worker/1"][-1] > 15


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
def test_all_old_workers_are_lost_one_after_the_other(staleness: str) -> None:
    faults = [restart(f"worker/{rank}", at=0.008 + 0.006 * rank, after=0.002) for rank in range(3)]
    run(faults, staleness, epochs=True)


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
def test_one_is_lost_when_the_others_have_trained(staleness: str) -> None:
    run([kill("worker/2", step=19)], staleness, epochs=True)
    run([kill("worker/2", step=STEPS - 1)], staleness)


def test_only_one_is_left() -> None:
    run([kill("worker/0", at=0.008), kill("worker/2", at=0.01)], '"sync"', epochs=True)


def faults_of(draw: random.Random) -> list[Fault]:
    """A few losses, pauses and returns at any moment of the run."""
    faults = []
    for _ in range(draw.randint(1, 4)):
        peer, at = f"worker/{draw.randrange(3)}", draw.uniform(0.002, 0.035)
        after = draw.choice((0.002, 0.005))
        faults.append(draw.choice((kill(peer, at=at), restart(peer, at=at, after=after), pause(peer, 0.01, at=at))))
    return faults


@pytest.mark.parametrize("seed", range(8))
def test_random_losses_break_nothing(seed: int) -> None:
    draw = random.Random(seed)
    faults = faults_of(draw)
    run(faults, POLICIES[seed % len(POLICIES)], seed=seed, epochs=seed % 8 < 4)


def test_a_lost_server_ends_the_run_and_is_named() -> None:
    result = simulate(topology(), options=Options(faults=[kill("server/1", at=0.01)]))
    assert result.ending.status == "failed"
    assert result.ending.error is not None
    assert "server/1" in str(result.ending.error["message"])
    assert result.seconds < 10
