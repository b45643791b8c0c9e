"""Looking ahead by the delay: how asynchronous groups keep the momentum and the learning rate of synchronous ones.

A gradient that is applied s updates after its parameters were read pushes where the model was. Along a direction of curvature c,
and with momentum, that is stable for ``lr c`` up to 0.2 to 0.15 where 2 to 8 groups take turns, whether or not the momentum is
lowered by what asynchrony adds: a nineteenth to a twenty-fifth of the 3.8 that one synchronous group of momentum 0.9 may have.
(Without momentum it is ``2 sin(pi / (4 s + 2))``: Yang et al. 2021, "PipeMare", lemma 1; Giladi et al. 2020, "At Stability's
Edge".) Beyond it the loss does not fall, or all units die.

So a group reads the parameters where they will be when its gradient arrives, as far as the momentum tells now (Chen et al. 2018,
"SpecTrain"; Hakimi et al. 2019, "Taming Momentum in a Distributed Asynchronous Environment": DANA). As in Nesterov's method the
parameters that are stored and sent *are* those ahead. With w where the optimizer's steps lead and D(t) the newest of them::

    w(t) = w(t-1) + D(t)          p(t) = w(t) + P D(t)          P = m + m^2 + ... + m^n          n = (3 s + 1) / 2

m is the optimizer's momentum an update, P how many of the newest step the next n would bring by themselves. An update is thus
``D(t) + P D(t) - P D(t-1)``: the new gradient's share at once, the rest as slowly as ever. n was chosen for the largest stable
learning rate over m and s (docs/tuning.md has the table): between the s updates of the delay and what it takes to see an effect.

The momentum need then not be lowered. An update takes one group's batch, where a synchronous step of all g = s + 1 takes g of
them; the rules by which a batch g times smaller trains the same in the same samples are those of Goyal et al. 2017 for SGD, and of
Malladi et al. 2022 ("On the SDEs and Scaling Rules for Adaptive Gradient Algorithms") for Adam and its kin and for RMSprop::

    m = M^(1/g)        SGD: lr = LR (1 - m) / ((1 - M) g)        Adam: lr = LR / sqrt(g), beta2 = BETA2^(1/g)

with M, LR and BETA2 the task's. (A step of Adam's is a mean, whose size does not depend on m.) It is stable up to ``LR c`` of 1.05
to 0.7 where 2 to 8 groups take turns and M = 0.9.

Without a momentum there is nothing to tell where parameters go (P = 0), but the rules for the rate are the same, with M = 0: LR / g
for SGD (and ASGD), LR / sqrt(g) for RMSprop and for Adam with a BETA1 of 0. The g updates of a round then do together what the
synchronous step does, where the g at the full rate go g times as far. (SGD is stable up to ``LR c`` of 2 to 1.67 where 2 to 8
groups take turns: the lemma's limit, times g.) Adagrad stays as it is: its sum of squares grows g^2 times as fast, since a mean of
g batches' gradients has a g-th of the noise's square, so its steps are smaller by g already. Adadelta and Rprop stay as they are,
too: they make their own rates.

At the beginning less is stable than later. So where there is momentum, and its rate is fitted, one of two things is done. With SGD,
whose steps are as large as its gradients, these may not grow too fast (`zmqtrain.exchange.norm_limit`). Adam, its kin and RMSprop
divide by what gradients have been, which is hardly known at the beginning (Liu et al. 2020, "On the Variance of the Adaptive
Learning Rate and Beyond"). Their rate rises with the square root of the update's number, over `RISE` updates for each that is
looked ahead, on top of whatever schedule the task has. (Yang et al., "PipeMare", technique 1, divide the rate by the delay, and
give it back over the first steps.) That costs as much as a third of these updates; at low rates it is their number that counts.

Where steps are too small even so, the fitted rate rises again, as far as the task's own (`zmqtrain.exchange.rate_recovery`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from zmqtrain.wire.payload import Value

#: Updates in which a rate rises, for each that is looked ahead.
RISE = 30


def horizon(staleness: float) -> float:
    """The number of updates to look ahead, where a gradient has this mean staleness."""
    return (3 * staleness + 1) / 2 if staleness > 0 else 0.0


def risen(updates: int, rise: float) -> float:
    """The fraction of the full rate after ``updates`` updates, where the rate is warmed up over ``rise`` updates."""
    return math.sqrt(min(1.0, (updates + 1) / rise)) if rise > 1 else 1.0


def spread(momentum: float, others: float) -> float:
    """The momentum of an update, of which a round, of one of this group and of ``others``, has ``momentum``."""
    return float(momentum ** (1 / (1 + others))) if momentum > 0 else 0.0


def has_rule(group: Mapping[str, Value]) -> bool:
    """Whether it is known how the optimizer's rate goes with the batch: of those with a momentum, be it 0, and of ASGD."""
    return "momentum" in group or is_mean(group) or "lambd" in group


def is_mean(group: Mapping[str, Value]) -> bool:
    """Whether the optimizer takes a mean of gradients (Adam and its kin) for its momentum, not a sum."""
    return "betas" in group


def is_proportional(group: Mapping[str, Value]) -> bool:
    """Whether the optimizer's steps are as large as its gradients are, as SGD's with momentum (RMSprop's are not)."""
    return "momentum" in group and "centered" not in group


def with_rate_of_one(group: Mapping[str, Value], momentum: float, others: float) -> dict[str, Value]:
    """The hyperparameters, all but the momentum, of an optimizer of which ``1 + others`` updates do what one of the given does
    with their mean gradient. ``momentum``: the given's."""
    changed = dict(group)
    lr, betas, alpha = group.get("lr"), group.get("betas"), group.get("alpha")
    factor = 1.0 if is_mean(group) else (1 - spread(momentum, others)) / (1 - momentum)
    if isinstance(betas, list | tuple):
        changed["betas"] = [betas[0], *(spread(each, others) for each in betas[1:] if isinstance(each, int | float))]
    if "centered" in group and isinstance(alpha, int | float):  # RMSprop
        changed["alpha"] = spread(alpha, others)
    if isinstance(lr, int | float):
        changed["lr"] = lr * factor / rate_of_round(group, others)
    return changed


def rate_of_round(group: Mapping[str, Value], others: float) -> float:
    """How many times smaller than the task's the rate is that `with_rate_of_one` gives an update, but for the momentum."""
    groups = 1 + others
    return math.sqrt(groups) if is_mean(group) or "centered" in group else groups


def steps_ahead(momentum: float, updates: float) -> float:
    """P: how far momentum alone carries a step within ``updates`` updates, in units of that step."""
    if not 0 < momentum < 1:
        return updates if momentum >= 1 else 0.0
    return float(momentum * (1 - momentum**updates) / (1 - momentum))
