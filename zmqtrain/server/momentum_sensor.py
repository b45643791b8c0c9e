"""The momentum that a trajectory shows, fitted while training: the optimizer's own and what asynchrony adds.

With V[t] = W[t] - W[t-1] of parameters W after update t, the model is, in expectation,

    V[t+1] = m V[t] - a G[t]

where G[t] is the gradient at W[t], whenever it arrives (YellowFin's closed loop measures the same m; Zhang and Mitliagkas 2017).
Regressing V[t+1] on V[t] and G[t] sees the optimizer's momentum only: what asynchrony does is in the delays, and drowns in the
noise of gradients. But the noise of one gradient is independent of all others and of the delays. So both sides are multiplied by
older gradients, less their running mean, G[t-1] ... G[t-L] (of the reads then, whether or not they have arrived at t) and summed: L
equations for m and a, solved by least squares. The sums forget, so the fit is of the last `MEMORY` updates.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zmqtrain.server.shard import TensorEntry
from zmqtrain.server.shard_entry import Gradient, ShardEntry

Numbers = npt.NDArray[np.float64]

#: Parameters of a piece that are looked at: enough to average noise, and few enough to cost nothing beside the update.
COORDINATES = 256
#: Pieces of a server that are watched: the largest ones.
MOST_PIECES = 4
#: Updates, by the number of pieces, between two words about the fit.
EVERY = 200
#: Updates after which what was seen counts for 1/e.
MEMORY = 1000
#: Gradients that their running mean is of: what stays the same for longer is no noise.
MEAN_OF = 50
#: Updates that must have been seen before a fit means anything.
LEAST = 100
#: Older gradients for each group: what asynchrony does takes a few rounds of all groups to show.
LAGS_A_GROUP = 3
MOST_LAGS = 64


class MomentumSensor:
    """Watches one piece at its server. Feed it every update (`applied`); `fit` says what they show."""

    def __init__(self, values: Tensor, groups: int, version: int = 0) -> None:
        """``values``: flat, of ``version``, before the first update that it is told of."""
        numel = values.numel()
        self._where = torch.linspace(0, numel - 1, COORDINATES, dtype=torch.float64).long() if numel > COORDINATES else None
        self._lags = min(MOST_LAGS, LAGS_A_GROUP * groups + 8)
        self._wait = 4 * groups  # updates until nearly all gradients of a read have arrived
        self._kept = self._lags + self._wait + 2
        self._values: OrderedDict[int, Numbers] = OrderedDict({version: self._sample(values)})
        self._gradients: dict[int, Numbers] = {}  # by the version that was read
        # Of each gradient, what its running mean does not explain, in the row of the version that was read, modulo their number.
        self._noise = np.zeros((self._kept, min(numel, COORDINATES)))
        self._noise_of = np.full(self._kept, -1)
        self._older = np.arange(1, self._lags + 1)
        self._mean: Numbers | None = None
        self._sums = np.zeros((self._lags, 3))
        self._seen = 0.0

    @property
    def updates(self) -> int:
        """The number of updates that count, without those already forgotten."""
        return round(self._seen)

    @np.errstate(over="ignore", invalid="ignore")
    def applied(self, gradient: Tensor, read: int, version: int, values: Tensor, factor: float = 1.0) -> None:
        """The gradient, computed from version ``read``, times ``factor``, has made version ``version``, which is ``values``."""
        self._values[version] = self._sample(values)
        self._gradients[read] = sample = self._sample(gradient)
        sample *= factor
        self._mean = sample if self._mean is None else self._mean + (sample - self._mean) / MEAN_OF
        np.subtract(sample, self._mean, out=self._noise[read % self._kept])
        self._noise_of[read % self._kept] = read
        while len(self._values) > self._kept:
            old, _ = self._values.popitem(last=False)
            self._gradients.pop(old, None)
        self._evaluate(version - self._wait)

    def fit(self) -> tuple[float, float] | None:
        """m and a; none where too little was seen, or it does not determine them."""
        if self._seen < LEAST:
            return None
        answers, matrix = self._sums[:, 0], self._sums[:, 1:]
        scale = np.sqrt((matrix**2).sum(axis=0))
        if not np.isfinite(self._sums).all() or not scale.all():
            return None
        solution, _, rank, _ = np.linalg.lstsq(matrix / scale, answers, rcond=1e-6)
        momentum, rate = solution / scale
        return (float(momentum), float(rate)) if rank == 2 else None

    def _evaluate(self, t: int) -> None:
        """Add update t + 1's equations, now that gradients of version t are there."""
        now = self._gradients.get(t)
        values = [self._values.get(version) for version in (t - 1, t, t + 1)]
        if now is None or any(each is None for each in values):
            return
        before, here, following = (each for each in values if each is not None)
        sides = np.stack([following - here, here - before, -now], axis=1)
        self._sums *= 1 - 1 / MEMORY
        older = t - self._older
        rows = older % self._kept
        there = self._noise_of[rows] == older
        self._sums[there] += self._noise[rows[there]] @ sides
        self._seen += 1 - self._seen / MEMORY

    def _sample(self, flat: Tensor) -> Numbers:
        """A copy of the elements that are looked at, which keeps no tensor."""
        flat = flat.detach().view(-1)
        return (flat if self._where is None else flat.index_select(0, self._where)).to(torch.float64).numpy().copy()


class Sensors:
    """The sensors of a server's largest pieces."""

    def __init__(self) -> None:
        self._sensors: dict[int, MomentumSensor] = {}
        self._pieces = 1
        self._untold = 0

    def watch(self, pieces: Collection[ShardEntry], groups: int) -> None:
        """Before the first update. Pieces without values are not watched."""
        self._pieces = max(1, len(pieces))
        for entry in sorted(pieces, key=lambda entry: -entry.piece.numel)[:MOST_PIECES]:
            if isinstance(entry, TensorEntry):
                self._sensors[entry.piece.index] = MomentumSensor(entry.values, groups, entry.version)

    def applied(self, entry: ShardEntry, gradient: Gradient, read: int, factor: float = 1.0) -> None:
        """The piece was updated by ``factor`` times a gradient of version ``read``."""
        sensor = self._sensors.get(entry.piece.index)
        if sensor is not None:
            assert isinstance(entry, TensorEntry)
            sensor.applied(gradient, read, entry.version, entry.values, factor)

    def due(self, updates: int) -> bool:
        """Count ``updates`` more updates. Returns whether it is time to report a result."""
        self._untold += updates
        if self._untold < EVERY * self._pieces:
            return False
        self._untold = 0
        return True

    def fitted(self) -> tuple[float | None, int]:
        """The momentum, in the mean by what each piece has seen, and how many updates that is."""
        fits = [(fit[0], sensor.updates) for sensor in self._sensors.values() if (fit := sensor.fit()) is not None]
        seen = sum(updates for _, updates in fits)
        return (sum(momentum * updates for momentum, updates in fits) / seen, seen) if seen else (None, 0)
