"""Hardware efficiency: how long an update takes when N machines work as g compute groups, and what keeps it from being shorter.

Hadjis et al., "Omnivore: An Optimizer for Multi-device Deep Learning on CPUs and GPUs" (2016): with k = N/g machines a group,

    HE(g) = max(t_fc, (t_conv(k) + t_fc) / g)        t_conv(k) = max(t_cc / k, k t_cn)

where t_fc is the one FC server's time for a group's batch, t_cc the convolutions of a batch on one machine, and t_cn what a machine
adds to the network's time. It is the law of a closed queue, and holds for whatever a group's step passes:

    HE(g) = max( s of each station that all groups share,  s / g of each that a group has of its own,  path / (g d) )

for a path of one batch from its begin to its end, of which each group has d under way (two with pipelining, else one). With
constant times it is exact where one station limits; times that vary make queues, and steps a little longer: a model that knows by
how much adds that to the path (`zmqtrain.plan.variation`). The fewest groups that are as fast as any are g*, the saturation, where
a shared station is always busy: more add staleness and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zmqtrain.errors import UsageError

#: What limits where no station does: groups wait for their own steps, so more groups would be faster.
PATH = "the group's own step"
FC_SERVER = "the FC server"
#: So much longer than the fastest counts as no longer: times that are measured are never quite the same.
TOLERANCE = 0.02
#: What groups share and is busy for so much of the time limits them, though their waits make a step longer than it alone would.
BUSY = 0.85


@dataclass(frozen=True, slots=True)
class Station:
    """Something that serves one batch at a time."""

    name: str
    seconds: float
    """For one group's batch."""
    shared: bool = True
    """By all groups; else each group has its own."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One batch's way through a group."""

    groups: int
    group_size: int
    path_s: float
    """From its begin to its end, where nobody else is in the way."""
    stations: tuple[Station, ...] = ()
    depth: int = 1
    """Batches that each group has under way at once."""
    compute_s: float = 0.0
    """Of the path, the workers' own arithmetic; 0: not known apart."""
    exposed_s: float = 0.0
    """Of the path, what nobody computes in: waiting for the network."""
    wait_s: float = 0.0
    """What others in the way add to the path, in the mean."""

    @property
    def under_way(self) -> int:
        """Batches at once, of all groups together. Of several on the same machines each belongs to a group that takes turns there
        (``[compute] pipeline``): so many are what a topology file calls groups."""
        return self.groups * self.depth

    @property
    def staleness(self) -> float:
        """Updates by others between a read and its write, in the mean: all other batches that are under way."""
        return self.under_way - 1


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How fast so many groups are."""

    step: GroupStep
    seconds: float
    """Of an update: HE."""
    bottleneck: str

    @property
    def groups(self) -> int:
        return self.step.groups

    @property
    def group_size(self) -> int:
        return self.step.group_size

    @property
    def group_step_s(self) -> float:
        """How long a batch takes, waiting included: all that are under way together make an update every `seconds`."""
        return self.seconds * self.step.under_way


class Model(Protocol):
    """What a group's step is like, for each way to divide the machines."""

    @property
    def choices(self) -> Sequence[int]:
        """The numbers of groups that there may be, in order."""
        ...

    def step(self, groups: int) -> GroupStep:
        """``groups`` is one of `choices`."""
        ...


def efficiency(step: GroupStep) -> Efficiency:
    """The law above, with the name of the term that is largest (of equal ones: a shared station, then a group's own)."""
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
    """For all numbers of groups, from the fewest to one for each machine."""
    return tuple(efficiency(model.step(groups)) for groups in model.choices)


def saturation(found: Sequence[Efficiency]) -> int:
    """g*: the fewest groups that are as fast as any. Raises `UsageError` where there is no choice at all."""
    if not found:
        raise UsageError("there is no number of groups to choose from")
    return fewest({each.groups: each.seconds for each in found})


def fewest(update_s: Mapping[int, float]) -> int:
    """The fewest groups of those whose updates take no longer than any others', but for the tolerance."""
    best = min(update_s.values())
    return min(groups for groups, seconds in update_s.items() if seconds <= best * (1 + TOLERANCE))


def divisors(number: int) -> list[int]:
    """All, in order."""
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True, slots=True)
class Paper:
    """The paper's model, with an FC server that all groups share (appendix D.4.1). Implements `Model`."""

    machines: int
    conv_compute_s: float
    """t_cc: the convolutions of a whole batch on one machine."""
    conv_network_s: float
    """t_cn: what one machine's parameters and gradients take on the network; a group's machines take turns at it."""
    fc_s: float
    """t_fc."""
    depth: int = 1
    merged: bool = True
    """Unmerged: each group computes the FC phase itself, and nothing of it is shared."""

    @property
    def choices(self) -> Sequence[int]:
        return divisors(self.machines)

    def conv_s(self, size: int) -> float:
        """t_conv(k)."""
        return max(self.conv_compute_s / size, size * self.conv_network_s)

    def step(self, groups: int) -> GroupStep:
        size = self.machines // groups
        return _two_phases(groups, size, self.conv_s(size), self.fc_s, merged=self.merged, depth=self.depth)


@dataclass(frozen=True, slots=True)
class Measured:
    """t_conv(k) and t_fc as they were measured. Implements `Model`."""

    machines: int
    conv_s: Mapping[int, float] | Callable[[int], float]
    """By the size of a group."""
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
                raise UsageError(f"t_conv was not measured for groups of {size}; it was for {known}")
            conv_s = self.conv_s[size]
        else:
            conv_s = self.conv_s(size)
        return _two_phases(groups, size, conv_s, self.fc_s, merged=self.merged, depth=self.depth)


def _two_phases(groups: int, size: int, conv_s: float, fc_s: float, *, merged: bool, depth: int) -> GroupStep:
    own = Station("the convolutions", conv_s, shared=False)
    if not merged:
        return GroupStep(groups, size, conv_s + fc_s / size, (Station("the group's machines", conv_s + fc_s / size, shared=False),))
    return GroupStep(groups, size, conv_s + fc_s, (Station(FC_SERVER, fc_s), own), depth)
