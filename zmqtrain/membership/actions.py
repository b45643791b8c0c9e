"""The roster's decisions: actions for its coordinator to carry out, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from zmqtrain.errors import ConnectivityError, HostLostError, TaskError, ZmqTrainError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value

#: The exit code of a process that SIGTERM has told to end, and that has ended in good order.
TOLD_TO_END = 128 + 15
#: Identifies a request that waits for an answer.
Ticket: TypeAlias = int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a waiting request."""

    ticket: Ticket
    value: Value
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a waiting request with an error."""

    ticket: Ticket
    error: ZmqTrainError

    @property
    def reason(self) -> str:
        return str(self.error)


@dataclass(frozen=True, slots=True)
class Discard:
    """The process that made this request is gone: do not answer it. (An answer would reach its successor of the same name.)"""

    ticket: Ticket
    reason: str


@dataclass(frozen=True, slots=True)
class Push:
    """Send a member a message that it did not request."""

    to: PeerId
    what: Literal["view", "halt", "finish"]
    value: Value
    reason: str


@dataclass(frozen=True, slots=True)
class Meet:
    """A peer is a member now, and can be reached at this address."""

    peer: PeerId
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class Drop:
    """This peer will send nothing more: give up all waits for it."""

    peer: PeerId
    reason: str
    incarnation: int | None = None
    """Which of its processes, if it is known: another one may be here already."""


@dataclass(frozen=True, slots=True)
class Note:
    """An event for the run's record."""

    kind: Literal[
        "join",
        "running",
        "not elastic",
        "backup",
        "moves",
        "moved",
        "leave",
        "exit",
        "lost",
        "no workers",
        "halt",
        "finishing",
        "failed",
        "ended",
    ]
    values: Mapping[str, Value]
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The run is over."""

    outcome: Outcome
    reason: str


Action: TypeAlias = Answer | Refuse | Discard | Push | Meet | Drop | Note | End


@dataclass(frozen=True, slots=True)
class Failure:
    """One role or host that failed."""

    peer: PeerId
    host: str
    exit_code: int | None
    """The process's exit code as reported by its agent (negative: the signal that ended it); ``None`` if it did not exit."""
    reason: str
    report: Mapping[str, Any] | None
    """The error report that the role wrote, if it wrote one."""
    consequence: bool
    """Whether this is a consequence of another failure."""
    error: ZmqTrainError
    pid: int | None = None
    """The process's number on its host, as reported by its agent."""

    @property
    def of_user(self) -> bool:
        """Whether the role's own code has failed, as far as is known; otherwise its process, host or network was lost."""
        if self.report is not None:
            return int(self.report.get("exit_code", 0)) < ConnectivityError.exit_code
        return self.exit_code is not None and 0 <= self.exit_code < ConnectivityError.exit_code

    @staticmethod
    def of_exit(
        peer: PeerId,
        host: str,
        exit_code: int,
        report: Mapping[str, Any] | None,
        *,
        stopped: bool,
        left: bool,
        pid: int | None = None,
    ) -> Failure:
        """The failure of a role that exited unexpectedly. ``stopped``: its agent had ended it on purpose."""
        error: ZmqTrainError
        if report is not None:
            reason = f"{peer} failed: {report.get('message', 'no message')}"
            error = TaskError(reason)
        elif exit_code < 0:
            reason = f"{peer} on {host} was killed by {signal_name(-exit_code)}"
            error = HostLostError(reason)
        elif exit_code == 0 and not left:
            reason = f"{peer} on {host} ended without leaving the run (was sys.exit called?)"
            error = TaskError(reason)
        elif exit_code == TOLD_TO_END:
            reason = f"{peer} on {host} was told to end ({signal_name(TOLD_TO_END - 128)})"
            error = HostLostError(reason)
        else:
            reason = f"{peer} on {host} exited with code {exit_code} and left no error report; see its log"
            error = TaskError(reason)
        consequence = stopped if report is None else bool(report.get("consequence", False))
        return Failure(peer, host, exit_code, reason, report, consequence, error, pid)


def signal_name(number: int) -> str:
    """The name of a signal, like ``SIGKILL``."""
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    status: Literal["done", "halted", "failed"]
    reason: str
    failures: tuple[Failure, ...] = ()
    halt: Mapping[str, Any] | None = None
    """The reason given by the role that stopped the run."""
    losses: tuple[str, ...] = ()
    """The reasons for losses of workers after which the run continued."""

    @staticmethod
    def of(failure: str | None, failures: Sequence[Failure], halt: Mapping[str, Any] | None, losses: Sequence[str] = ()) -> Outcome:
        """The outcome of a run. ``failure``: the reason of the first failure, if there was one."""
        if failure is not None:
            return Outcome("failed", failure, tuple(failures), halt, tuple(losses))
        if halt is not None:
            return Outcome("halted", str(halt.get("message", "a role stopped the run")), (), halt, tuple(losses))
        return Outcome("done", "all roles have finished", losses=tuple(losses))

    @property
    def cause(self) -> Failure | None:
        """The failure to show: the first one that is not a consequence of another."""
        return next((failure for failure in self.failures if not failure.consequence), next(iter(self.failures), None))
