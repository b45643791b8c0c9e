"""Every error zmqtrain raises on purpose.

The tree is drawn by what a caller can do about an error::

    ZmqTrainError
    ├── UsageError                 fix the command or the topology file        exit 2
    │   ├── TopologyError          (all faults of a file at once)
    │   ├── PlacementError
    │   ├── DifferentModelError    divided over a grid, the model is another one
    │   └── HostsError             hosts lack what the run needs
    ├── TaskError                  fix the task's own code                     exit 3
    │   └── NonFiniteLossError
    ├── ProtocolError              the peer violates the protocol              exit 65
    │   ├── WireError              bytes that are not a zmqtrain message
    │   ├── VersionMismatchError   the peer runs another release
    │   └── RunTokenError          the peer belongs to another run
    ├── CheckpointError            a checkpoint is missing, torn or foreign    exit 66
    ├── PortInUseError             choose another port                         exit 67
    ├── SupersededError            another launcher leads the run now          exit 73
    ├── HostMemoryError            the host's shared memory is short           exit 69
    │   └── HostLimitError         so is another of its limits (ulimit)
    ├── JournalError               a run cannot be taken over                  exit 74
    ├── RunDirectoryError          the run directory cannot be written         exit 72
    ├── EngineError                an engine's own code failed                 exit 71
    ├── RunFailedError             a run that a program has launched failed    that of the run
    ├── SimulationError            a simulated run cannot go on                exit 68
    │   ├── DeadlockError          all processes wait, and nothing is scheduled
    │   ├── TimeLimitError         more virtual time than the job allows
    │   └── InvariantError         an invariant was broken
    └── ConnectivityError          worth trying again                          exit 128
        ├── PeerLostError          the peer is gone, or was restarted
        │   └── TooLateError       the others have trained all there was
        ├── PeerTimeoutError       the peer is there, but did not answer
        ├── ViewChangedError       the membership changed: try again with the new members
        ├── DamagedError           what arrived is not what was sent
        ├── SshError               a machine cannot be logged in to, or its connection broke
        └── HostLostError          a whole host is gone

``verdict`` is the word that stands in ``error.json``; ``exit_code`` is what the launcher exits with.

`RunStopped` is no error and stands apart: it ends a script whose run was asked to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Verdict = Literal["user code", "topology", "network", "host lost", "internal", "interrupted"]

#: Processes of which an error says what they wait for: enough to see the pattern.
MOST_WAITS = 16


class ZmqTrainError(Exception):
    """Root of all errors raised by zmqtrain; ``str(error)`` says what, where and what to do."""

    exit_code: int = 64
    verdict: Verdict = "internal"
    #: True where this error only follows from another process's failure, which is then the one to show.
    consequence: ClassVar[bool] = False


class UsageError(ZmqTrainError):
    """The command or the topology file asks for something impossible."""

    exit_code = 2
    verdict = "topology"


class TopologyError(UsageError):
    """The topology file has faults; ``str(error)`` lists all of them."""


class PlacementError(UsageError):
    """The roles do not fit on the hosts."""


class DifferentModelError(UsageError):
    """Divided over a grid, the model computes something else than in one process, or its optimizer does."""

    def __init__(self, text: str, *, module: str = "", parameter: str = "") -> None:
        """``module``: the first that differs, in the order of the forward. ``parameter``: that differs. Empty: not known."""
        self.module, self.parameter = module, parameter
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class HostFault:
    """One thing that keeps a host from taking part."""

    host: str
    what: str
    remedy: str
    passing: bool = False
    """Whether another try may succeed, because the host was only unreachable."""


class HostsError(UsageError):
    """Hosts lack what the run needs; ``str(error)`` lists all faults of all of them, and what to do."""

    def __init__(self, text: str, faults: Sequence[HostFault] = ()) -> None:
        """``faults``: the same one by one, where they are known."""
        self.faults = tuple(faults)
        super().__init__(text)


class TaskError(ZmqTrainError):
    """The task's own code raised an error, or does not fit the task interface."""

    exit_code = 3
    verdict = "user code"


class NonFiniteLossError(TaskError):
    """The loss is NaN or infinite."""

    def __init__(self, loss: float, rank: int, step: int, kept: str = "") -> None:
        """``kept``: a sentence about the checkpoint that was kept, once that is known."""
        self.loss, self.rank, self.step, self.kept = loss, rank, step, kept
        super().__init__(
            f"the loss is {loss} on rank {rank} at step {step}. {kept and f'{kept}. '}Lower the learning rate, clip gradients "
            '([optimizer] clip_norm), or set [job] on_nan = "continue" to go on regardless'
        )


