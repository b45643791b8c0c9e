"""What goes wrong in a run, and when: as data, from the topology file or from code. `zmqtrain.run.injector` carries it out.

::

    schedule = [kill("worker/1", step=3), partition(["alpha"], ["beta"], at=2.0, lasts=0.5)]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.topology.ranges import expand
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts

FaultKind: TypeAlias = Literal[
    "kill", "restart", "pause", "partition", "heal", "slow", "delay", "corrupt", "drop", "join", "drain", "shutdown"
]

#: Kinds of faults that have a duration.
_LASTING: frozenset[FaultKind] = frozenset({"pause", "partition", "slow", "delay"})
#: By default a new process with the old name starts this many seconds later.
RESTART_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Exactly one of ``at`` and ``step`` is given; use the functions below to make one."""

    kind: FaultKind
    at: float | None = None
    """Virtual seconds after the run's start."""
    step: int | None = None
    """When the target begins this step (worker 0, if the target is not a worker)."""
    target: str | None = None
    """A role; or a host, which means all its processes."""
    to: str | None = None
    """corrupt, drop: only messages between the target and this role."""
    sides: tuple[tuple[str, ...], ...] = ()
    """partition: the sets of hosts that cannot reach each other."""
    one_way: bool = False
    """partition: only what the first side sends is lost."""
    factor: float = 2.0
    """slow, delay: the factor."""
    lasts: float | None = None
    """Seconds until it is over; ``None``: never (restart: until the new process starts)."""

    @property
    def trigger(self) -> str:
        """The worker whose steps are counted."""
        return self.target if self.target is not None and self.target.startswith("worker/") else "worker/0"

    def __str__(self) -> str:
        when = f"at {self.at:g} s" if self.at is not None else f"at step {self.step} of {self.trigger}"
        parts = [f"{self.kind} {self.target}" if self.target else self.kind]
        if self.sides:
            parts.append(" | ".join(",".join(side) for side in self.sides) + (" (one way)" if self.one_way else ""))
        if self.to is not None:
            parts.append(f"to {self.to}")
        if self.kind in ("slow", "delay"):
            parts.append(f"{self.factor:g} times")
        parts.append(when)
        if self.lasts is not None:
            parts.append(f"for {self.lasts:g} s")
        return " ".join(parts)

    def survivable(self, timeouts: Timeouts, *, elastic: bool = False) -> bool:
        """Whether a run must continue to its end in spite of the fault. An elastic run survives all losses while a worker is
        left."""
        if self.kind == "corrupt":
            return False
        if self.target == COORDINATOR:
            return True  # another one goes on
        if elastic or self.kind in ("join", "drain"):
            return True
        if self.kind in ("kill", "restart", "shutdown"):
            return False
        if self.kind in ("pause", "partition"):
            # Until it is over, no process may consider another one lost, or give up waiting for an answer.
            return self.lasts is not None and self.lasts < timeouts.silent_s / 2
        return True


def join(target: str, *, at: float | None = None, step: int | None = None) -> Fault:
    """A machine that was not there before takes part from now on (``[job] max_workers``): ``joined-1`` is the first."""
    return Fault("join", at=at, step=step, target=target)


def drain(host: str, *, at: float | None = None, step: int | None = None) -> Fault:
    """The host is asked to leave, as ``zmqtrain drain`` does; if the run needs it, it stays."""
    return Fault("drain", at=at, step=step, target=host)


def shutdown(host: str, *, at: float | None = None, step: int | None = None) -> Fault:
    """The host is shut down: its agent gets SIGTERM, as ``systemd``, ``docker stop`` and Kubernetes send it."""
    return Fault("shutdown", at=at, step=step, target=host)


def kill(target: str, *, at: float | None = None, step: int | None = None) -> Fault:
    """The role (or all roles of a host) dies without a message."""
    return Fault("kill", at=at, step=step, target=target)


def restart(target: str, *, at: float | None = None, step: int | None = None, after: float = RESTART_S) -> Fault:
    """The role dies, and a new process with its name, but none of its state, starts ``after`` seconds later. A host comes back with
    a new agent, which starts the host's roles."""
    return Fault("restart", at=at, step=step, target=target, lasts=after)


