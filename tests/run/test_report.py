"""Error reports: which error is the one to show, and what stands about it."""

from __future__ import annotations

import json

import pytest

from zmqtrain.errors import PeerLostError, TaskError, UsageError
from zmqtrain.run.report import LONGEST_TRACEBACK, headline, report_of, root_of


def test_an_error_of_the_users_code() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    report = report_of(caught.value, "worker/3")
    assert (report["peer"], report["verdict"], report["exit_code"]) == ("worker/3", "user code", 3)
    assert not report["consequence"]
    assert "1 / 0" in report["traceback"]
    assert headline(report) == "worker/3 failed (user code): ZeroDivisionError: division by zero"
    json.dumps(report)


@pytest.mark.parametrize(
    ("error", "code", "verdict", "consequence"),
    [
        (TaskError("no model"), 3, "user code", False),
        (UsageError("no such device"), 2, "topology", False),
        (PeerLostError("worker/1", "gone"), 128, "network", True),
        (KeyboardInterrupt(), 3, "user code", False),
    ],
)
def test_errors_of_ours_say_their_code_themselves(error: BaseException, code: int, verdict: str, consequence: bool) -> None:
    report = report_of(error, "worker/0")
    assert (report["exit_code"], report["verdict"], report["consequence"]) == (code, verdict, consequence)
    assert report["message"]


def test_the_root_of_a_group_is_what_is_no_consequence() -> None:
    lost, wrong = PeerLostError("worker/1", "gone"), ValueError("wrong")
    assert root_of(ExceptionGroup("", [lost, ExceptionGroup("", [wrong])])) is wrong
    assert root_of(ExceptionGroup("", [lost])) is lost
    assert root_of(wrong) is wrong


def test_a_long_traceback_is_cut_in_its_middle() -> None:
    error = ValueError("x" * 50_000)
    report = report_of(error, "worker/0")
    assert len(report["traceback"]) < LONGEST_TRACEBACK + 200
    assert "left out" in report["traceback"]