class RunStopped(SystemExit):
    """The run was asked to stop, and all workers have stopped after the same step; the model given to `replicate` is the run's.

    ``optimizer.step()`` raises it in a script. Left alone it ends the script, with exit status 0. Catch it around the session to
    do something at the end, such as saving what the script needs to go on; no more can be trained.
    """

    def __init__(self, step: int) -> None:
        """``step``: how many steps were made."""
        self.step = step
        super().__init__(0)

    def __str__(self) -> str:
        return f"the run was asked to stop, and has stopped after {self.step} steps"


class ProtocolError(ZmqTrainError):
    """The peer violates the protocol."""

    exit_code = 65
    verdict: Verdict = "network"


class WireError(ProtocolError):
    """Received bytes are not a zmqtrain message, or exceed a limit."""


class VersionMismatchError(ProtocolError):
    """The peer speaks another version of the wire protocol."""

    def __init__(self, peer: str, ours: int, theirs: int) -> None:
        self.peer, self.ours, self.theirs = peer, ours, theirs
        super().__init__(
            f"{peer} speaks wire version {theirs}, this process speaks {ours}: install the same zmqtrain release on all hosts"
        )


class RunTokenError(ProtocolError):
    """The peer belongs to another run."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        super().__init__(
            f"{peer} has another run token: it belongs to another run, or to an earlier start of this one. "
            "Start it with the ZMQTRAIN_TOKEN of this run"
        )


class CheckpointError(ZmqTrainError):
    """A checkpoint is missing, incomplete, or of another model."""

    exit_code = 66
    verdict = "topology"


class PortInUseError(ZmqTrainError):
    """A port that the topology file names is taken, or all of a range."""

    exit_code = 67
    verdict = "topology"

    def __init__(self, address: str, ports: tuple[int, int] | None = None) -> None:
        """``ports``: the range that was tried, if it was more than a single port."""
        self.address, self.ports = address, ports
        if ports is None:
            text = (
                f"cannot listen on {address}: the port is in use. Choose another ([job] port), or leave it out to take a free one"
            )
        else:
            first, last = ports
            text = (
                f"cannot listen on {address}: all ports from {first} to {last} are in use. Give [job] ports a longer range: each "
                "process of a host takes two"
            )
        super().__init__(text)


class JournalError(ZmqTrainError):
    """The journal of a run cannot be read, or its launcher still leads it: no other one can take over."""

    exit_code = 74
    verdict = "topology"


class SupersededError(ZmqTrainError):
    """Another process leads the run now."""

    exit_code = 73
    verdict = "topology"

    def __init__(self) -> None:
        super().__init__(
            "a later launcher has taken over this run (zmqtrain launch --continue): it decides from now on, and this one ends "
            "without touching the run"
        )


class HostMemoryError(ZmqTrainError):
    """The shared memory that the processes of a host need is not available."""

    exit_code = 69
    verdict = "topology"


class HostLimitError(HostMemoryError):
    """A limit that the host sets on processes (``ulimit``) is too small."""


class RunDirectoryError(ZmqTrainError):
    """A file of the run directory cannot be written."""

    exit_code = 72
    verdict = "topology"

    def __init__(self, file: object, reason: str) -> None:
        """``file``: its path. ``reason``: why, in the system's words."""
        self.file, self.reason = str(file), reason
        super().__init__(f"cannot write {file}: {reason}. Make room, or choose another folder with --run-dir")


class EngineError(ZmqTrainError):
    """An engine from a plug-in cannot be loaded, does not have an engine's methods, or its code raised."""

    exit_code = 71
    verdict = "user code"


class RunFailedError(ZmqTrainError):
    """A run that this program has launched (`zmqtrain.launch`) has failed, or was ended from outside.

    ``verdict`` and ``exit_code`` are the run's.
    """

    def __init__(self, report: Mapping[str, Any], folder: object) -> None:
        """``report``: what ``error.json`` says of the first failure, or as much of it as is known. ``folder``: the run's."""
        self.report, self.folder = dict(report), folder
        self.verdict, self.exit_code = report["verdict"], int(report["exit_code"])
        shown = f"{str(report['shown']).rstrip()}\n\n" if report.get("shown") else ""
        peer = f"{report['peer']}: " if report.get("peer") else ""
        kind = f"{report['type']}: " if report.get("type") else ""
        super().__init__(
            f"{shown}the run {folder} ended with exit code {self.exit_code} ({self.verdict}): {peer}{kind}{report['message']}"
        )


