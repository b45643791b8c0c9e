"""Momentum that asynchrony brings by itself, and how the optimizer's own makes up for it.

g asynchronous groups, of which each reads, computes and writes at its own pace, act like a momentum of 1 - 1/g (Mitliagkas et al.
2016, "Asynchrony begets momentum"); with a mean staleness of s, like s / (1 + s). One smooths what the other has smoothed already,
so together they act like a little less than their sum::

    1 - total = (1 - explicit) (1 - implicit)

That is what a fit of trajectories shows (`zmqtrain.server.momentum_sensor`), where groups take as long as chance will have it.
Where they take turns, as equal machines do, the delay does not smooth but shakes, the more the larger the learning rate. So
``[optimizer] momentum = "auto"``, which takes the task's momentum as the total, makes up for the delay by looking ahead
(`zmqtrain.exchange.look_ahead`), with a momentum that is the task's after an update of each group, and a learning rate that fits;
without momentum with such a rate alone. Without that (``look_ahead = "none"``) it lowers the optimizer's own accordingly. To keep
the sum instead lowers it further, and takes more updates to the same loss (docs/tuning.md has the figures).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.look_ahead import (
    RISE,
    has_rule,
    horizon,
    is_proportional,
    rate_of_round,
    spread,
    steps_ahead,
    with_rate_of_one,
)
from zmqtrain.exchange.norm_limit import LIMIT
from zmqtrain.topology.schema import Topology
from zmqtrain.wire.payload import Value

PolicyKind: TypeAlias = Literal["sync", "async", "bound"]


def expected_staleness(policy: PolicyKind, groups: int, bound: int = 0) -> float:
    """Updates by others between a group's read and its write, in the mean, of groups that are equally fast.

    With a bound of 0 all groups read together and write one after another."""
    if policy == "sync":
        return 0.0
    return (groups - 1) / 2 if policy == "bound" and bound == 0 else float(groups - 1)


def implicit_momentum(staleness: float) -> float:
    """The implicit momentum of a mean ``staleness``: 1 - 1/g for the staleness g - 1 of g groups."""
    return staleness / (1 + staleness)


def total_momentum(explicit: float, implicit: float) -> float:
    """The total momentum of explicit and implicit momentum together."""
    return 1 - (1 - explicit) * (1 - implicit)


def compensated(target: float, implicit: float) -> float:
    """The explicit momentum that acts like ``target`` together with the implicit one; 0 where that alone is more."""
    return max(0.0, (target - implicit) / (1 - implicit))


def explicit_of(group: Mapping[str, Value]) -> float | None:
    """The momentum among an optimizer's hyperparameters: SGD's and RMSprop's ``momentum``, the first of Adam's ``betas``."""
    match group:
        case {"momentum": int() | float() as momentum}:
            return float(momentum)
        case {"betas": [int() | float() as first, *_]} | {"betas": (int() | float() as first, *_)}:
            return float(first)
    return None


def with_momentum(group: Mapping[str, Value], momentum: float) -> dict[str, Value]:
    """The same hyperparameters with another momentum; as they are where they have none."""
    changed = dict(group)
    if "momentum" in group:
        changed["momentum"] = momentum
        if group.get("nesterov") and not momentum:  # torch refuses it without momentum
            changed["nesterov"] = False
    elif explicit_of(group) is not None:
        betas = group["betas"]
        assert isinstance(betas, list | tuple)
        changed["betas"] = [momentum, *betas[1:]]
    return changed


@dataclass(frozen=True, slots=True)
class Compensation:
    """How an exchange adapts the task's momentum and learning rate."""

    staleness: float = 0.0
    """The expected mean staleness."""
    on: bool = False
    look_ahead: bool = False
    """Whether servers look ahead by the delay."""
    own_rate: bool = False
    """Whether the learning rate is the job's, not the task's: without momentum it is then an update's, and kept."""
    groups: int = 0
    """Whose updates are a round, which does what one synchronous update does; 0: one more than the staleness."""

    @property
    def implicit(self) -> float:
        return implicit_momentum(self.staleness)

    @property
    def others(self) -> float:
        """Updates of a round besides one's own. With a bound of 0 twice the staleness: all have read before the first writes."""
        return self.groups - 1 if self.groups else self.staleness

    @property
    def horizon(self) -> float:
        """Updates that servers look ahead."""
        return horizon(self.staleness) if self.look_ahead else 0.0

    def rise(self, group: Mapping[str, Value]) -> float:
        """Updates in which the rate of a parameter group of the task's rises at the beginning of a run; 0: it does not.

        Without momentum it does not: what is stable then is hardly less than in synchronous training. Nor with a limit."""
        return RISE * self.horizon if self._steadied(group) and not is_proportional(group) else 0.0

    def ceiling(self, group: Mapping[str, Value]) -> float:
        """By how much the rate that is fitted to a parameter group of the task's may be multiplied (`RateRecovery`).

        That is 1 without momentum, where a rate that rises gains little and is less stable, and with a rate that is not fitted."""
        return rate_of_round(group, self.others) if self._steadied(group) else 1.0

    def limits(self, spec: OptimizerSpec) -> bool:
        """Whether servers limit how fast gradients grow, by which the task's optimizer is to go."""
        return any(self._steadied(group) and is_proportional(group) for group in spec.groups)

    def _steadied(self, group: Mapping[str, Value]) -> bool:
        return self.on and self.horizon > 0 and has_rule(group) and bool(explicit_of(group))

    def of(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The optimizer as the servers are to run it."""
        if not self.on or not self.staleness:
            return spec
        return replace(spec, groups=tuple(map(self._group, spec.groups)))

    def _group(self, group: Mapping[str, Value]) -> Mapping[str, Value]:
        target = explicit_of(group) or 0.0
        if not self.look_ahead:
            return with_momentum(group, compensated(target, self.implicit)) if target else group
        if not has_rule(group) or (self.own_rate and not target):
            return group
        return with_momentum(with_rate_of_one(group, target, self.others), spread(target, self.others))

    def describe(self, spec: OptimizerSpec) -> dict[str, Any]:
        """Describe the first parameter group for the run's record. ``spec``: the task's own optimizer."""
        given, changed = spec.groups[0], self.of(spec).groups[0]
        explicit = explicit_of(changed)
        stated = {
            "target": explicit_of(given),
            "explicit": explicit,
            "implicit": self.implicit,
            "total": total_momentum(explicit or 0.0, self.implicit),
            "compensated": self.on,
            "look_ahead": None,
        }
        before, lr = given.get("lr"), changed.get("lr")
        factor = lr / before if isinstance(lr, int | float) and isinstance(before, int | float) and before else 1.0
        if not self.horizon or not (explicit or factor != 1):
            return stated
        far = steps_ahead(explicit or 0.0, self.horizon)
        ahead = {
            "updates": self.horizon if far else 0.0,
            "steps": far,
            "lr_factor": factor,
            "rise": self.rise(given),
            "norm_limit": LIMIT if self.limits(spec) else None,
            "recovery": ceiling if (ceiling := self.ceiling(given)) > 1 else None,
        }
        total = (explicit or 0.0) ** (1 + self.others) if self.on and far else stated["total"]
        return {**stated, "total": total, "look_ahead": ahead}


def gradients_of(topology: Topology) -> dict[str, str]:
    """How gradients become updates, in words: whether they are averaged or summed, in a group and among groups."""
    exchange = topology.exchange
    own = "each group's optimizer applies its own"
    among = {
        "allreduce": "averaged, one update for all groups",
        "gossip": own if exchange.gossip.exchange == "weights" else "averaged with another's; each group's optimizer runs",
        "averaging": own,
    }
    apart = "applied one by one, an update each: all groups' together move the parameters as their sum, times lr_factor"
    served = "averaged, one update for all groups" if exchange.policy == "sync" else apart
    return {
        "in_a_group": "averaged over the group's batch, whatever the number of its workers",
        "among_groups": among.get(exchange.kind, served),
    }
