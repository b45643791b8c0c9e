"""A learning rate that recovers where steps are too small: what asynchronous groups may take back of the rate that was fitted.

The rate that is fitted to the number of groups (`zmqtrain.exchange.look_ahead`) makes a round of all groups do what one synchronous
step does. Where the task's rate is too low for synchronous groups, that loses what asynchronous ones could gain: they make g times
as many steps. Gradients tell whether steps are too small: if the descent of a new one goes on along the path that the parameters
have taken, they could have gone further; if it turns back, they went too far (Jacobs 1988, "delta-bar-delta", by an average of
earlier gradients; Baydin et al. 2018, "Online Learning Rate Adaptation with Hypergradient Descent", by the last one). With c the
cosine of the angle between the negative gradient and the path, in a running mean of `ROUNDS` rounds of all groups::

    ln rate += (c - MARGIN) / g  where c > MARGIN          ln rate += 2 c / g  where c < 0

for each update, between the fitted rate and the task's own. The path is a running mean of the parameters' moves *up to the version
with which the gradient was computed*. Compared with the path up to now, which the gradient does not know, an oscillation of four
times the delay looks like progress, and the rate rises until learning ends.

In the first `WAIT` rounds gradients point the same way at any rate, and tell nothing; the rate stays as it is. A rate below the
fitted one is not tried: it made CIFARNet at high rates worse, although its gradients turn back there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from zmqtrain.errors import CheckpointError
from zmqtrain.wire.payload import Value

#: Rounds of all groups that the running means are of: the path's, and the cosine's.
ROUNDS = 2
#: Rounds at the beginning that only watch.
WAIT = 20
#: What the mean cosine must be above for steps to count as too small. Noise is below it, and so it is where a schedule has lowered
#: the rate.
MARGIN = 0.03
#: How much faster the rate falls than it rises.
FALL = 2.0


class Alignment(NamedTuple):
    """A piece's gradient beside the path that its parameters had taken: sums over some of its elements."""

    along: float
    """The negative gradient times the path."""
    gradient: float
    """The squares of the gradient."""
    path: float
    """The squares of the path."""


class RateRecovery:
    """Decides by what the fitted rate is multiplied. Told of gradients in the order in which they are applied; no I/O."""

    def __init__(self, pieces: Collection[int], groups: int, ceiling: float) -> None:
        """``pieces``: of the server. ``groups``: whose updates are a round. ``ceiling``: the largest factor."""
        self._pieces = frozenset(pieces)
        self._groups, self._ceiling = groups, ceiling
        self._last: dict[int, Alignment] = {}
        """piece -> of its last gradient."""
        self._cosine = self._seen = self._log = 0.0

    @property
    def factor(self) -> float:
        """The factor by which the learning rate is multiplied at present."""
        return math.exp(self._log)

    def told(self, found: Mapping[int, Alignment]) -> None:
        """Take in the gradients of some pieces that are applied together next. What is not finite counts for nothing."""
        found = {piece: each for piece, each in found.items() if all(map(math.isfinite, each))}
        if not found:
            return
        self._last.update(found)
        along, gradient, path = (math.fsum(sums) for sums in zip(*self._last.values(), strict=True))
        size = math.sqrt(gradient) * math.sqrt(path)
        cosine = max(-1.0, min(1.0, along / size)) if size else 0.0
        part = len(found) / len(self._pieces)  # of an update of all pieces
        self._seen += part
        self._cosine += (cosine - self._cosine) * min(1.0, part / (ROUNDS * self._groups))
        if self._seen <= WAIT * self._groups:
            return
        change = FALL * min(0.0, self._cosine) + max(0.0, self._cosine - MARGIN)
        self._log = min(math.log(self._ceiling), max(0.0, self._log + change * part / self._groups))

    def state(self) -> dict[str, Value]:
        """The state that a checkpoint has to keep, as plain values for `load`."""
        last: Value = {str(piece): list(each) for piece, each in self._last.items()}
        return {"last": last, "cosine": self._cosine, "seen": self._seen, "log": self._log}

    def load(self, state: Value) -> None:
        """What `state` gave, of the same pieces. A lower ceiling holds for it, too. Raises `CheckpointError`."""
        mine = {str(piece): piece for piece in self._pieces}
        try:
            given: Any = state
            last = {mine[piece]: Alignment(*row) for piece, row in given["last"].items()}
            numbers = [given[name] for name in ("cosine", "seen", "log")]
            if not all(map(_is_number, [*numbers, *(number for row in last.values() for number in row)])):
                raise ValueError("not all of it are numbers")
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint has {state!r:.100} as what a server's learning rate has recovered") from error
        self._last = last
        self._cosine, self._seen, log = numbers
        self._log = min(math.log(self._ceiling), max(0.0, log))


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
