"""Random schedules of faults, from a seed."""

from __future__ import annotations

import random

from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.run.faults import (
    RESTART_S,
    Fault,
    FaultKind,
    corrupt,
    delay,
    drain,
    drop,
    join,
    kill,
    partition,
    pause,
    restart,
    slow,
)
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.timeouts import Timeouts

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