def pause(target: str, lasts: float, *, at: float | None = None, step: int | None = None) -> Fault:
    """The role (or host) stops for ``lasts`` seconds, and then continues."""
    return Fault("pause", at=at, step=step, target=target, lasts=lasts)


def partition(
    *sides: Sequence[str], at: float | None = None, step: int | None = None, lasts: float | None = None, one_way: bool = False
) -> Fault:
    """The sets of hosts cannot reach each other; ``one_way``: only what the first sends is lost."""
    return Fault("partition", at=at, step=step, sides=tuple(tuple(side) for side in sides), lasts=lasts, one_way=one_way)


def heal(*, at: float | None = None, step: int | None = None) -> Fault:
    """A fault that ends all partitions of the network."""
    return Fault("heal", at=at, step=step)


def slow(target: str, factor: float, *, at: float | None = None, step: int | None = None, lasts: float | None = None) -> Fault:
    """Modelled compute of the role (or host) takes ``factor`` times as long."""
    return Fault("slow", at=at, step=step, target=target, factor=factor, lasts=lasts)


def delay(target: str, factor: float, *, at: float | None = None, step: int | None = None, lasts: float | None = None) -> Fault:
    """What the role (or host) sends takes ``factor`` times the latency."""
    return Fault("delay", at=at, step=step, target=target, factor=factor, lasts=lasts)


def corrupt(target: str, to: str | None = None, *, at: float | None = None, step: int | None = None) -> Fault:
    """A bit flips in the next message that the role sends (to ``to``)."""
    return Fault("corrupt", at=at, step=step, target=target, to=to)


def drop(target: str, to: str | None = None, *, at: float | None = None, step: int | None = None) -> Fault:
    """The role's connections (or the one to ``to``) break, and what is on them is lost. They come back."""
    return Fault("drop", at=at, step=step, target=target, to=to)


def faults_of(topology: Topology) -> tuple[Fault, ...]:
    """The schedule in the topology file."""
    return tuple(
        Fault(
            kind=fault.kind,
            at=fault.at,
            step=fault.step,
            target=fault.target,
            to=fault.to,
            sides=tuple(tuple(name for text in side for name in expand(text)) for side in fault.sides),
            one_way=fault.one_way,
            factor=fault.factor,
            lasts=fault.lasts,
        )
        for fault in topology.faults
    )


def later(faults: Sequence[Fault], seconds: float) -> tuple[Fault, ...]:
    """The rest of a schedule for a run that begins ``seconds`` later: faults that are still to come, and those that are not over.
    Faults at steps are left out, since they belong to another run."""
    healed = max(
        (fault.at for fault in faults if fault.kind == "heal" and fault.at is not None and fault.at <= seconds), default=-1.0
    )
    left = []
    for fault in faults:
        if fault.at is None:
            continue
        if fault.at >= seconds:
            left.append(replace(fault, at=fault.at - seconds))
        elif fault.kind in _LASTING and not (fault.kind == "partition" and fault.at < healed):
            lasts = None if fault.lasts is None else fault.at + fault.lasts - seconds
            if lasts is None or lasts > 0:
                left.append(replace(fault, at=0.0, lasts=lasts))
    return tuple(left)


def remaining(faults: Sequence[Fault], done: Sequence[Fault], seconds: float, hosts: Collection[str]) -> tuple[Fault, ...]:
    """The rest of a schedule for a run that begins again after ``seconds``: what is still to come, or not over; faults at steps
    that have not happened; and hosts that are gone for good, among ``hosts``. ``done``: what has happened."""
    dead = [fault.target for fault in done if fault.kind == "kill" and fault.target in hosts]
    back = [fault.target for fault in done if fault.kind == "restart"]
    gone = [kill(host, at=0.0) for host in dict.fromkeys(dead) if host is not None and host not in back]
    untimed = [fault for fault in faults if fault.at is None and fault not in done]
    return (*gone, *later(faults, seconds), *untimed)
