"""The exchange of halos: boundary rows are on their way while the interior is computed, forward and backward.

Division along height and width is one exchange after the other: what comes along the width are columns of rows that were
extended already, so the corners come with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from zmqtrain.errors import ProtocolError
from zmqtrain.parallel.communicator import Communicator, Expected, Label, Pending, Phase, Ready
from zmqtrain.parallel.geometry import Part, Range, Strip, length

#: Dimensions of a tensor NCHW along which it may be divided.
HEIGHT, WIDTH = 2, 3
#: What was begun, and the rows that are due in it.
Exchanged: TypeAlias = tuple[Pending, tuple[Part, ...]]


class HaloExchange:
    """One member's side of the exchange that a `Strip` asks for."""

    def __init__(self, communicator: Communicator, strip: Strip, layer: str, dim: int = HEIGHT, *, overlap: bool = True) -> None:
        """``layer``: the name on the messages. ``dim``: the dimension that is divided. ``overlap``: whether to go on while rows are
        on their way; without, all is waited for as soon as it is begun, which is only good for comparing."""
        self.communicator, self.strip, self.layer, self.dim, self.overlap = communicator, strip, layer, dim, overlap

    def check(self, own: Tensor) -> None:
        """Raise `ProtocolError` unless ``own`` is this member's strip."""
        expected = length(self.strip.own)
        if own.shape[self.dim] != expected:
            raise ProtocolError(
                f"{self.layer}: this member holds rows {self.strip.own[0]} to {self.strip.own[1]} of the image, {expected} rows, "
                f"but its strip has {own.shape[self.dim]}"
            )

    def send(self, of: Callable[[Range], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Exchanged | None:
        """Send the own rows that others need; what they send is to be asked for by `arrived`. ``of``: some own rows.

        ``shape``: of the strip, whose size along the divided dimension does not matter.
        """
        sends = [(part.member, of(part.rows)) for part in self.strip.sends]
        return self._exchange(sends, self.strip.receives, shape, dtype, "forward")

    def send_back(self, gradient_of: Callable[[Range], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Exchanged | None:
        """Send the gradients of the rows that were received back to where those came from; `arrived` has those of own rows."""
        sends = [(part.member, gradient_of(part.rows)) for part in self.strip.receives]
        return self._exchange(sends, self.strip.sends, shape, dtype, "backward")

    def arrived(self, exchanged: Exchanged | None) -> Iterator[tuple[Part, Tensor]]:
        """Block until it is there. Once."""
        if exchanged is not None:
            pending, parts = exchanged
            yield from zip(parts, pending.wait(), strict=True)

    def cut(self, own: Tensor, rows: Range) -> Tensor:
        """A view of rows of the image that lie in ``own``."""
        return self._cut(own, self.strip.own[0], rows)

    def shape(self, like: tuple[int, ...], rows: Range) -> tuple[int, ...]:
        """The shape ``like`` with the length of ``rows`` along the divided dimension."""
        return (*like[: self.dim], length(rows), *like[self.dim + 1 :])

    def _cut(self, tensor: Tensor, first: int, rows: Range) -> Tensor:
        return tensor.narrow(self.dim, rows[0] - first if length(rows) else 0, length(rows))

    def _exchange(
        self,
        sends: list[tuple[int, Tensor]],
        parts: tuple[Part, ...],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        phase: Phase,
    ) -> Exchanged | None:
        """Begin it; ``None`` where there is nothing to exchange."""
        expected = [Expected(part.member, self.shape(shape, part.rows), dtype) for part in parts]
        if not sends and not expected:
            return None
        pending = self.communicator.exchange(sends, expected, Label(self.layer, "halo", phase))
        return pending if self.overlap else Ready(pending.wait()), parts
