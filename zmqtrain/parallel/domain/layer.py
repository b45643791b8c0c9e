"""What divided layers have in common: the interior is computed while the halo travels, forward and backward.

Forward::

    begin the exchange -> compute the interior -> wait -> compute the rims -> join

Backward::

    dX of the rims -> begin to send others' parts of it -> dX of the interior, dW of all -> wait -> add what came back

Where height and width are divided, the exchange along the width begins when that along the height has ended, and sends columns of
rows of others, too: so the corners arrive. Output rows above and below the interior are computed while it is on its way::

    height: begin -> interior -> height: wait, width: begin -> above and below -> width: wait -> left and right -> join

and backward the other way round.

A layer computes a block of the output from the block of the input that it needs (`DomainLayer.compute`), with ordinary torch
operations; each of at most five pieces (interior, above, below, left, right) has a small autograd graph of its own, of which
backward asks dX and dW apart. The interior reads this member's strip where it lies; only the rims' few rows are copied together
with those of others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zmqtrain.errors import UsageError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.parallel.communicator import Communicator
from zmqtrain.parallel.geometry import Division, Range, Reach, Strip, checked, follow, length, overlap, strip
from zmqtrain.parallel.halo import HEIGHT, HaloExchange
from zmqtrain.parallel.once import once_differentiable

#: A range of each divided dimension, in the order in which these are exchanged.
Block: TypeAlias = Mapping[int, Range]


@dataclass(frozen=True, slots=True)
class Across:
    """A second dimension that is divided, over the members of another communicator: those with the same part of the first one."""

    dim: int
    communicator: Communicator
    division: Division


@dataclass(frozen=True, slots=True)
class DividedDimension:
    """A divided dimension of an image: its geometry, this process's strip, and the exchange of halos along it."""

    geometry: Reach
    out_division: Division
    strip: Strip
    exchange: HaloExchange


class DomainLayer(nn.Module):
    """A layer whose input is this member's strip of an image, and whose output is its strip of the output.

    Has the parameters of the layer that it stands for, the same objects under the same names. Their gradients are this member's
    contribution only: they must be summed over all members before an update. All members have the same samples.
    """

    overlap = True
    """Whether the interior is computed while the halo is on its way. Set it before `divide`."""
    axes: int = 0
    """How many dimensions an image has beside samples and channels; 0: any number."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        communicator: Communicator,
        division: Division,
        *,
        outputs: Division | None = None,
        dim: int = HEIGHT,
        across: Across | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Arguments:
        module: the layer that is divided. It is not changed.
        name: its name in the model, for messages, traces and errors.
        communicator: of the members that divide the image along ``dim``.
        division: of the input's rows; `divide` changes it.
        outputs: the division of the output; by default the one that follows the input's (`follow`).
        dim: the dimension that is divided, 2 for the height and 3 for the width.
        across: a second one.
        """
        super().__init__()
        self.name, self.communicator, self.dim = name, communicator, dim
        self.communicators = {dim: communicator} | ({} if across is None else {across.dim: across.communicator})
        self.recorder: Recorder = recorder if recorder is not None else NullRecorder()
        adopt(self, module)
        self.configure(module)
        self.divide(division, outputs, None if across is None else across.division)

    @abstractmethod
    def configure(self, module: nn.Module) -> None:
        """Take the settings of the layer that this one stands for. Raises `UsageError` for what cannot be divided."""

    @abstractmethod
    def reach(self, dim: int, rows: int) -> Reach:
        """Which of ``rows`` input rows its output rows need, along a dimension."""

    @abstractmethod
    def compute(self, rows: Tensor, outputs: Block, weights: Sequence[Tensor]) -> Tensor:
        """A block of the output, from exactly the block of the input that it needs.

        ``weights`` are the layer's parameters, in the order of `weights`, to be used instead of its own.
        """

    def weights(self) -> list[Tensor]:
        """The parameters that `compute` uses; those that are ``None`` left out."""
        return list(self.parameters(recurse=False))

    def divide(self, division: Division, outputs: Division | None = None, across: Division | None = None) -> Division:
        """Use this division from now on, for images of another size; ``across``: of the second dimension, if there is one.

        Returns that of the output, for the next layer; that of the second dimension is `out_across`.
        """
        given = dict(zip(self.communicators, [division] if across is None else [division, across], strict=True))
        self.lines = {dim: self._line(dim, each, outputs if dim == self.dim else None) for dim, each in given.items()}
        return self.out_division

    def _line(self, dim: int, division: Division, outputs: Division | None) -> DividedDimension:
        communicator = self.communicators[dim]
        checked(division)
        if len(division) != communicator.size:
            raise UsageError(f"{self.name}: the image has {len(division)} strips for {communicator.size} processes")
        reach = self.reach(dim, division[-1][1])
        if reach.outputs < 1:
            raise UsageError(f"{self.name}: an image of {reach.length} rows is too small for it")
        found = checked(outputs) if outputs is not None else follow(reach, division)
        if len(found) != len(division) or found[-1][1] != reach.outputs:
            raise UsageError(f"{self.name}: {found} does not divide {reach.outputs} rows in {len(division)} strips")
        own = strip(reach, division, found, communicator.rank)
        return DividedDimension(reach, found, own, HaloExchange(communicator, own, self.name, dim, overlap=self.overlap))

    @property
    def geometry(self) -> Reach:
        """Which input rows its output rows need, along the first divided dimension."""
        return self.lines[self.dim].geometry

    @property
    def out_division(self) -> Division:
        """The division of the output along the first divided dimension."""
        return self.lines[self.dim].out_division

    @property
    def out_across(self) -> Division | None:
        """The division of the output along the second dimension."""
        return next((line.out_division for dim, line in self.lines.items() if dim != self.dim), None)

    def forward(self, own: Tensor) -> Tensor:
        """This member's strip of the output, from its strip of the input (samples, channels, height, width)."""
        if self.axes and own.dim() != self.axes + 2:
            raise UsageError(f"{self.name}: a divided image has {self.axes + 2} dimensions here, not the shape {tuple(own.shape)}")
        result: Tensor = _Overlapped.apply(self, torch.is_grad_enabled(), own, *self.weights())  # type: ignore[no-untyped-call]
        return result

    def span(self, what: str, category: str, suffix: str = "") -> AbstractContextManager[object]:
        """A span of the trace: ``interior of features.3``."""
        return self.recorder.span(f"{what} of {self.name}{suffix}", category)

    def extra_repr(self) -> str:
        parts = [f"{line.strip.own[0]} to {line.strip.own[1]} of {line.geometry.length}" for line in self.lines.values()]
        return f"{self.name!r}, rows {', columns '.join(parts)}"


