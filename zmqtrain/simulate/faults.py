"""What goes wrong in a simulated run, and when: as data, from the topology file, from code, or from a seed.

::

    schedule = [kill("worker/1", step=3), partition(["alpha"], ["beta"], at=2.0, lasts=0.5)]
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from zmqtrain.membership.client import COORDINATOR
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.ranges import expand
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts

FaultKind: TypeAlias = Literal[
    "kill", "restart", "pause", "partition", "heal", "slow", "delay", "corrupt", "drop", "join", "drain", "shutdown"
]

#: The kinds of random faults, with their weights: mostly those that a run has to survive.
WEIGHTS: dict[FaultKind, int] = {
    "drop": 6, "pause": 4, "slow": 3, "delay": 3, "partition": 4, "kill": 2, "restart": 1, "corrupt": 1
}  # fmt: skip
#: Those of elastic runs, which have to survive losses.
ELASTIC_WEIGHTS: dict[FaultKind, int] = {**WEIGHTS, "kill": 6, "restart": 8}
#: The weight of newcomers, where a run may have more workers than it begins with.
JOIN_WEIGHT = 12
#: The weight of hosts that leave, where what their servers have can move.
DRAIN_WEIGHT = 6
#: The share of an elastic run's losses that hit workers alone. A lost server ends it.
WORKERS_HIT = 0.9
#: The share of faults that come soon after the one before, while the run still reacts to that.
SOON = 0.4
#: The most faults in a random schedule: sometimes the consequences of one should be over before the next.
MOST_RANDOM = 4
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


def random_faults(
    placement: Placement,
    timeouts: Timeouts,
    horizon_s: float,
    draw: random.Random,
    *,
    elastic: bool = False,
    moves_shards: bool = False,
) -> tuple[Fault, ...]:
    """A schedule of one to `MOST_RANDOM` faults for a run that takes about ``horizon_s`` seconds without them."""
    weights = dict(ELASTIC_WEIGHTS if elastic else WEIGHTS)
    if placement.spares:
        weights["join"] = JOIN_WEIGHT
    if moves_shards:
        weights["drain"] = DRAIN_WEIGHT
    servers = [role.host for role in placement.server_roles]
    kinds = list(weights)
    hosts = [host for host in placement.hosts if placement.of_host(host)]
    peers = [role.peer for role in placement.roles]
    workers = [worker.peer for worker in placement.everyone]
    theirs = [host for host in hosts if all(role.kind == "worker" for role in placement.of_host(host))]
    faults: list[Fault] = []
    at = draw.uniform(0, horizon_s)
    for _ in range(draw.randint(1, MOST_RANDOM)):
        kind = draw.choices(kinds, [weights[kind] for kind in kinds])[0]
        spared = elastic and bool(theirs) and draw.random() < WORKERS_HIT
        target = draw.choice(workers if spared else peers)
        host = draw.choice(theirs if spared else hosts)
        # From too short to be noticed, to longer than the time-outs; or about as long as something that the run does.
        lasts = draw.choice([0.02, 0.2, 0.4, 1.5]) * timeouts.lost_s * draw.uniform(0.5, 1.0)
        if draw.random() < 0.5:
            lasts = draw.choice([0.02, 0.1, 0.5]) * horizon_s * draw.uniform(0.5, 1.0)
        match kind:
            case "join":
                faults.append(join(draw.choice(placement.spares).host, at=at))
            case "drain":
                faults.append(drain(draw.choice(servers), at=at))
            case "kill":
                faults.append(kill(host if draw.random() < 0.25 else target, at=at))
            case "restart":
                after = draw.choice([RESTART_S, 0.01 * horizon_s, 0.1 * horizon_s, 0.4 * horizon_s])
                faults.append(restart(host if elastic and draw.random() < 0.25 else target, at=at, after=after))
            case "pause":
                faults.append(pause(draw.choice([target, host]), lasts, at=at))
            case "slow":
                faults.append(slow(target, draw.choice([1.5, 4.0, 20.0]), at=at, lasts=draw.choice([None, lasts])))
            case "delay":
                faults.append(delay(draw.choice([target, host]), draw.choice([3.0, 30.0, 300.0]), at=at, lasts=lasts))
            case "partition" if len(hosts) > 1:
                cut = draw.randint(1, len(hosts) - 1)
                shuffled = draw.sample(hosts, len(hosts))
                faults.append(partition(shuffled[:cut], shuffled[cut:], at=at, lasts=lasts, one_way=draw.random() < 0.3))
            case "corrupt":
                faults.append(corrupt(target, at=at))
            case _:
                faults.append(drop(target, draw.choice([None, *(peer for peer in peers if peer != target)]), at=at))
        at = at + draw.expovariate(50 / horizon_s) if draw.random() < SOON else draw.uniform(0, horizon_s)
    return tuple(sorted(faults, key=lambda fault: fault.at or 0.0))


def departures(placement: Placement, horizon_s: float, draw: random.Random) -> tuple[Fault, ...]:
    """Now and then a host that is asked to leave, for elastic runs in which `random_faults` lets none leave."""
    hosts = [host for host in placement.hosts if placement.of_host(host)]
    return tuple(drain(draw.choice(hosts), at=draw.uniform(0, horizon_s)) for _ in range(draw.choice([0, 0, 0, 1])))


def launcher_deaths(timeouts: Timeouts, horizon_s: float, draw: random.Random) -> tuple[Fault, ...]:
    """No, one or two deaths of the launcher, after each of which another one goes on."""
    faults = []
    for _ in range(draw.choice([0, 0, 0, 0, 0, 1, 1, 2])):
        after = draw.choice([0.01 * horizon_s, 0.3 * horizon_s, 0.2 * timeouts.lost_s, 2.0 * timeouts.lost_s])
        faults.append(restart(COORDINATOR, at=draw.uniform(0, horizon_s), after=after * draw.uniform(0.5, 1.0)))
    return tuple(sorted(faults, key=lambda fault: fault.at or 0.0))