class SimulationError(ZmqTrainError):
    """A simulated run cannot go on."""

    exit_code = 68


class DeadlockError(SimulationError):
    """Nothing is ready and nothing is scheduled, so the awaited events will never come."""

    def __init__(self, now_s: float, waiting: Mapping[str, Sequence[str]]) -> None:
        self.now_s, self.waiting = now_s, waiting
        super().__init__(f"deadlock after {now_s:g} virtual seconds: nothing is ready, and nothing is scheduled.{_waits(waiting)}")


class TimeLimitError(SimulationError):
    """The run did not end within its limit of virtual time."""

    def __init__(self, limit_s: float, waiting: Mapping[str, Sequence[str]]) -> None:
        self.now_s, self.limit_s, self.waiting = limit_s, limit_s, waiting
        super().__init__(
            f"not done after {limit_s:g} virtual seconds: train fewer steps, or raise [simulation] time_limit.{_waits(waiting)}"
        )


class InvariantError(SimulationError):
    """A simulated run broke an invariant."""

    def __init__(self, seed: int, broken: Sequence[str]) -> None:
        self.seed, self.broken = seed, tuple(broken)
        super().__init__(f"seed {seed} breaks what must always hold:\n  " + "\n  ".join(broken))


def _waits(waiting: Mapping[str, Sequence[str]]) -> str:
    lines = [f"\n  {name or 'others'} wait{'s' if name else ''} for: {'; '.join(what)}" for name, what in waiting.items()]
    shown = lines[:MOST_WAITS] + ([f"\n  and {len(lines) - MOST_WAITS} more"] if len(lines) > MOST_WAITS else [])
    return "".join(shown)


class ConnectivityError(ZmqTrainError):
    """The network or a host failed; the same run may work when tried again."""

    exit_code = 128
    verdict: Verdict = "network"
    consequence = True


class DamagedError(ConnectivityError):
    """Something arrived with a wrong checksum."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} was damaged on the way: its checksum is wrong")


class PeerLostError(ConnectivityError):
    """The peer is gone: its process ended, its link broke for too long, or it came back as another incarnation."""

    def __init__(self, peer: str, reason: str, *, waiting_for: str = "", finished: bool = False) -> None:
        """``finished``: it had done its work."""
        self.peer, self.reason, self.waiting_for, self.finished = peer, reason, waiting_for, finished
        wait = f" while waiting for {waiting_for}" if waiting_for else ""
        super().__init__(f"lost {peer}{wait}: {reason}")


#: What one is told that comes when the others have left.
RUN_HAD_ENDED = "the run had ended"


class TooLateError(PeerLostError):
    """A worker comes to an elastic run in which the others have nothing left to train. They need it no more, so it may leave."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(peer, f"it is too late to join: {why}", finished=True)


class PeerTimeoutError(ConnectivityError, TimeoutError):
    """A wait for a peer took longer than its setting allows."""

    def __init__(self, peer: str, waiting_for: str, timeout_s: float, setting: str = "[job] timeout", *, why: str = "") -> None:
        """``why``: what is known of the reason."""
        self.peer, self.waiting_for, self.timeout_s, self.setting, self.why = peer, waiting_for, timeout_s, setting, why
        super().__init__(
            f"{peer} did not answer within {timeout_s:g} s while waiting for {waiting_for}{why and f': {why}'}; "
            f"if it is only slow, raise {setting}"
        )


class ViewChangedError(ConnectivityError):
    """The members that something was to be agreed on with are no longer the members of the run."""


class SshError(ConnectivityError):
    """A machine cannot be logged in to, or the connection to it broke."""

    consequence = False

    def __init__(self, host: str, reason: str, remedy: str = "", *, lasting: bool = False) -> None:
        """``lasting``: another try cannot succeed until the fault is fixed."""
        self.host, self.reason, self.remedy, self.lasting = host, reason, remedy, lasting
        super().__init__(f"{host}: {reason}{remedy and f': {remedy}'}")


class HostLostError(ConnectivityError):
    """The agent of a host stopped sending heartbeats, or a role died without a word (killed by a signal)."""

    exit_code = 129
    verdict = "host lost"
    consequence = False

    def __init__(self, text: str, faults: Sequence[HostFault] = ()) -> None:
        """``faults``: what is wrong with each host, where that is known one by one."""
        self.faults = tuple(faults)
        super().__init__(text)
