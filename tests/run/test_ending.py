"""How a run ended, from what its membership came to."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.errors import ConnectivityError, TaskError
from zmqtrain.membership.actions import Failure, Outcome
from zmqtrain.run.ending import ending_of

NAN = {
    "kind": "nan", "rank": 1, "step": 2, "peer": "worker/1", "message": "the loss is nan", "type": "NonFiniteLossError",
    "verdict": "user code", "exit_code": 3,
}  # fmt: skip
REPORT = {"peer": "worker/1", "type": "NonFiniteLossError", "message": "the loss is nan", "verdict": "user code", "exit_code": 3}


def _failure(peer: str, code: int, report: dict[str, Any] | None, *, consequence: bool) -> Failure:
    error = ConnectivityError("lost") if consequence else TaskError("failed")
    return Failure(peer, "h1", code, "it failed", report, consequence, error)


@pytest.mark.parametrize(
    "failures",
    [
        (),
        (_failure("worker/1", 3, REPORT, consequence=False),),
        (_failure("worker/0", -15, None, consequence=True),),
        (_failure("worker/0", 128, {**REPORT, "exit_code": 128, "type": "PeerLostError"}, consequence=True),),
        (_failure("worker/0", -9, None, consequence=True), _failure("worker/1", 3, REPORT, consequence=False)),
    ],
    ids=["nobody says", "who had it", "ended by its agent", "lost others", "both"],
)
def test_a_bad_loss_ends_a_run_in_the_same_way_whoever_is_first_to_say_so(failures: tuple[Failure, ...]) -> None:
    outcome = Outcome.of("it failed" if failures else None, failures, NAN)
    ending = ending_of(outcome)
    assert (ending.status, ending.exit_code) == ("failed", 3)
    assert ending.error is not None
    assert {key: ending.error[key] for key in ("type", "verdict", "peer")} == {
        key: REPORT[key] for key in ("type", "verdict", "peer")
    }


@pytest.mark.parametrize(
    ("failed", "stopped", "interrupted", "status", "exit_code"),
    [
        (False, False, False, "done", 0),
        (False, True, False, "preempted", 138),
        (False, True, True, "interrupted", 130),
        (False, False, True, "done", 0),  # it had come to its end by itself
        (True, False, True, "interrupted", 130),
        (True, False, False, "failed", 3),
    ],
)
def test_who_asked_to_stop_decides_what_a_run_is_called(
    failed: bool, stopped: bool, interrupted: bool, status: str, exit_code: int
) -> None:
    failures = (_failure("worker/1", 3, REPORT, consequence=False),) if failed else ()
    outcome = Outcome.of("it failed" if failed else None, failures, None)
    ending = ending_of(outcome, stopped=stopped, interrupted=interrupted)
    assert (ending.status, ending.exit_code) == (status, exit_code)
