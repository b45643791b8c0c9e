"""What divided layers have in common: the interior is computed while the halo travels, forward and backward.

Forward::

    begin the exchange -> compute the interior -> wait -> compute the rims -> join

Backward::

    dX of the rims -> begin to send others' parts of it -> dX of the interior, dW of all -> wait -> add what came back

A layer computes a range of output rows from the input rows that it needs (`DomainLayer.compute`), with ordinary torch operations;
each of at most three pieces (above, interior, below) has a small autograd graph of its own, of which backward asks dX and dW apart.
The interior reads this member's strip where it lies; only the rims' few rows are copied together with those of others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zmqtrain.errors import UsageError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.parallel.communicator import Communicator
from zmqtrain.parallel.geometry import Division, Range, Reach, checked, follow, length, overlap, strip
from zmqtrain.parallel.halo import HEIGHT, Arriving, HaloExchange


class DomainLayer(nn.Module):
    """A layer whose input is this member's strip of an image, and whose output is its strip of the output.

    Has the parameters of the layer that it stands for, the same objects under the same names. Their gradients are this member's
    contribution only: whoever updates them sums over all members. All members have the same samples.
    """

    overlap = True
    """Whether the interior is computed while the halo is on its way. Set it before `divide`."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: Communicator,
        division: Division,
        *,
        outputs: Division | None = None,
        dim: int = HEIGHT,
        recorder: Recorder | None = None,
    ) -> None:
        """Arguments:
        module: the layer that is divided. It is not changed.
        name: its name in the model, for messages, traces and errors.
        communicator: of the members that divide the image.
        division: of the input's rows; `divide` changes it.
        outputs: the division of the output; by default the one that follows the input's (`follow`).
        dim: the dimension that is divided, 2 for the height and 3 for the width.
        """
        super().__init__()
        self.name, self.communicator, self.dim = name, communicator, dim
        self.recorder: Recorder = recorder if recorder is not None else NullRecorder()
        adopt(self, module)
        self.configure(module)
        self.divide(division, outputs)

    @abstractmethod
    def configure(self, module: nn.Module) -> None:
        """Take the settings of the layer that this one stands for. Raises `UsageError` for what cannot be divided."""

    @abstractmethod
    def reach(self, rows: int) -> Reach:
        """Which of so many input rows its output rows need."""

    @abstractmethod
    def compute(self, rows: Tensor, outputs: Range, weights: Sequence[Tensor]) -> Tensor:
        """A range of output rows, from exactly the rows of the input that it needs.

        ``weights`` are the layer's parameters, in the order of `weights`, to be used instead of its own.
        """

    def weights(self) -> list[Tensor]:
        """The parameters that `compute` uses; those that are ``None`` left out."""
        return list(self.parameters(recurse=False))

    def divide(self, division: Division, outputs: Division | None = None) -> Division:
        """Use this division from now on, for images of another height. Returns that of the output, for the next layer."""
        self.division = checked(division)
        if len(division) != self.communicator.size:
            raise UsageError(f"{self.name}: the image has {len(division)} strips for {self.communicator.size} processes")
        reach = self.geometry = self.reach(division[-1][1])
        if reach.outputs < 1:
            raise UsageError(f"{self.name}: an image of {reach.length} rows is too small for it")
        self.out_division = checked(outputs) if outputs is not None else follow(reach, division)
        if len(self.out_division) != len(division) or self.out_division[-1][1] != reach.outputs:
            raise UsageError(f"{self.name}: {self.out_division} does not divide {reach.outputs} rows in {len(division)} strips")
        self.strip = strip(reach, division, self.out_division, self.communicator.rank)
        self.exchange = HaloExchange(self.communicator, self.strip, self.name, self.dim, overlap=self.overlap)
        return self.out_division

    def forward(self, own: Tensor) -> Tensor:
        """This member's strip of the output, from its strip of the input (samples, channels, height, width)."""
        if own.dim() != 4:
            raise UsageError(f"{self.name}: a divided image has 4 dimensions (NCHW), not the shape {tuple(own.shape)}")
        result: Tensor = _Overlapped.apply(self, torch.is_grad_enabled(), own, *self.weights())  # type: ignore[no-untyped-call]
        return result

    def span(self, what: str, category: str, suffix: str = "") -> AbstractContextManager[object]:
        """A span of the trace: ``interior of features.3``."""
        return self.recorder.span(f"{what} of {self.name}{suffix}", category)

    def extra_repr(self) -> str:
        start, stop = self.strip.own
        return f"{self.name!r}, rows {start} to {stop} of {self.geometry.length}"


def adopt(layer: nn.Module, module: nn.Module) -> None:
    """Give a layer the parameters and buffers of the module that it stands for, and its mode."""
    for name, parameter in module._parameters.items():
        layer.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        layer.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    layer.train(module.training)


@dataclass(slots=True)
class _Piece:
    """Some output rows, with the graph by which they were computed."""

    outputs: Range
    needed: Range
    rows: Tensor
    result: Tensor
    gradient: Tensor | None = None
    """Of ``rows``."""


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: DomainLayer, recording: bool, own: Tensor, *weights: Tensor) -> Tensor:
        wanted = [recording and needed for needed in ctx.needs_input_grad[2:]]
        ctx.step = _Step(layer, own.detach(), weights, wanted)
        return ctx.step.forward(own.detach())  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        step, ctx.step = ctx.step, None
        if step is None:
            raise RuntimeError("backward a second time through a divided layer, which has freed what it kept for the first")
        return (None, None, *step.backward(gradient))


