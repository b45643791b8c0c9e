"""A divided layer beside the plain one: outputs, gradients, messages, and what was computed before what arrived."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.precision import close, exactly, judge_of
from zmqtrain.events import NullRecorder
from zmqtrain.parallel.communicator import Communicator, Expected, Label, Pending
from zmqtrain.parallel.domain.layer import Across, DomainLayer
from zmqtrain.parallel.geometry import Count, Division, even, grid_traffic, halo_traffic
from zmqtrain.parallel.halo import HEIGHT
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks


def randomised(module: nn.Module, dtype: torch.dtype, seed: int = 1) -> nn.Module:
    """The module with weights that no symmetry can hide a fault behind."""
    generator = torch.Generator().manual_seed(seed)
    module = module.to(dtype)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=dtype, generator=generator) + 0.1
    return module


class Trace(NullRecorder):
    """The spans of a layer, as a list of their begins and ends; ``on_end(name)`` is called at each end."""

    def __init__(self, on_end: Callable[[str], None] = lambda _: None) -> None:
        self.moments: list[str] = []
        self._on_end = on_end

    @contextmanager
    def span(self, name: str, category: str, /, *, step: int | None = None) -> Iterator[None]:  # type: ignore[override]
        self.moments.append(f"begin {name}")
        yield
        self.moments.append(f"end {name}")
        self._on_end(name)


@dataclass
class Held:
    """A communicator whose messages arrive only once they may: ``allow`` is a member's word that they may arrive at it."""

    inner: Communicator
    may: dict[str, threading.Event] = field(default_factory=lambda: {"forward": threading.Event(), "backward": threading.Event()})

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[Expected], label: Label) -> Pending:
        pending, may = self.inner.exchange(sends, receives, label), self.may[label.phase]

        class Later:
            def wait(self) -> list[Tensor]:
                assert may.wait(10), f"{label}: waited for before the interior was computed"
                return pending.wait()

        return Later()

    def all_gather(self, part: Tensor, shapes: Sequence[tuple[int, ...]], label: Label) -> Pending:
        return self.inner.all_gather(part, shapes, label)

    def all_reduce(self, tensor: Tensor, label: Label) -> Pending:
        return self.inner.all_reduce(tensor, label)

    def reduce_scatter(self, parts: Sequence[Tensor], label: Label) -> Pending:
        return self.inner.reduce_scatter(parts, label)


