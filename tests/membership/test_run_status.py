"""What becomes of a run: which failure it ends for, and when it must have ended."""

from __future__ import annotations

import pytest

from zmqtrain.errors import HostLostError
from zmqtrain.membership.actions import Failure
from zmqtrain.membership.run_status import RunStatus
from zmqtrain.membership.state import State
from zmqtrain.topology.timeouts import Timeouts

TIMEOUTS = Timeouts.of(60.0)


def running() -> RunStatus:
    run = RunStatus(TIMEOUTS)
    run.go(State.RUNNING)
    return run


def loss_of(peer: str, exit_code: int | None = None) -> Failure:
    reason = f"{peer} is lost" if exit_code is None else f"{peer} was killed"
    return Failure(peer, "h0", exit_code, reason, None, consequence=False, error=HostLostError(reason))


def test_only_transitions_of_the_table_are_possible() -> None:
    with pytest.raises(AssertionError):
        RunStatus(TIMEOUTS).go(State.ENDED)


def test_the_first_failure_is_why_the_run_fails_and_what_members_are_told() -> None:
    run = running()
    told = run.fail(loss_of("worker/0"), now=5.0)
    assert told == {"kind": "failure", "peer": "worker/0", "message": "worker/0 is lost"}
    assert run.fail(loss_of("worker/1"), now=6.0) is None
    assert run.deadlines() == [5.0 + 2 * TIMEOUTS.grace_s]
    assert not run.is_late(5.0)
    assert run.is_late(5.0 + 2 * TIMEOUTS.grace_s)
    outcome = run.end()
    assert (outcome.status, outcome.reason, len(outcome.failures)) == ("failed", "worker/0 is lost", 2)
    assert run.ended() == outcome
    assert run.deadlines() == []


def test_the_end_of_a_process_explains_its_loss() -> None:
    run = running()
    run.fail(loss_of("worker/0"), now=0.0)
    assert not run.explain(loss_of("worker/1", -9))
    assert run.explain(loss_of("worker/0", -9))
    assert not run.explain(loss_of("worker/0", -9)), "it is explained already"
    assert run.end().reason == "worker/0 was killed"


def test_a_run_that_was_stopped_is_halted_unless_it_fails() -> None:
    run = running()
    assert run.halt("worker/0", {"message": "enough"}) == {"kind": "halt", "peer": "worker/0", "message": "enough"}
    assert run.halt_told is not None
    run.finish(now=1.0)
    assert run.deadlines() == [1.0 + TIMEOUTS.request_s]
    assert (run.end().status, run.end_reason) == ("halted", "enough")


def test_a_time_without_workers_ends_when_one_comes_or_with_the_run() -> None:
    run = running()
    run.wait_for_a_worker(loss_of("worker/0"), now=2.0)
    assert run.deadlines() == [2.0 + TIMEOUTS.join_s]
    assert run.may_still_come(2.0)
    assert not run.may_still_come(2.0 + TIMEOUTS.join_s)
    run.explain_last_worker(loss_of("worker/1", -9))
    assert run.last_worker is not None
    assert run.last_worker.reason == "worker/0 is lost"
    run.explain_last_worker(loss_of("worker/0", -9))
    assert run.last_worker.reason == "worker/0 was killed"
    run.a_worker_is_here()
    assert (run.last_worker, run.deadlines()) == (None, [])


def test_another_coordinator_gives_members_time_to_find_it() -> None:
    run = running()
    run.fail(loss_of("worker/0"), now=0.0)
    run.losses.append("worker/1 is lost")
    other = RunStatus(TIMEOUTS)
    other.restore(run.state.value, run.end_reason, run.reasons(), now=100.0)
    assert other.reasons() == run.reasons()
    assert other.end_reason == "worker/0 is lost"
    assert other.deadlines() == [100.0 + 2 * TIMEOUTS.grace_s + TIMEOUTS.lost_s]
