"""How a run ended: the status, the exit code and the error that follow from its membership's outcome."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zmqtrain.errors import HostLostError, SshError
from zmqtrain.membership.actions import Failure, Outcome
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.endpoint import PeerId
from zmqtrain.run.preemption import INTERRUPTED, PREEMPTED
from zmqtrain.run.report import report_of, root_of


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended."""

    status: str
    exit_code: int
    error: dict[str, Any] | None = None
    lost_hosts: tuple[str, ...] = ()
    """The hosts that were lost, or could not be reached, if that is why it ended."""


def ending_of(outcome: Outcome, *, stopped: bool = False, interrupted: bool = False) -> Ending:
    """The ending of a run whose membership had this outcome.

    ``stopped``: all workers have stopped at a common step on request. ``interrupted``: the user asked the run to end, which does
    not matter if it had ended by itself before.
    """
    done = outcome.status == "done"
    if interrupted and (stopped or not done):
        return Ending("interrupted", INTERRUPTED)
    if done:
        return Ending("preempted", PREEMPTED) if stopped else Ending("done", 0)
    cause, halt = outcome.cause, outcome.halt
    if halt is not None and halt.get("kind") == "nan" and (cause is None or cause.consequence):
        # The worker with the bad loss did not report a failure: the reason that it gave when it stopped the run is used instead.
        report = {**halt, "peer": halt.get("peer", COORDINATOR)}
        return Ending("failed", int(report["exit_code"]), report)
    if cause is not None and not (cause.consequence and outcome.halt):
        report = _report_of_failure(cause)
        lost = (cause.host,) if cause.peer.startswith("agent/") else ()
        return Ending("failed", int(report["exit_code"]), report, lost)
    report = dict(outcome.halt or {"message": outcome.reason})
    report.setdefault("exit_code", 64)
    return Ending("halted", int(report["exit_code"]), report)


def ending_by(error: BaseException, peer: PeerId) -> Ending:
    """The ending of a run that this error of the launcher's own side has ended. ``peer``: who stands in the report."""
    report = report_of(error, peer)
    root = root_of(error)
    lost: tuple[str, ...] = ()
    if isinstance(root, HostLostError):
        lost = tuple(dict.fromkeys(fault.host for fault in root.faults if fault.passing))
    elif isinstance(root, SshError) and not root.lasting:
        lost = (root.host,)
    return Ending("failed", int(report["exit_code"]), report, lost)


def _report_of_failure(failure: Failure) -> dict[str, Any]:
    if failure.report is not None:
        return dict(failure.report)
    error = failure.error
    report = report_of(error, failure.peer)
    code = failure.exit_code
    if isinstance(error, HostLostError) and code is not None:  # a signal has ended it, or told it to end
        report["exit_code"] = 128 - code if code < 0 else code
    return {**report, "host": failure.host, "pid": failure.pid, "traceback": ""}