def check_layer(
    make: type[DomainLayer],
    module: nn.Module,
    shape: tuple[int, int, int, int],
    members: int,
    *,
    division: Division | None = None,
    outputs: Division | None = None,
    dim: int = HEIGHT,
    dtype: torch.dtype = torch.float64,
    input_gradient: bool = True,
    image: Tensor | None = None,
    choices: bool = False,
) -> ThreadWorld:
    """Output, dX and summed gradients of parameters against the plain layer's, and messages against the geometry's prediction.

    ``choices``: what the layer computes depends on how it rounds, as which row is the nearest; so float64 is no judge of it.
    """
    module = randomised(module, dtype)
    division = division or even(shape[dim], members)
    generator = torch.Generator().manual_seed(2)
    image = torch.randn(shape, dtype=dtype, generator=generator) if image is None else image

    def plain(module: nn.Module, image: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
        own = image.clone().requires_grad_(input_gradient)
        result = module(own)
        if result.requires_grad and gradient is not None:
            result.backward(gradient)
        return result.detach(), own.grad, [parameter.grad for parameter in module.parameters()]

    shape_of_output = plain(copy.deepcopy(module), image, None)[0].shape
    gradient = torch.randn(shape_of_output, dtype=dtype, generator=generator)
    due, due_dx, due_gradients = plain(copy.deepcopy(module), image, gradient)
    exact, exact_dx, exact_gradients = plain(judge_of(module), exactly(image), exactly(gradient))
    if choices:
        exact, exact_dx, exact_gradients = exactly(due), exactly(due_dx), [exactly(each) for each in due_gradients]
    geometries = []

    def run(fabric: ThreadFabric) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        own_module = copy.deepcopy(module)
        own_module.zero_grad()
        communicator = fabric.among(tuple(range(members)))
        layer = make(own_module, "layer", communicator, division, outputs=outputs, dim=dim)
        assert dict(layer.named_parameters()).keys() == dict(module.named_parameters()).keys()
        geometries.append((layer.geometry, layer.out_division))
        start, stop = division[fabric.rank]
        own = image.narrow(dim, start, stop - start).clone().requires_grad_(input_gradient)
        result = layer(own)
        first, last = layer.out_division[fabric.rank]
        if result.requires_grad:
            result.backward(gradient.narrow(dim, first, last - first))
        return result.detach(), own.grad, [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]

    results, world = run_ranks(members, run)
    close(torch.cat([result for result, _, _ in results], dim), due, "output", exact=exact, least=1.0)
    if due_dx is not None:
        close(torch.cat([back for _, back, _ in results if back is not None], dim), due_dx, "dX", exact=exact_dx, least=1.0)
    for number, (one, judge) in enumerate(zip(due_gradients, exact_gradients, strict=True)):
        if one is not None:
            whole = torch.stack([gradients[number] for _, _, gradients in results]).sum(0)
            close(whole, one, f"gradient of parameter {number}", exact=judge, least=1.0)
    reach, out_division = geometries[0]
    row_bytes = image.element_size() * image.numel() // shape[dim]
    traffic = halo_traffic(reach, division, out_division, row_bytes, input_gradient=input_gradient)
    for rank, sent in enumerate(world.traffic):
        for phase in ("forward", "backward"):
            label = Label("layer", "halo", phase)
            assert Count(sent.messages[label], sent.nbytes[label]) == traffic[phase][rank], (rank, phase)
        assert {label.term for label in sent.messages} <= {"halo"}
    return world


def check_grid(
    make: type[DomainLayer],
    module: nn.Module,
    shape: tuple[int, int, int, int],
    parts: tuple[int, int],
    *,
    divisions: tuple[Division, Division] | None = None,
    input_gradient: bool = True,
    image: Tensor | None = None,
) -> None:
    """The same of an image whose height and width are divided into so many parts: outputs, gradients, and messages."""
    module = randomised(module, torch.float64)
    tall, wide = divisions or (even(shape[2], parts[0]), even(shape[3], parts[1]))
    generator = torch.Generator().manual_seed(2)
    image = torch.randn(shape, dtype=torch.float64, generator=generator) if image is None else image
    plain, whole = copy.deepcopy(module), image.clone().requires_grad_(input_gradient)
    due = plain(whole)
    gradient = torch.randn(due.shape, dtype=torch.float64, generator=generator)
    if due.requires_grad:
        due.backward(gradient)
    made = []

    def block(tensor: Tensor, one: Division, other: Division, rank: int) -> Tensor:
        row, column = divmod(rank, len(wide))
        return tensor[:, :, slice(*one[row]), slice(*other[column])]

    def run(fabric: ThreadFabric) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        row, column = divmod(fabric.rank, len(wide))
        above = fabric.among(tuple(range(column, len(tall) * len(wide), len(wide))))
        beside = fabric.among(tuple(range(row * len(wide), (row + 1) * len(wide))))
        layer = make(copy.deepcopy(module), "layer", above, tall, across=Across(3, beside, wide))
        made.append(layer)
        own = block(image, tall, wide, fabric.rank).clone().requires_grad_(input_gradient)
        result = layer(own)
        if result.requires_grad:
            assert layer.out_across is not None
            result.backward(block(gradient, layer.out_division, layer.out_across, fabric.rank))
        return result.detach(), own.grad, [each.grad for each in layer.parameters() if each.grad is not None]

    results, world = run_ranks(len(tall) * len(wide), run)
    lines = [made[0].lines[dim] for dim in (2, 3)]
    outputs = lines[0].out_division, lines[1].out_division
    for rank, (result, back, _) in enumerate(results):
        torch.testing.assert_close(result, block(due.detach(), *outputs, rank), rtol=1e-11, atol=1e-12)
        if whole.grad is not None:
            torch.testing.assert_close(back, block(whole.grad, tall, wide, rank), rtol=1e-11, atol=1e-12)
    for number, parameter in enumerate(plain.parameters()):
        total = torch.stack([gradients[number] for _, _, gradients in results]).sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-10, atol=1e-11)
    place_bytes = 8 * shape[0] * shape[1]
    reaches = lines[0].geometry, lines[1].geometry
    traffic = grid_traffic(reaches, (tall, wide), outputs, place_bytes, input_gradient=input_gradient)
    for rank, sent in enumerate(world.traffic):
        for phase in ("forward", "backward"):
            label = Label("layer", "halo", phase)
            assert Count(sent.messages[label], sent.nbytes[label]) == traffic[phase][rank], (rank, phase)


def check_overlap(make: type[DomainLayer], module: nn.Module, shape: tuple[int, int, int, int], members: int = 3) -> None:
    """Nothing arrives before the interior is computed, forward and backward; and so the layer must end nevertheless."""
    division = even(shape[2], members)

    def run(fabric: ThreadFabric) -> list[str]:
        held = Held(fabric.among(tuple(range(members))))

        def on_end(name: str) -> None:
            if name == "interior of layer":
                held.may["forward"].set()
            if name == "interior of layer (backward)":
                held.may["backward"].set()

        trace = Trace(on_end)
        layer = make(copy.deepcopy(module), "layer", held, division, recorder=trace)
        start, stop = division[fabric.rank]
        own = torch.randn(*shape[:2], stop - start, shape[3], requires_grad=True)
        layer(own).sum().backward()
        return trace.moments

    results, _ = run_ranks(members, run)
    for moments in results:
        for suffix in ("", " (backward)"):
            order = [f"end halo of layer{suffix}", f"begin interior of layer{suffix}", f"begin wait for halo of layer{suffix}"]
            assert sorted(order, key=moments.index) == order
        if "begin rim of layer" in moments:
            assert moments.index("end wait for halo of layer") < moments.index("begin rim of layer")
            assert moments.index("end rim of layer (backward)") < moments.index("begin halo of layer (backward)")
    assert any("begin rim of layer" in moments for moments in results)
