"""What becomes of models that come together: arithmetic on one bucket at a time, the same on all ranks.

========  ================  =======================================================================  ==========================
method    what travels      then, with its mean over p groups                                        paper
========  ================  =======================================================================  ==========================
average   w                 w = mean                                                                 local SGD
elastic   d = w - center    w -= alpha d;  center += alpha p mean                                    EASGD, Zhang et al. (2015)
outer     d = last - w      m = mu m + mean;  last -= lr (mean + mu m);  w = last                    DiLoCo, Douillard et al. 2023
========  ================  =======================================================================  ==========================

The center needs no server: all-reduce gives everybody the same sum to the bit, so everybody moves a copy of the center alike; the
same holds for what an outer optimizer keeps. Where steps went on while the mean was on its way, ``w = mean`` becomes
``w = mix w + (1 - mix) mean`` (Streaming DiLoCo, Douillard et al. 2025, eq. 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from zmqtrain.wire.payload import Payload


class Method(Protocol):
    """One way of coming together. ``index`` is the bucket's, ``part`` this worker's part of its parameters."""

    def begin(self, index: int, part: Payload) -> None:
        """All groups have these parameters now. Sets the state up, unless it was restored."""

    def travels(self, index: int, part: Payload) -> Payload:
        """Return the part to average, in memory of its own."""
        ...

    def apply(self, index: int, part: Payload, own: Payload, mean: Payload, *, mix: float) -> None:
        """``own``: what this group let travel; ``mean``: of all groups'. Both may be overwritten."""

    def center(self, index: int) -> Payload | None:
        """The center of the bucket's part, if the method has one; all groups have the same."""
        ...

    def state(self) -> Mapping[str, Payload]:
        """What has to be kept in a checkpoint, by name; the memory is the method's own."""
        ...

    def restore(self, state: Mapping[str, Payload]) -> None:
        """Go on with what `state` gave, before `begin`."""


class Average:
    """Everybody takes the mean."""

    def begin(self, index: int, part: Payload) -> None:
        return None

    def travels(self, index: int, part: Payload) -> Payload:
        return copy_of(part)

    def apply(self, index: int, part: Payload, own: Payload, mean: Payload, *, mix: float) -> None:
        blend(part, mean, mix)

    def center(self, index: int) -> Payload | None:
        return None

    def state(self) -> Mapping[str, Payload]:
        return {}

    def restore(self, state: Mapping[str, Payload]) -> None:
        return None


class Elastic:
    """A center draws everybody, and is drawn."""

    def __init__(self, groups: int, alpha: float | None = None) -> None:
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

    def center(self, index: int) -> Payload | None:
        return self._state.get(f"center/{index}")

    def state(self) -> Mapping[str, Payload]:
        return self._state

    def restore(self, state: Mapping[str, Payload]) -> None:
        self._state.update(state)


class Outer:
    """An outer optimizer, SGD with Nesterov momentum, takes the mean change for its gradient."""

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
    """``part`` becomes ``mix * part + (1 - mix) * other``; the very bits of ``other`` for 0."""
    if mix == 0.0:
        part.copy_(other)
        return
    share = copy_of(other)
    share.scale_(1.0 - mix)
    part.scale_(mix)
    part.add_(share)
