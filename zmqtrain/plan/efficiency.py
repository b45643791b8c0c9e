"""Hardware efficiency: how long an update takes when N machines form g compute groups, and what limits it.

Hadjis et al., "Omnivore: An Optimizer for Multi-device Deep Learning on CPUs and GPUs" (2016): with k = N/g machines in a group,

    HE(g) = max(t_fc, (t_conv(k) + t_fc) / g)        t_conv(k) = max(t_cc / k, k t_cn)

where t_fc is the one FC server's time for a group's batch, t_cc that of the convolutions of a batch on one machine, and t_cn what a
machine adds to the network's time. It is the law of a closed queue, and holds for everything that a group's step passes through:

    HE(g) = max( s of each station that all groups share,  s / g of each that a group has of its own,  path / (g d) )

for a path of one batch from its start to its end, of which each group has d in progress (two with pipelining, otherwise one). With
constant times it is exact if one station limits. Varying times cause queues, and make steps a little longer: a model that knows by
how much adds that to the path (`zmqtrain.plan.variation`). The saturation g* is the smallest number of groups that is as fast as
any: a shared station is then always busy, and more groups would only add staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.errors import UsageError

#: The limit if no station is one: groups wait for their own steps, so more groups would be faster.
PATH = "the group's own step"
FC_SERVER = "the FC server"
#: Times that are longer by at most this share count as equal, since measured times never agree exactly.
TOLERANCE = 0.02
#: A shared station that is busy for this share of the time is the limit, although waits make a step longer than the station alone.
BUSY = 0.85


@dataclass(frozen=True, slots=True)
class Station:
    """Something that serves one batch at a time."""

    name: str
    seconds: float
    """Seconds for one group's batch."""
    shared: bool = True
    """Whether all groups share it; otherwise each group has its own."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The path of one batch through a group."""

    groups: int
    group_size: int
    path_s: float
    """Seconds from start to end if no other group is in the way."""
    stations: tuple[Station, ...] = ()
    depth: int = 1
    """The number of batches that each group has in progress at once."""
    compute_s: float = 0.0
    """The part of the path in which the workers compute; 0: not known separately."""
    exposed_s: float = 0.0
    """The part of the path in which nothing computes: waits for the network."""
    wait_s: float = 0.0
    """The average time that waiting for others adds to the path."""

    @property
    def under_way(self) -> int:
        """The number of batches in progress at once in all groups. Of several on the same machines, each belongs to a group that
        takes turns there (``[compute] pipeline``); a topology file counts each of them as a group."""
        return self.groups * self.depth

    @property
    def staleness(self) -> float:
        """The average number of updates by others between a read and its write: one for each other batch in progress."""
        return self.under_way - 1


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The speed of training with this number of groups."""

    step: GroupStep
    seconds: float
    """Seconds per update: HE."""
    bottleneck: str

    @property
    def groups(self) -> int:
        return self.step.groups

    @property
    def group_size(self) -> int:
        return self.step.group_size

    @property
    def group_step_s(self) -> float:
        """How long a batch takes, waits included: all batches in progress together make one update every `seconds`."""
        return self.seconds * self.step.under_way


class Model(Protocol):
    """The properties of a group's step, for each way to divide the machines."""

    @property
    def choices(self) -> Sequence[int]:
        """The possible numbers of groups, in ascending order."""
        ...

    def step(self, groups: int) -> GroupStep:
        """The step of a group. ``groups`` is one of `choices`."""
        ...


def efficiency(step: GroupStep) -> Efficiency:
    """Apply the law above, and name the largest term (of equal ones: a shared station, then a group's own)."""
    terms = [(station.seconds, station.name) for station in step.stations if station.shared]
    terms += [(station.seconds / step.groups, station.name) for station in step.stations if not station.shared]
    terms.append(((step.path_s + step.wait_s) / step.under_way, PATH))
    seconds, name = max(terms, key=lambda term: term[0])
    if name == PATH and step.wait_s:
        busiest = max((station for station in step.stations if station.shared), key=lambda each: each.seconds, default=None)
        if busiest is not None and busiest.seconds >= BUSY * seconds:
            name = busiest.name
    return Efficiency(step, seconds, name)


def efficiencies(model: Model) -> tuple[Efficiency, ...]:
    """The efficiency for all numbers of groups, from the smallest to one group per machine."""
    return tuple(efficiency(model.step(groups)) for groups in model.choices)


def saturation(found: Sequence[Efficiency]) -> int:
    """g*: the smallest number of groups that is as fast as any. Raises `UsageError` if ``found`` is empty."""
    if not found:
        raise UsageError("there is no possible number of groups to choose from")
    return fewest({each.groups: each.seconds for each in found})


def fewest(update_s: Mapping[int, float]) -> int:
    """The smallest number of groups whose update takes no longer than any other's, within the tolerance."""
    best = min(update_s.values())
    return min(groups for groups, seconds in update_s.items() if seconds <= best * (1 + TOLERANCE))


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True, slots=True)
class PaperModel:
    """The paper's model, with an FC server that all groups share (appendix D.4.1). Implements `Model`."""

    machines: int
    conv_compute_s: float
    """t_cc: seconds for the convolutions of a whole batch on one machine."""
    conv_network_s: float
    """t_cn: seconds that one machine's parameters and gradients take on the network; a group's machines take turns at it."""
    fc_s: float
    """t_fc: seconds for the FC phase of a batch."""
    depth: int = 1
    merged: bool = True
    """If false, each group computes the FC phase itself, and none of it is shared."""

    @property
    def choices(self) -> Sequence[int]:
        return divisors(self.machines)

    def conv_s(self, size: int) -> float:
        """t_conv(k): seconds that a group of ``size`` machines takes for the convolutions of a batch."""
        return max(self.conv_compute_s / size, size * self.conv_network_s)

    def step(self, groups: int) -> GroupStep:
        size = self.machines // groups
        return _two_phases(groups, size, self.conv_s(size), self.fc_s, merged=self.merged, depth=self.depth)


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model with measured t_conv(k) and t_fc. Implements `Model`."""

    machines: int
    conv_s: Mapping[int, float] | Callable[[int], float]
    """t_conv, in seconds, by the size of a group."""
    fc_s: float
    depth: int = 1
    merged: bool = True

    @property
    def choices(self) -> Sequence[int]:
        return divisors(self.machines)

    def step(self, groups: int) -> GroupStep:
        size = self.machines // groups
        if isinstance(self.conv_s, Mapping):
            if size not in self.conv_s:
                known = ", ".join(map(str, sorted(self.conv_s)))
                raise UsageError(f"t_conv was not measured for groups of {size}; it was measured for {known}")
            conv_s = self.conv_s[size]
        else:
            conv_s = self.conv_s(size)
        return _two_phases(groups, size, conv_s, self.fc_s, merged=self.merged, depth=self.depth)


def _two_phases(groups: int, size: int, conv_s: float, fc_s: float, *, merged: bool, depth: int) -> GroupStep:
    own = Station("the convolutions", conv_s, shared=False)
    if not merged:
        return GroupStep(groups, size, conv_s + fc_s / size, (Station("the group's machines", conv_s + fc_s / size, shared=False),))
    return GroupStep(groups, size, conv_s + fc_s, (Station(FC_SERVER, fc_s), own), depth)
