"""A limit to how fast gradients may grow: what asynchronous groups need while a model begins to learn, and at high rates.

A model's curvature grows several times over while it begins to learn, and momentum that was built up before carries it on: the loss
of LeNet, which had begun to fall, went from 1.8 to 7 within 32 updates of 8 groups, and all its units were dead. Gradients tell of
it s updates late, and then they grow. So none may be larger than `LIMIT` times the running mean of those that were applied before;
what is larger is made as small. (Seetharaman et al. 2020, "AutoClip: Adaptive Gradient Clipping for Source Separation Networks",
take a percentile of the norms so far; Chen et al. 2025, "Fira", limit how a norm grows from one step to the next.) That takes a
little off a part of the gradients all through the training, where noise makes them large.

The norm is that of all pieces of a server. They come one by one and none waits for another, so each counts with its last gradient.
A limit for each piece by itself would turn the gradient, not only shorten it, and hold back all layers before one that begins with
weights of 0, since their gradients begin near 0 then. Where the whole gradient begins small, what was applied alone would hold it
back for thousands of updates; so `FLOOR` of the running mean of what came, but for outliers, is allowed in any case, which takes a
hundred updates to let a gradient grow tenfold, and 300 to let it grow from nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import cast

from zmqtrain.errors import CheckpointError
from zmqtrain.wire.payload import Value

#: The largest norm, in running means of those that were applied.
LIMIT = 1.2
#: What is always allowed, in running means of those that came.
FLOOR = 0.5
#: What counts at most in that, in what was allowed then.
OUTLIER = 10
#: What an update of all pieces leaves of a running mean.
MEMORY = 0.97

_NUMBERS = ("applied", "came", "weight")


class NormLimit:
    """Decides by what gradients are multiplied. Told of them in the order in which they are applied; no I/O."""

    def __init__(self, pieces: Collection[int]) -> None:
        """``pieces``: of the server."""
        self._pieces = frozenset(pieces)
        self._norms: dict[int, float] = {}
        """piece -> of its last gradient."""
        self._applied = self._came = self._weight = 0.0
        """Running sums of norms as they were applied and as they came, and of the weights in them."""

    def factor(self, norms: Mapping[int, float]) -> float:
        """By what the gradients of some pieces are multiplied that are applied together next, at most 1.

        ``norms``: by piece. Those of a gradient that is not finite count for nothing, and are not limited: it is as good or bad as
        without a limit."""
        if not all(map(math.isfinite, norms.values())):
            return 1.0
        self._norms.update(norms)
        norm = math.hypot(*self._norms.values())
        if len(self._norms) < len(self._pieces) or not norm or not math.isfinite(norm):
            return 1.0
        allowed = max(LIMIT * self._applied, FLOOR * self._came) / self._weight if self._weight else norm
        factor = min(1.0, allowed / norm)
        left = MEMORY ** (len(norms) / len(self._pieces))
        self._applied = left * self._applied + (1 - left) * factor * norm
        self._came = left * self._came + (1 - left) * min(norm, OUTLIER * allowed)
        self._weight = left * self._weight + (1 - left)  # so that the first norms count in full
        return factor

    def state(self) -> dict[str, Value]:
        """The state that a checkpoint has to keep, as plain values for `load`."""
        norms: Value = {str(piece): norm for piece, norm in self._norms.items()}
        return {"norms": norms, "applied": self._applied, "came": self._came, "weight": self._weight}

    def load(self, state: Value) -> None:
        """What `state` gave, of the same pieces. Raises `CheckpointError`."""
        given = state if isinstance(state, dict) else {}
        norms, numbers = given.get("norms"), [given.get(name) for name in _NUMBERS]
        found = [*numbers, *(norms.values() if isinstance(norms, dict) else [None])]
        mine = {str(piece): piece for piece in self._pieces}
        if not isinstance(norms, dict) or not all(map(_is_norm, found)) or not norms.keys() <= mine.keys():
            raise CheckpointError(f"the checkpoint has {state!r:.100} as a model server's norms of gradients")
        self._norms = {mine[str(piece)]: cast(float, norm) for piece, norm in norms.items()}
        self._applied, self._came, self._weight = (cast(float, number) for number in numbers)


def _is_norm(value: object) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf
