"""Groups of several workers go on without those that are lost, and with those that come back, with model servers: whole runs in
simulated time. The auditor compares what servers hold with one process, bit by bit, and counts every batch
(`zmqtrain.simulate.slot_audit`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.worlds import POLICIES, STEPS, profile_file, run, teams_topology
from zmqtrain.run.faults import drop, kill, partition, pause, restart, slow
from zmqtrain.simulate.explore import explore
from zmqtrain.simulate.run import Options, simulate

#: Those that let groups go on by themselves.
APART = [policy for policy in POLICIES if policy != '"sync"']


@pytest.mark.parametrize("staleness", APART)
def test_a_group_goes_on_with_fewer_and_others_train_the_step_that_it_gave_up(staleness: str) -> None:
    """The auditor requires all batches of the epoch."""
    steps, views, _ = run(teams_topology(staleness, epochs=True), kill("worker/1", step=3))
    assert views == [("worker/0", "worker/2", "worker/3")]
    assert steps["worker/0"][:3] == [0, 1, 2]
    assert steps["worker/0"][-1] > 10


def test_the_first_of_a_group_is_lost_and_comes_back() -> None:
    steps, views, _ = run(teams_topology('"async"', epochs=True, job="restarts = 1"), kill("worker/0", step=3))
    assert views[-1] == ("worker/0", "worker/1", "worker/2", "worker/3")
    assert steps["worker/0"][-1] == steps["worker/1"][-1] > 10


def test_a_worker_that_waits_for_its_last_step_does_not_rest_if_others_leave_it_something_meanwhile() -> None:
    """One of its group is slow. The other group loses a worker in the meantime, and gets it back."""
    faults = slow("worker/1", 20.0, at=0.057), restart("h3", at=0.05, after=0.304)
    steps, _, _ = run(teams_topology('"async"', epochs=True, job="restarts = 2"), *faults)
    assert steps["worker/0"][-1] > 14


def test_workers_that_lose_each_other_find_the_servers_when_they_come_back() -> None:
    """Both fail by themselves, and nobody trains then: that is no end of training."""
    shape = teams_topology('"async"', groups=1, epochs=True, job="restarts = 1")
    # Meanwhile there is no coordinator that would say who is gone.
    run(shape, partition(["h1"], ["h2"], at=0.02, lasts=4.0), restart("coordinator", at=0.03, after=3.0))


def test_a_whole_group_is_lost_one_after_the_other_and_one_of_it_comes_back() -> None:
    faults = kill("worker/2", step=3), restart("worker/3", at=0.02, after=0.01)
    steps, views, _ = run(teams_topology("{ bound = 2 }", epochs=True), *faults)
    assert ("worker/0", "worker/1") in views
    assert views[-1] == ("worker/0", "worker/1", "worker/3")
    assert steps["worker/3"][-1] > 10


def test_one_of_each_group_of_three() -> None:
    faults = kill("worker/1", step=5), kill("worker/5", step=5), pause("worker/3", 60.0, at=0.02)
    run(teams_topology("{ bound = 0 }", size=3), *faults)


def test_the_only_group_goes_on_to_its_last_worker() -> None:
    steps, _, _ = run(teams_topology('"async"', groups=1, size=3), kill("worker/0", step=4), kill("worker/2", step=9))
    assert steps["worker/1"][-1] == STEPS - 1


def test_in_the_last_steps() -> None:
    run(teams_topology('"async"', epochs=True), kill("worker/3", step=9))
    run(teams_topology('"async"'), kill("worker/0", step=STEPS - 1))


def test_one_worker_evaluates_for_all_also_one_that_has_come_back(tmp_path: Path) -> None:
    profile = profile_file(tmp_path, evaluate_s=0.02, samples=20_000)
    shape = teams_topology("{ bound = 1 }", epochs=True, job="restarts = 1\neval_every = 1")
    shape = shape.model_copy(update={"compute": shape.compute.model_copy(update={"profile": profile})})
    found: set[str] = set()

    def hear(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        if any(event["kind"] == "eval" for event in events):
            found.add(peer)

    result = simulate(shape, options=Options(faults=[kill("worker/0", step=4)], on_report=hear))
    assert result.ending.status == "done", result.ending.error
    assert result.broken == []
    assert result.seconds < 20  # nobody waits for a time-out
    assert found >= {"worker/0", "worker/1"}


def test_one_that_comes_and_is_lost_again_while_a_member_is_slow() -> None:
    """Two of the others have announced their newest steps by then. The third one hears of both at once: the same are there."""
    cut = drop("worker/3", "server/0", at=0.00423)  # it still waits for this server's word about the first loss
    faults = cut, restart("worker/0", at=0.00558, after=0.0003), restart("h1", at=0.0162, after=0.01)
    shape = teams_topology('"sync"', job="restarts = 2")
    result = simulate(shape, options=Options(faults=faults))
    assert result.ending.status == "done", result.ending.error
    assert result.broken == []
    assert result.seconds < 5  # nobody waits for a time-out


def test_one_that_had_nothing_left_trains_what_another_one_leaves_in_the_last_step() -> None:
    """In step 8 two batches are left for three workers. The last one sits out, and gets the second one's batch after an update."""
    faults = kill("worker/3", step=3), kill("worker/1", step=8), kill("worker/0", step=9)
    result = simulate(teams_topology('"sync"', groups=4, size=1, epochs=True), options=Options(faults=faults))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error


def test_one_that_comes_when_all_is_trained_is_not_kept_waiting() -> None:
    faults = restart("worker/2", at=0.0710459, after=0.00927256), restart("worker/1", at=0.0898924, after=0.00927256)
    result = simulate(teams_topology('"sync"', groups=4, size=1, epochs=True), seed=106, options=Options(faults=faults))
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    assert result.seconds < 5


def test_until_servers_have_their_first_values_the_worker_that_gives_them_cannot_be_replaced() -> None:
    """The auditor knows. The run begins again."""
    shape = teams_topology('"sync"', groups=1, size=3, job="restarts = 2")
    reasons: list[str] = []
    options = Options(
        faults=[kill("worker/0", at=0.000712)],
        on_restart=lambda again, ending, step: reasons.append(str((ending.error or {}).get("message"))),
    )
    result = simulate(shape, options=options)
    assert ["lost worker/0 while waiting for its gradients" in reason for reason in reasons] == [True]
    assert (result.ending.status, result.broken) == ("done", [])


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_break_nothing(seed: int) -> None:
    shape = teams_topology(APART[seed % len(APART)], epochs=True, job="restarts = 1\neval_every = 4")
    assert [each.broken for each in explore(shape, [seed], faults="random") if each.broken] == []
