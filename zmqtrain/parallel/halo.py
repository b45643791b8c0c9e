"""The exchange of halos: boundary rows are on their way while the interior is computed, forward and backward.

`HaloExchange` is what layers use: plain tensors, ``begin`` and ``wait`` apart. `begin` is the same for autograd, for what is not
a layer of ours: the gradients of received rows are sent back as soon as they are known, and are waited for when those of the own
rows are, after everything that was computed from own rows alone has been differentiated.

Division along height and width is one exchange after the other: what comes along the width are columns of rows that were
extended already, so the corners come with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zmqtrain.errors import ProtocolError
from zmqtrain.parallel.communicator import Communicator, Expected, Label, Pending, Phase, Ready
from zmqtrain.parallel.geometry import Part, Range, Strip, length, overlap

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

    def begin(self, own: Tensor) -> Arriving:
        """Send the rows of ``own``, this member's strip, that others need. It must stay as it is until `Arriving.wait`."""
        self.check(own)
        return Arriving(self, own, self.send(lambda rows: self.cut(own, rows), tuple(own.shape), own.dtype))

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

    def begin_return(self, gradient_of: Callable[[Range], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Returning:
        """Send the gradients of the rows that were received back to where those came from.

        Arguments:
            gradient_of: the gradient of a range of received rows.
            shape: of the strip, whose size along the divided dimension does not matter.
            dtype: of gradients.
        """
        return Returning(self, self.send_back(gradient_of, shape, dtype))

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


class Arriving:
    """A halo on its way. `wait` once; then `rows`."""

    def __init__(self, exchange: HaloExchange, own: Tensor, pending: Exchanged | None) -> None:
        self._exchange, self._pending = exchange, pending
        self._held: list[tuple[Range, Tensor]] = [(exchange.strip.own, own)]

    def wait(self) -> None:
        """Block until the rows of others are there."""
        if self._pending is None:
            return
        (pending, parts), self._pending = self._pending, None
        own = self._held[0][1]
        for part, tensor in zip(parts, pending.wait(), strict=True):
            self._held.append((part.rows, tensor.to(own.device)))
        self._held.sort(key=lambda held: held[0])

    def rows(self, rows: Range) -> Tensor:
        """Some of the needed rows: a view where they lie in one piece, as they do if they are this member's own."""
        pieces = []
        for held, tensor in self._held:
            if length(common := overlap(held, rows)):
                pieces.append(self._exchange._cut(tensor, held[0], common))
        assert sum(piece.shape[self._exchange.dim] for piece in pieces) == length(rows), f"rows {rows} are not here"
        if not pieces:
            return self._held[0][1].narrow(self._exchange.dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self._exchange.dim)


class Returning:
    """Gradients of own rows on their way back from others. `add_to` once."""

    def __init__(self, exchange: HaloExchange, pending: Exchanged | None) -> None:
        self._exchange, self._pending = exchange, pending

    def add_to(self, gradient: Tensor) -> None:
        """Block until they are there, and add them to the gradient of the strip."""
        if self._pending is None:
            return
        (pending, parts), self._pending = self._pending, None
        for part, tensor in zip(parts, pending.wait(), strict=True):
            self._exchange.cut(gradient, part.rows).add_(tensor.to(gradient.device))


def begin(exchange: HaloExchange, own: Tensor) -> Halo:
    """Begin an exchange that autograd knows of. ``own``: this member's strip.

    What needs own rows only is computed from `Halo.own`, and then what needs others from `Halo.wait`. Every member must do the
    same, and must have both `Halo.own` or what `Halo.wait` returned in what it differentiates.
    """
    way = _Way(exchange, exchange.begin(own.detach()))
    return Halo(way, _begin(own, way))


def extended(exchange: HaloExchange, own: Tensor) -> Tensor:
    """The needed rows, own ones and others': the exchange without anything done in the meantime."""
    return begin(exchange, own).wait()


class Halo:
    """An exchange that was begun."""

    def __init__(self, way: _Way, own: Tensor) -> None:
        self._way, self.own = way, own

    def wait(self) -> Tensor:
        """The needed rows, own ones and others', as one tensor."""
        return _wait(self.own, self._way)


@dataclass(slots=True)
class _Way:
    """What the two ends of an exchange share."""

    exchange: HaloExchange
    arriving: Arriving | None
    returning: Returning | None = None


class _Begin(torch.autograd.Function):
    """Forward: nothing; the rows have been sent. Backward: adds the gradients that come back. Runs last of all in backward."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        way: _Way = ctx.way
        gradient = gradients[0].clone()
        if way.returning is None:  # nothing that others sent was used: their rows' gradients are zero, and they wait for them
            exchange, shape = way.exchange, tuple(gradient.shape)
            way.returning = exchange.begin_return(
                lambda rows: gradient.new_zeros(exchange.shape(shape, rows)), shape, gradient.dtype
            )
        way.returning.add_to(gradient)
        return gradient, None


class _Wait(torch.autograd.Function):
    """Forward: the needed rows. Backward: sends the gradients of others' rows to them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        assert way.arriving is not None, "waited for twice"
        arriving, way.arriving = way.arriving, None
        arriving.wait()
        needed = arriving.rows(way.exchange.strip.needed)
        return needed.clone() if needed.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() else needed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        way: _Way = ctx.way
        exchange, strip, (gradient,) = way.exchange, way.exchange.strip, gradients
        shape = tuple(gradient.shape)
        way.returning = exchange.begin_return(lambda rows: exchange._cut(gradient, strip.needed[0], rows), shape, gradient.dtype)
        own = gradient.new_zeros(exchange.shape(shape, strip.own))
        kept = overlap(strip.own, strip.needed)
        if length(kept):
            exchange.cut(own, kept).copy_(exchange._cut(gradient, strip.needed[0], kept))
        return own, None


def _begin(own: Tensor, way: _Way) -> Tensor:
    result: Tensor = _Begin.apply(own, way)  # type: ignore[no-untyped-call]
    return result


def _wait(own: Tensor, way: _Way) -> Tensor:
    result: Tensor = _Wait.apply(own, way)  # type: ignore[no-untyped-call]
    return result