class _Step:
    """One forward of a layer, and what its backward needs."""

    def __init__(self, layer: DomainLayer, own: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        """``wanted``: whether a gradient is needed, of the input and of each weight."""
        self.layer, self.strip, self.exchange = layer, layer.strip, layer.exchange  # as they are now: `divide` may change them
        self.shape, self.dtype, self.device = tuple(own.shape), own.dtype, own.device
        self.wanted = wanted
        self.weights = [weight.detach().requires_grad_(need) for weight, need in zip(weights, wanted[1:], strict=True)]
        self.interior: list[_Piece] = []
        self.rims: list[_Piece] = []

    def forward(self, own: Tensor) -> Tensor:
        layer = self.layer
        with self._traced("halo", "send"):
            arriving = self.exchange.begin(own)
        if length(self.strip.interior):
            with layer.span("interior", "compute"):
                self.interior = [self._piece(arriving, self.strip.interior)]
        with self._traced("wait for halo", "wait"):
            arriving.wait()
        if self.strip.rims:
            with layer.span("rim", "compute"):
                self.rims = [self._piece(arriving, outputs) for outputs in self.strip.rims]
        results = [piece.result.detach() for piece in sorted(self.pieces, key=lambda piece: piece.outputs)]
        if not results:
            return self._nothing(own)
        return results[0] if len(results) == 1 else torch.cat(results, layer.dim)

    def _traced(self, what: str, category: str, suffix: str = "") -> AbstractContextManager[object]:
        """A span of communication, where there is any."""
        return self.layer.span(what, category, suffix) if self.strip.sends or self.strip.receives else nullcontext()

    @property
    def pieces(self) -> list[_Piece]:
        return [*self.interior, *self.rims]

    def _piece(self, arriving: Arriving, outputs: Range) -> _Piece:
        needed = self.layer.geometry.needs(outputs)
        rows = arriving.rows(needed).detach().requires_grad_(self.wanted[0])
        with torch.set_grad_enabled(any(self.wanted)):
            return _Piece(outputs, needed, rows, self.layer.compute(rows, outputs, self.weights))

    def _nothing(self, own: Tensor) -> Tensor:
        """No rows, in the shape that some would have."""
        first = (0, 1)
        rows = own.new_zeros(self.exchange.shape(self.shape, self.layer.geometry.needs(first)))
        return self.layer.compute(rows, first, self.weights).narrow(self.layer.dim, 0, 0)

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        layer, suffix = self.layer, " (backward)"
        parts = {
            id(piece): gradient.narrow(layer.dim, piece.outputs[0] - self.strip.outputs[0], length(piece.outputs))
            for piece in self.pieces
        }
        returning = None
        if self.wanted[0]:
            if self.rims:
                with layer.span("rim", "compute", suffix):
                    for piece in self.rims:
                        (piece.gradient,) = self._gradients([piece], parts, [piece.rows], again=any(self.wanted[1:]))
            with self._traced("halo", "send", suffix):
                returning = self.exchange.begin_return(self._of_others, self.shape, self.dtype)
        with layer.span("interior", "compute", suffix):
            weights = [weight for weight in self.weights if weight.requires_grad]
            inputs = [piece.rows for piece in self.interior] if self.wanted[0] else []
            found = self._gradients(self.pieces if weights else self.interior, parts, [*inputs, *weights])
            of_weights = iter(found[len(inputs) :])
            if inputs:
                self.interior[0].gradient = found[0]
            own = self._of_own() if self.wanted[0] else None
        if returning is not None and own is not None:
            with self._traced("wait for halo", "wait", suffix):
                returning.add_to(own)
        return [own, *(next(of_weights) if weight.requires_grad else None for weight in self.weights)]

    def _gradients(
        self, pieces: Sequence[_Piece], parts: dict[int, Tensor], inputs: Sequence[Tensor], again: bool = False
    ) -> list[Tensor]:
        """The gradients of ``inputs``; zero where nothing depends on them, as on a strip of no rows."""
        pieces = [piece for piece in pieces if piece.result.requires_grad]
        if not pieces or not inputs:
            return [torch.zeros_like(each) for each in inputs]
        found = torch.autograd.grad(
            [piece.result for piece in pieces],
            inputs,
            [parts[id(piece)] for piece in pieces],
            retain_graph=again,
            allow_unused=True,
        )
        return [torch.zeros_like(each) if one is None else one for each, one in zip(inputs, found, strict=True)]

    def _of_others(self, rows: Range) -> Tensor:
        """The gradient of rows of another member. Only one rim needs them: where there are two, an interior lies between."""
        (piece,) = (piece for piece in self.rims if piece.needed[0] <= rows[0] and rows[1] <= piece.needed[1])
        assert piece.gradient is not None
        return piece.gradient.narrow(self.layer.dim, rows[0] - piece.needed[0], length(rows))

    def _of_own(self) -> Tensor:
        """The gradient of the own rows, without what others add to it."""
        own, dim = self.strip.own, self.layer.dim
        pieces = [piece for piece in self.pieces if length(overlap(piece.needed, own))]
        if len(pieces) == 1 and pieces[0].needed == own and not self.strip.sends and pieces[0].gradient is not None:
            return pieces[0].gradient
        total = torch.zeros(self.exchange.shape(self.shape, own), dtype=self.dtype, device=self.device)
        for piece in pieces:
            assert piece.gradient is not None
            rows = overlap(piece.needed, own)
            part = piece.gradient.narrow(dim, rows[0] - piece.needed[0], length(rows))
            self.exchange.cut(total, rows).add_(part)
        return total
