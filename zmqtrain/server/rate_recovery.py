"""What lets a server's learning rate recover (`zmqtrain.exchange.rate_recovery`): the path that its parameters have taken.

It is known at some of their elements, for each version that a group may still be computing with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.rate_recovery import ROUNDS, Alignment, RateRecovery
from zmqtrain.server.shard_entry import Gradient, ShardEntry
from zmqtrain.wire.dtypes import torch_dtype
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload

#: Elements of a server that are looked at: a mean over as many hides what one by one they are by chance, and costs nothing beside
#: the update.
ELEMENTS = 4096
#: Rounds of all groups in which a version's path is remembered. Older gradients are applied like any others, and not looked at.
REMEMBERED = 4


class PiecePath:
    """A piece's path: a running mean of its moves, of single precision."""

    def __init__(self, numel: int, elements: int, groups: int, *, is_complex: bool = False) -> None:
        """``elements``: how many of the piece's ``numel`` are looked at, at equal distances."""
        self._where = torch.linspace(0, numel - 1, min(numel, elements), dtype=torch.float64).long()
        self._width = len(self._where) * (2 if is_complex else 1)
        self._groups = groups
        self._values: Tensor | None = None
        """A sample of the values as they are now."""
        self._paths: dict[int, Tensor] = {}
        """version -> the path up to it; ascending. Never written to."""

    def _sample(self, flat: Tensor) -> Tensor:
        """The elements that are looked at, of something of the piece's size."""
        found = flat.detach().view(-1).index_select(0, self._where)
        return (torch.view_as_real(found).view(-1) if found.is_complex() else found).to(torch.float32)

    def begin(self, values: Tensor) -> None:
        """Call it before an update changes the values; only the first call has an effect."""
        if self._values is None:
            self._values = self._sample(values)

    def moved(self, values: Tensor, version: int) -> None:
        """An update has made ``version``, which is ``values``."""
        assert self._values is not None
        before, self._values = self._values, self._sample(values)
        last, moved = next(reversed(self._paths.values()), None), self._values - before
        new = moved / (ROUNDS * self._groups) if last is None else last + (moved - last) / (ROUNDS * self._groups)
        self._paths[version] = new
        while next(iter(self._paths)) < version - REMEMBERED * self._groups:
            del self._paths[next(iter(self._paths))]

    def beside(self, gradient: Tensor, read: int) -> Alignment | None:
        """A gradient that was computed with version ``read``; none if the path up to it is not known (any more)."""
        path = self._paths.get(read)
        if path is None:
            return None
        one, other = self._sample(gradient).to(torch.float64), path.to(torch.float64)
        return Alignment(-float(one @ other), float(one @ one), float(other @ other))

    def state(self) -> dict[str, Value]:
        """The state that a checkpoint has to keep, as plain values for `load`."""
        rows = torch.stack(list(self._paths.values())) if self._paths else torch.empty(0)
        return {"versions": list(self._paths), "rows": rows.numpy().tobytes()}

    def load(self, state: Value) -> None:
        """What `state` gave, of a piece of the same size. Raises `ValueError`, `TypeError` or `KeyError`."""
        given: Any = state
        versions: list[int] = list(given["versions"])
        if any(type(version) is not int for version in versions) or versions != sorted(set(versions)):
            raise ValueError(f"{versions!r:.60} are not versions in ascending order")
        data = bytearray(given["rows"])
        if len(data) != 4 * len(versions) * self._width:
            raise ValueError(f"{len(data)} bytes are not {len(versions)} paths of {self._width} elements")
        rows = torch.frombuffer(data, dtype=torch.float32).view(len(versions), self._width) if versions else torch.empty(0)
        if not bool(rows.isfinite().all()):
            raise ValueError("a path is not finite")
        self._values = None
        self._paths = dict(zip(versions, rows.unbind(), strict=True))


class Recovery:
    """What a server's pieces may take back of the rate that was fitted: `RateRecovery`, with the paths that it must be told of."""

    def __init__(self, entries: Mapping[int, ShardEntry], groups: int, ceiling: float) -> None:
        """``entries``: the pieces, which only updates change that this is told of. ``groups``: whose updates are a round.
        ``ceiling``: the largest factor."""
        self._entries = entries
        total = sum(entry.piece.numel for entry in entries.values())
        self._paths: dict[int, PiecePath] = {}
        for index, entry in entries.items():
            numel = entry.piece.numel
            elements, is_complex = max(1, round(ELEMENTS * numel / total)), torch_dtype(entry.dtype).is_complex
            self._paths[index] = PiecePath(numel, elements, groups, is_complex=is_complex)
        self._rate = RateRecovery(entries.keys(), groups, ceiling)

    @property
    def factor(self) -> float:
        """The factor by which the fitted learning rates are multiplied at present."""
        return self._rate.factor

    def look(self, gradients: Collection[tuple[int, Gradient, int]]) -> float:
        """Look at gradients that are applied together next: of each its piece, itself, and the version with which it was computed.
        Returns by what their rates are multiplied."""
        found = {}
        for piece, gradient, read in gradients:
            path = self._paths[piece]
            path.begin(self._values_of(piece))
            if (alignment := path.beside(gradient, read)) is not None:
                found[piece] = alignment
        self._rate.told(found)
        return self._rate.factor

    def updated(self, piece: int) -> None:
        """A gradient that was looked at has updated its piece."""
        self._paths[piece].moved(self._values_of(piece), self._entries[piece].version)

    def _values_of(self, piece: int) -> Tensor:
        values = self._entries[piece].memory()
        assert isinstance(values, TensorPayload)
        return values.tensor

    def state(self) -> dict[str, Value]:
        """The state that a checkpoint has to keep, as plain values for `load`."""
        return {"rate": self._rate.state(), "paths": {str(index): path.state() for index, path in self._paths.items()}}

    def load(self, state: Value) -> None:
        """What `state` gave, of the same pieces and as many groups. Raises `CheckpointError`."""
        given: Any = state
        try:
            self._rate.load(given["rate"])
            for index, path in self._paths.items():
                path.load(given["paths"][str(index)])
        except (TypeError, ValueError, KeyError) as error:
            raise CheckpointError(f"the checkpoint has no paths of a model server's pieces that fit: {error}") from None
