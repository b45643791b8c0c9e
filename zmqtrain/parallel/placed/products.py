"""Products: matrices, batches of them, convolutions. What is divided outside stays so; what is divided inside gives summands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zmqtrain.parallel.placed.dispatch import freed, rule
from zmqtrain.parallel.placed.functions import function
from zmqtrain.parallel.placed.tensor import Placed, World, from_local, to_local
from zmqtrain.parallel.placement import Divisions, Placement, Summands, changed, laid

aten = torch.ops.aten


class Cut(NamedTuple):
    """How one dimension is divided: over what, and in which ranges of which processes."""

    over: str
    """``samples`` (of columns or of all processes) or ``rows``."""
    grid: Any
    samples: str
    ranges: Divisions
    """The part of the dimension that each row of the grid has."""
    unit: int = 1
    """How much of the dimension a sample is."""


def cuts(placement: Placement, shape: Sequence[int]) -> dict[int, Cut]:
    """How a tensor of this shape is cut, by dimension; dimensions that are whole are left out."""
    found = {}
    if placement.divided is not None:
        found[placement.divided] = Cut("rows", placement.grid, "columns", placement.divisions)
    if placement.sample_dimension is not None:
        found[placement.sample_dimension] = Cut("samples", placement.grid, placement.samples, (), placement.sample_unit)
    return found


def placement_of(grid: Any, dimensions: Mapping[int, Cut], summands: Summands = "none") -> Placement:
    """The placement with these dimensions divided; over the same thing at most once."""
    found = laid(grid, sample_dimension=None, summands=summands)
    for dimension, cut in dimensions.items():
        if cut.over == "rows":
            found = changed(found, divided=dimension, divisions=cut.ranges)
        else:
            found = changed(found, samples=cut.samples, sample_dimension=dimension, sample_unit=cut.unit)
    return found


def _summands(inner: Mapping[str, Cut]) -> Summands:
    over = {cut.over for cut in inner.values()}
    every = any(cut.samples == "all" for cut in inner.values())
    if not over:
        return "none"
    return "all" if every or len(over) == 2 else "row" if over == {"samples"} else "column"


def product(world: World, one: Tensor, other: Tensor, letters: str, compute: Any) -> Any:
    """A product in the notation of einsum, ``abc,acd->abd``, with each letter once a tensor.

    A letter is divided as the first tensor has it that is divided there; two letters over the same thing are not possible: then the
    one that comes first in the result (or, failing that, inside) stays.
    """
    inputs, output = letters.split("->")
    names = inputs.split(",")
    values = [one, other]
    grid = next(value.placement.grid for value in values if isinstance(value, Placed))
    wanted: dict[str, Cut] = {}
    for value, letter_row in zip(values, names, strict=True):
        if isinstance(value, Placed) and value.placement.grid == grid:
            for dimension, cut in cuts(value.placement, value.shape).items():
                wanted.setdefault(letter_row[dimension], cut)
    sizes = {letter: size for value, row in zip(values, names, strict=True) for letter, size in zip(row, value.shape, strict=True)}
    chosen: dict[str, Cut] = {}
    for letter in sorted(wanted, key=lambda each: (each not in output, output.find(each))):
        cut = wanted[letter]
        if cut.over in {each.over for each in chosen.values()} or (
            chosen and ("all" in {cut.samples, *(each.samples for each in chosen.values())})
        ):
            continue
        chosen[letter] = cut
    local = []
    for value, row in zip(values, names, strict=True):
        target = placement_of(grid, {number: chosen[letter] for number, letter in enumerate(row) if letter in chosen})
        local.append(world.relaid(value, target) if isinstance(value, Placed) else world.cut(value, target))
    summands = _summands({letter: cut for letter, cut in chosen.items() if letter not in output})
    placement = placement_of(grid, {output.index(letter): cut for letter, cut in chosen.items() if letter in output}, summands)
    found = compute(*local)
    return Placed(found, placement, tuple(sizes[letter] for letter in output), world)


@rule(aten.mm.default)
def mm(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A matrix times a matrix."""
    return product(world, args[0], args[1], "ik,kj->ij", func)