def adopt(layer: nn.Module, module: nn.Module) -> None:
    """Give a layer the parameters and buffers of the module that it stands for, and its mode."""
    for name, parameter in module._parameters.items():
        layer.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        layer.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    layer.train(module.training)


@dataclass(slots=True)
class _Piece:
    """A block of the output, with the graph by which it was computed."""

    outputs: Block
    needed: Block
    rows: Tensor
    result: Tensor
    gradient: Tensor | None = None
    """The gradient of ``rows``."""


class _Overlapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: DomainLayer, recording: bool, own: Tensor, *weights: Tensor) -> Tensor:
        wanted = [recording and needed for needed in ctx.needs_input_grad[2:]]
        ctx.step = _Step(layer, own.detach(), weights, wanted)
        return ctx.step.forward(own.detach())  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        step, ctx.step = ctx.step, None
        if step is None:
            raise RuntimeError("backward a second time through a divided layer, which has freed what it kept for the first")
        return (None, None, *step.backward(gradient))


def _itself(kept: Tensor) -> Tensor:
    return kept


def _common(one: Block, other: Block) -> Block | None:
    """The block that is in both; ``None`` if there is none."""
    found = {dim: overlap(rows, other[dim]) for dim, rows in one.items()}
    return found if all(length(rows) for rows in found.values()) else None


def _cut(tensor: Tensor, held: Block, wanted: Block) -> Tensor:
    """A view of a block that lies in the tensor of another."""
    for dim, rows in wanted.items():
        tensor = tensor.narrow(dim, rows[0] - held[dim][0] if length(rows) else 0, length(rows))
    return tensor


