"""How models are combined: arithmetic on one bucket at a time, the same on all ranks.

========  ================  =======================================================================  ==========================
method    what is averaged  update, with its mean over p groups                                      paper
========  ================  =======================================================================  ==========================
average   w                 w = mean                                                                 local SGD
elastic   d = w - center    w -= alpha d;  center += alpha p mean                                    EASGD, Zhang et al. (2015)
outer     d = last - w      m = mu m + mean;  last -= lr (mean + mu m);  w = last                    DiLoCo, Douillard et al. 2023
========  ================  =======================================================================  ==========================

The center needs no server: all-reduce gives all ranks the same sum to the bit, so all update their copies of the center equally.
The same holds for the state of an outer optimizer. If steps were trained while the mean was being computed, ``w = mean`` becomes
``w = mix w + (1 - mix) mean`` (Streaming DiLoCo, Douillard et al. 2025, eq. 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from zmqtrain.wire.payload import Payload


class Method(Protocol):
    """One way to combine models. ``index`` is the bucket's, ``part`` this worker's part of its parameters: one dimension."""

    def begin(self, index: int, part: Payload) -> None:
        """All groups have these parameters now: set up the state, unless it was restored."""

    def travels(self, index: int, part: Payload) -> Payload:
        """Return what is to be averaged, in memory of its own."""
        ...

    def apply(self, index: int, part: Payload, own: Payload, mean: Payload, *, mix: float) -> None:
        """Update ``part``. ``own``: what `travels` returned here; ``mean``: its mean over all groups, times `factor`. Both may be
        overwritten."""

    def factor(self, groups: int) -> float:
        """The factor on a mean over ``groups`` groups before it is applied: 1, or less if not all groups took part."""
        ...

    def center(self, index: int) -> Payload | None:
        """The center of the bucket's part, equal in all groups; ``None`` if the method has none."""
        ...

    def state(self) -> Mapping[str, Payload]:
        """The state for a checkpoint, by name; the memory belongs to the method."""
        ...

    def restore(self, state: Mapping[str, Payload]) -> None:
        """Continue with what `state` returned. Call it before `begin`."""


class Average:
    """All groups take the mean."""

    def begin(self, index: int, part: Payload) -> None:
        return None

    def travels(self, index: int, part: Payload) -> Payload:
        return copy_of(part)

    def apply(self, index: int, part: Payload, own: Payload, mean: Payload, *, mix: float) -> None:
        blend(part, mean, mix)

    def factor(self, groups: int) -> float:
        return 1.0

    def center(self, index: int) -> Payload | None:
        return None

    def state(self) -> Mapping[str, Payload]:
        return {}

    def restore(self, state: Mapping[str, Payload]) -> None:
        return None


class Elastic:
    """A center attracts all models, and is attracted by them."""

    def __init__(self, groups: int, alpha: float | None = None) -> None:
        """``groups``: of the run. ``alpha`` stays the same if fewer take part: then fewer pull at the center."""
        self._groups, self._alpha = groups, 0.9 / groups if alpha is None else alpha
        self._state: dict[str, Payload] = {}

    def begin(self, index: int, part: Payload) -> None:
        self._state.setdefault(f"center/{index}", copy_of(part))

    def travels(self, index: int, part: Payload) -> Payload:
        return difference(part, self._state[f"center/{index}"])

    def apply(self, index: int, part: Payload, own: Payload, mean: Payload, *, mix: float) -> None:
        own.scale_(-self._alpha)
        part.add_(own)
        mean.scale_(self._alpha * self._groups)
        self._state[f"center/{index}"].add_(mean)

    def factor(self, groups: int) -> float:
        return groups / self._groups

    def center(self, index: int) -> Payload | None:
        return self._state.get(f"center/{index}")

    def state(self) -> Mapping[str, Payload]:
        return self._state

    def restore(self, state: Mapping[str, Payload]) -> None:
        self._state.update(state)


class Outer:
    """An outer optimizer, SGD with Nesterov momentum, uses the mean change as its gradient."""

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self._state: dict[str, Payload] = {}

    def begin(self, index: int, part: Payload) -> None:
        self._state.setdefault(f"last/{index}", copy_of(part))
        zeros = copy_of(part)
        zeros.scale_(0.0)
        self._state.setdefault(f"momentum/{index}", zeros)

    def travels(self, index: int, part: Payload) -> Payload:
        return difference(self._state[f"last/{index}"], part)

    def apply(self, index: int, part: Payload, own: Payload, mean: Payload, *, mix: float) -> None:
        last, momentum = self._state[f"last/{index}"], self._state[f"momentum/{index}"]
        momentum.scale_(self._momentum)
        momentum.add_(mean)
        change = copy_of(momentum)
        change.scale_(self._momentum)
        change.add_(mean)
        change.scale_(-self._lr)
        last.add_(change)
        blend(part, last, mix)

    def factor(self, groups: int) -> float:
        return 1.0

    def center(self, index: int) -> Payload | None:
        return None

    def state(self) -> Mapping[str, Payload]:
        return self._state

    def restore(self, state: Mapping[str, Payload]) -> None:
        self._state.update(state)


def copy_of(payload: Payload) -> Payload:
    """The same content in memory of its own."""
    copied = payload.empty_like()
    copied.copy_(payload)
    return copied


def difference(one: Payload, other: Payload) -> Payload:
    """``one - other`` in memory of its own."""
    result = copy_of(other)
    result.scale_(-1.0)
    result.add_(one)
    return result


def blend(part: Payload, other: Payload, mix: float) -> None:
    """``part`` becomes ``mix * part + (1 - mix) * other``; for 0 exactly ``other``."""
    if mix == 0.0:
        part.copy_(other)
        return
    share = copy_of(other)
    share.scale_(1.0 - mix)
    part.scale_(mix)
    part.add_(share)