@rule(aten.mv.default)
def mv(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A matrix times a vector."""
    return product(world, args[0], args[1], "ik,k->i", func)


@rule(aten.dot.default)
def dot(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A vector times a vector."""
    return product(world, args[0], args[1], "k,k->", func)


@rule(aten.bmm.default)
def bmm(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A batch of products."""
    return product(world, args[0], args[1], "bik,bkj->bij", func)


@function(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor) -> Any:
    """Products of matrices of the same samples and heads, of which each process has some: not as one list of matrices."""
    given = [input, other]
    if not all(isinstance(each, Placed) and each.dim() == input.dim() and each.shape[:-2] == input.shape[:-2] for each in given):
        return NotImplemented
    if input.dim() < 4 or input.shape[-1] != other.shape[-2]:
        return NotImplemented
    assert isinstance(input, Placed)
    assert isinstance(other, Placed)
    places = [freed(each, [each.dim() - 2, each.dim() - 1]) for each in (input, other)]
    if any(each.placement.divided != place.divided for each, place in zip((input, other), places, strict=True)):
        return NotImplemented  # divided inside
    place = max(places, key=lambda each: (each.divided is not None, each.sample_dimension is not None, each.samples == "all"))
    own = [to_local(each, place, input.world) for each in given]
    return from_local(own[0].matmul(own[1]), place, (*input.shape[:-1], other.shape[-1]), input.world)


@rule(aten.addmm.default, aten.baddbmm.default)
def addmm(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A product and something that is added to it."""
    added, one, other = args[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    letters, plain = ("ik,kj->ij", aten.mm.default) if func is aten.addmm.default else ("bik,bkj->bij", aten.bmm.default)
    found = product(world, one, other, letters, plain)
    found = found if alpha == 1 else found * alpha
    return found + (added if beta == 1 else added * beta)


@rule(aten.convolution.default, aten.mkldnn_convolution.default, both=True)
def convolution(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Each process its own samples."""
    value, weight, bias, *rest = args
    if not isinstance(value, Placed):
        return NotImplemented
    placement = freed(value, range(1, value.dim()))
    whole = [world.whole(each) if isinstance(each, Placed) else each for each in (weight, bias)]
    local = world.relaid(value, placement)
    found = func(local, *whole, *rest)
    return Placed(found, placement, (value.shape[0], *found.shape[1:]), world)


@rule(aten.convolution_backward.default, both=True)
def convolution_backward(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Gradients of weights are summands of all who have other samples."""
    gradient, value, weight, *rest = args
    placed = next(each for each in (gradient, value) if isinstance(each, Placed))
    placement = freed(placed, range(1, placed.dim()))
    own = [world.relaid(each, placement) if isinstance(each, Placed) else world.cut(each, placement) for each in (gradient, value)]
    whole = world.whole(weight) if isinstance(weight, Placed) else weight
    found = func(*own, whole, *rest)
    over: Summands = "none"
    if placement.sample_dimension is not None:
        over = "all" if placement.samples == "all" else "row"
    of_weights = laid(placement.grid, sample_dimension=None, summands=over)
    shapes = [tuple(value.shape), tuple(weight.shape), (gradient.shape[1],)]
    places = [placement, of_weights, of_weights]
    return tuple(
        None if each is None else Placed(each, place, shape, world)
        for each, place, shape in zip(found, places, shapes, strict=True)
    )


@function(torch.linalg.householder_product)
def householder_product(input: Tensor, tau: Tensor, *, out: Tensor | None = None) -> Any:
    """`torch.linalg.householder_product`, by all processes alike, and so is its backward: that changes views in place, which
    what is divided, or has summands, does not allow. (`torch.nn.utils.parametrizations.orthogonal` computes it.)"""
    placed = next((each for each in (input, tau) if isinstance(each, Placed)), None)
    if placed is None or out is not None:
        return NotImplemented
    world, whole = placed.world, placed.world.whole_of(placed.placement.grid)
    found = torch.linalg.householder_product(to_local(input, whole, world), to_local(tau, whole, world))
    return from_local(found, whole, found.shape, world)