class _Held:
    """Blocks of an image that are here, which do not overlap."""

    def __init__(self, block: Block, own: Tensor) -> None:
        self._blocks: list[tuple[Block, Tensor]] = [(block, own)]
        self._own = own

    def add(self, block: Block, tensor: Tensor) -> None:
        """One that has come from another member."""
        self._blocks.append((block, tensor.to(self._own.device)))

    def block(self, wanted: Block) -> Tensor:
        """A block of it: a view where it lies in one piece, as it does if it is this member's own."""
        parts = [(common, _cut(tensor, held, common)) for held, tensor in self._blocks if (common := _common(held, wanted))]
        if len(parts) == 1 and parts[0][0] == dict(wanted):
            return parts[0][1]
        shape = _shape(self._own.shape, wanted)
        assert sum(part.numel() for _, part in parts) == shape.numel(), f"the block {wanted} is not here"
        if len(wanted) == 1 and parts:
            ((dim, _),) = wanted.items()
            return torch.cat([part for _, part in sorted(parts, key=lambda each: each[0][dim])], dim)
        found = self._own.new_empty(shape)
        for common, part in parts:
            _cut(found, wanted, common).copy_(part)
        return found


def _shape(like: Sequence[int], block: Block) -> torch.Size:
    """A shape with the lengths of a block."""
    return torch.Size([length(block[dim]) if dim in block else size for dim, size in enumerate(like)])


class _Step:
    """One forward of a layer, and what its backward needs."""

    def __init__(self, layer: DomainLayer, own: Tensor, weights: Sequence[Tensor], wanted: Sequence[bool]) -> None:
        """``wanted``: whether a gradient is needed, of the input and of each weight."""
        self.layer, self.lines = layer, layer.lines  # as they are now: `divide` may change them
        self.shape, self.dtype, self.device = tuple(own.shape), own.dtype, own.device
        self.wanted = wanted
        self.weights = [weight.detach().requires_grad_(need) for weight, need in zip(weights, wanted[1:], strict=True)]
        self.own: Block = {dim: line.strip.own for dim, line in self.lines.items()}
        self.levels: list[list[_Piece]] = []
        """The interior, and the rims that wait for each exchange."""
        self.gradients: list[tuple[Block, Tensor]] = []
        """What is known of the gradient of the input: summands of some blocks."""

    def forward(self, own: Tensor) -> Tensor:
        held = _Held(self.own, own)
        for line in self.lines.values():
            line.exchange.check(own)
        for number, (dim, line) in enumerate(self.lines.items()):
            around = self._around(dim)
            with self._traced(line, "halo", "send"):
                arriving = line.exchange.send(_of(held.block, around, dim), _shape(self.shape, around), own.dtype)
            self._compute(number, held)
            with self._traced(line, "wait for halo", "wait"):
                for part, tensor in line.exchange.arrived(arriving):
                    held.add({**around, dim: part.rows}, tensor)
        self._compute(len(self.lines), held)
        joined: list[tuple[Block, Tensor]] = [(piece.outputs, piece.result.detach()) for piece in self.levels[0]]
        for dim, rims in zip(self.lines, self.levels[1:], strict=True):
            joined += [(piece.outputs, piece.result.detach()) for piece in rims]
            joined.sort(key=lambda each: each[0][dim])
            if len(joined) > 1:
                joined = [(joined[0][0], torch.cat([result for _, result in joined], dim))]
        return joined[0][1] if joined else self._nothing(own)

    def _around(self, dim: int) -> dict[int, Range]:
        """Along the other dimensions, the block that the exchange of this one is about."""
        found, passed = {}, False
        for each, line in self.lines.items():
            if each == dim:
                passed = True
            else:
                found[each] = line.strip.own if passed else line.strip.needed
        return found

    def _compute(self, level: int, held: _Held) -> None:
        """The pieces that need what has come by the exchanges of the first ``level`` dimensions."""
        blocks = [block for block in self._blocks(level) if all(length(rows) for rows in block.values())]
        self.levels.append([])
        if blocks:
            with self.layer.span("rim" if level else "interior", "compute"):
                self.levels[level] += [self._piece(held, block) for block in blocks]

    def _blocks(self, level: int) -> Iterator[Block]:
        lines = list(self.lines.items())
        outer = {dim: line.strip.outputs for dim, line in lines[: max(level - 1, 0)]}
        inner = {dim: line.strip.interior for dim, line in lines[level:]}
        if not level:
            yield inner
            return
        dim, line = lines[level - 1]
        for rows in line.strip.rims:
            yield {**outer, dim: rows, **inner}

    def _traced(self, line: DividedDimension, what: str, category: str, suffix: str = "") -> AbstractContextManager[object]:
        """A span of communication, where there is any."""
        return self.layer.span(what, category, suffix) if line.strip.sends or line.strip.receives else nullcontext()

    @property
    def pieces(self) -> list[_Piece]:
        return [piece for level in self.levels for piece in level]

    def _piece(self, held: _Held, outputs: Block) -> _Piece:
        needed = {dim: self.lines[dim].geometry.needs(rows) for dim, rows in outputs.items()}
        rows = held.block(needed).detach().requires_grad_(self.wanted[0])
        # A backward within backward would have `torch.utils.checkpoint` compute all of its function once more for each layer, and
        # running statistics would count that: what a piece keeps is kept.
        with torch.set_grad_enabled(any(self.wanted)), saved_tensors_hooks(_itself, _itself):
            return _Piece(outputs, needed, rows, self.layer.compute(rows, outputs, self.weights))

    def _nothing(self, own: Tensor) -> Tensor:
        """No rows, in the shape that some would have."""
        first = dict.fromkeys(self.lines, (0, 1))
        rows = own.new_zeros(_shape(self.shape, {dim: line.geometry.needs((0, 1)) for dim, line in self.lines.items()}))
        some = self.layer.compute(rows, first, self.weights)
        return some.new_zeros(_shape(some.shape, {dim: line.strip.outputs for dim, line in self.lines.items()}))

    def backward(self, gradient: Tensor) -> list[Tensor | None]:
        layer, suffix = self.layer, " (backward)"
        outputs = {dim: line.strip.outputs for dim, line in self.lines.items()}
        parts = {id(piece): _cut(gradient, outputs, piece.outputs) for piece in self.pieces}
        weights = [weight for weight in self.weights if weight.requires_grad]
        returning: tuple[int, Any] | None = None
        if self.wanted[0]:
            for level, (dim, line) in reversed(list(enumerate(self.lines.items(), 1))):
                if self.levels[level]:
                    with layer.span("rim", "compute", suffix):
                        for piece in self.levels[level]:
                            (piece.gradient,) = self._gradients([piece], parts, [piece.rows], again=bool(weights))
                            self.gradients.append((piece.needed, piece.gradient))
                if returning is not None:
                    self.gradients += self._returned(*returning)
                with self._traced(line, "halo", "send", suffix):
                    around = self._around(dim)
                    returning = dim, line.exchange.send_back(_of(self._total, around, dim), _shape(self.shape, around), self.dtype)
        own: Tensor | None = None
        with layer.span("interior", "compute", suffix):
            interior = self.levels[0]
            inputs = [piece.rows for piece in interior] if self.wanted[0] else []
            found = self._gradients(self.pieces if weights else interior, parts, [*inputs, *weights])
            of_weights = iter(found[len(inputs) :])
            if self.wanted[0]:
                self.gradients += [(piece.needed, each) for piece, each in zip(interior, found[: len(inputs)], strict=True)]
                own = self._total(self.own, fresh=bool(next(iter(self.lines.values())).strip.sends))
        if returning is not None and own is not None:
            for block, part in self._returned(*returning):
                _cut(own, self.own, block).add_(part)
        return [own, *(next(of_weights) if weight.requires_grad else None for weight in self.weights)]

    def _returned(self, dim: int, pending: Any) -> Iterator[tuple[Block, Tensor]]:
        """The gradients that others have sent back in the exchange of a dimension."""
        line = self.lines[dim]
        with self._traced(line, "wait for halo", "wait", " (backward)"):
            for part, tensor in line.exchange.arrived(pending):
                yield {**self._around(dim), dim: part.rows}, tensor.to(self.device)

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

    def _total(self, block: Block, *, fresh: bool = False) -> Tensor:
        """What is known of the gradient of a block of the input, added up. ``fresh``: in memory of its own."""
        parts = [(common, _cut(each, held, common)) for held, each in self.gradients if (common := _common(held, block))]
        if len(parts) == 1 and parts[0][0] == block and not fresh:
            return parts[0][1]
        total = torch.zeros(_shape(self.shape, block), dtype=self.dtype, device=self.device)
        for common, part in parts:
            _cut(total, block, common).add_(part)
        return total


def _of(block: Callable[[Block], Tensor], around: Block, dim: int) -> Callable[[Range], Tensor]:
    """Of a range along one dimension, and all of ``around`` along the others."""
    return lambda rows: block({**around, dim: rows})
