"""A comparison on a part of each image, where the divided model does the same to it as to the whole one.

What a comparison costs goes with the images' area. What it shows does not: that is the same operators, and parts that are cut, sent
and joined in the same ways. So the ordinary model first runs on shapes alone, on whole images and on smaller ones, and these are
taken if

* the operators are the same, in the same order, in training and in evaluation;
* along every size that is smaller, parts are even or uneven as before, and none becomes empty;
* no part becomes shorter than what a kernel reaches into the next one, nor any size, so that each of its weights meets something;
* where a kernel takes strides, parts of its outputs begin as far from those of its inputs.

A model that looks at sizes, or at numbers, to decide what to do, gets whole images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zmqtrain.collectives.group import bounds
from zmqtrain.data.batch import Batch
from zmqtrain.data.nested import leaves, mapped
from zmqtrain.data.seeding import seed_torch
from zmqtrain.parallel.copying import refers_to_itself
from zmqtrain.parallel.modelled import without_content
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.verify.case import Case, alone, mean

#: Height and width of images, and those of what is taken of them.
Sizes: TypeAlias = Mapping[tuple[int, int], tuple[int, int]]
#: Images up to this side are taken as they are.
SMALLEST = 64
#: Networks halve their images, mostly five times.
STEP = 32
aten = torch.ops.aten
#: What has kernels: the arguments that say their sizes (of a convolution, the weight), their strides, and their dilation.
_KERNELS = {
    aten.convolution: (1, 3, 5),
    aten.max_pool1d_with_indices: (1, 2, 4),
    aten.max_pool2d_with_indices: (1, 2, 4),
    aten.max_pool3d_with_indices: (1, 2, 4),
    aten.avg_pool1d: (1, 2, None),
    aten.avg_pool2d: (1, 2, None),
    aten.avg_pool3d: (1, 2, None),
}


def sizes_of(case: Case, model: nn.Module, batch: Batch, parts: Sequence[int]) -> Sizes:
    """What to take of images of which sizes; nothing where they are best taken whole.

    ``model``: the ordinary one. ``parts``: into how many a plan divides one size of an image."""
    images = _image_sizes(batch)
    most = max((side for pair in images for side in pair), default=0)
    if not case.smaller or most <= SMALLEST or refers_to_itself(model):
        return {}
    whole = _seen(case, model, batch)
    for side in range(SMALLEST, most * 3 // 4 + 1, STEP) if whole else ():
        sizes = _cut(images, side)
        found = _seen(case, model, cropped(batch, sizes))
        if found and len(found) == len(whole) and all(each.like(other, parts) for each, other in zip(whole, found, strict=True)):
            return sizes
    return {}


def parts_of(divided: ParallelModel) -> tuple[int, ...]:
    """Into how many parts the plan of a divided model divides heights or widths of images."""
    strips = {held.assigned.strips for held in divided._assignment.held.values()} - {None}
    return tuple(sorted({number for each in strips if each is not None for number in (each.height, each.width)} - {1}))


def cropped(batch: Batch, sizes: Sizes) -> Batch:
    """The middle of each image, and of what is given for each of its pixels."""

    def crop(each: Tensor) -> Tensor:
        taken = sizes.get((each.shape[-2], each.shape[-1])) if each.dim() > 2 else None
        for dimension, size in zip((-2, -1), taken or (), strict=False):
            each = each.narrow(dimension, (each.shape[dimension] - size) // 2, size)
        return each.contiguous()

    return batch.mapped(lambda part: mapped(part, crop)) if sizes else batch


def _image_sizes(batch: Batch) -> list[tuple[int, int]]:
    found: dict[tuple[int, int], None] = {}
    given = batch.target if batch.forward is not None else (batch.inputs, dict(batch.named))
    for each in leaves(given):
        if isinstance(each, Tensor) and each.is_floating_point() and each.dim() > 3:
            found[each.shape[-2], each.shape[-1]] = None
    return list(found)


def _cut(images: Sequence[tuple[int, int]], side: int) -> Sizes:
    """Sides of about ``side``. Those that differ still do."""
    every = sorted({each for pair in images for each in pair if each > side})
    smaller = {each: min(side + STEP * number, each) for number, each in enumerate(every)}
    return {pair: (smaller.get(pair[0], pair[0]), smaller.get(pair[1], pair[1])) for pair in images}


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A convolution's or pool's, along one dimension."""

    reach: int
    """How far into a neighbour's part."""
    stride: int
    transposed: bool

    def apart(self, inputs: int, outputs: int, *, parts: int) -> list[int]:
        """How far each part's outputs begin from where its inputs do."""
        few, many = (inputs, outputs) if self.transposed else (outputs, inputs)
        cuts = zip(bounds(many, parts), bounds(few, parts), strict=True)
        return [start - self.stride * other for (start, _), (other, _) in cuts]


@dataclass(frozen=True, slots=True)
class _Operator:
    """One that has run: the shapes of what it was given first, and of what it gave."""

    func: Any
    given: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    kernels: tuple[_Kernel, ...]
    """Along the last dimensions."""

    def like(self, other: _Operator, parts: Sequence[int]) -> bool:
        """Whether ``other``, of smaller images, does the same."""
        if self.func is not other.func or self.kernels != other.kernels or len(self.shapes) != len(other.shapes):
            return False
        pairs = list(zip((self.given, *self.shapes), (other.given, *other.shapes), strict=True))
        if any(len(one) != len(two) for one, two in pairs):
            return False
        if not all(_alike(one, two, 0, parts) for whole, part in pairs for one, two in zip(whole, part, strict=True)):
            return False
        for number, kernel in enumerate(self.kernels, -len(self.kernels)):
            ways = [(each.given[number], each.shapes[0][number]) for each in (self, other)]
            if not _alike(ways[0][0], ways[1][0], kernel.reach, parts):
                return False
            if ways[0] != ways[1] and any(
                kernel.apart(*ways[0], parts=each) != kernel.apart(*ways[1], parts=each) for each in parts
            ):
                return False
        return not _resizes(self.func) or self._ratios(other)

    def _ratios(self, other: _Operator) -> bool:
        """Whether what resizes images does so by the same factors."""
        return all(
            mine * theirs_before == theirs * mine_before
            for one, two in zip(self.shapes, other.shapes, strict=True)
            if len(one) == len(self.given)
            for mine, theirs, mine_before, theirs_before in zip(one, two, self.given, other.given, strict=True)
        )


def _alike(whole: int, smaller: int, reach: int, parts: Sequence[int]) -> bool:
    """Whether parts of a size lie as those of the larger one do."""
    if whole == smaller:
        return True
    if smaller > whole or smaller < min(whole, reach + 1):
        return False
    return all(
        (whole % number == 0) == (smaller % number == 0) and smaller // number >= min(whole // number, max(reach, 1))
        for number in parts
    )


def _resizes(func: Any) -> bool:
    name = func._schema.name
    return "adaptive" in name or "upsample" in name


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Operator] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = next(_shapes((args, kwargs)), ())
        self.found.append(_Operator(func, given, tuple(_shapes(result)), _kernels(func, args)))
        return result


def _shapes(values: Any) -> Iterator[tuple[int, ...]]:
    return (tuple(each.shape) for each in pytree.tree_leaves(values) if isinstance(each, Tensor))


def _kernels(func: Any, args: Sequence[Any]) -> tuple[_Kernel, ...]:
    if func.overloadpacket not in _KERNELS:
        return ()
    of, step, spread = _KERNELS[func.overloadpacket]
    sizes = tuple(args[of].shape[2:] if isinstance(args[of], Tensor) else args[of])
    strides = _along(args, step, sizes)
    reaches = [((size - 1) * wide + 1) // 2 for size, wide in zip(sizes, _along(args, spread, (1,) * len(sizes)), strict=True)]
    transposed = func.overloadpacket is aten.convolution and args[6]
    return tuple(_Kernel(reach, stride, transposed) for reach, stride in zip(reaches, strides, strict=True))


def _along(args: Sequence[Any], place: int | None, default: Sequence[int]) -> Sequence[int]:
    """An argument with a number for each dimension, or one for all, or none."""
    found = args[place] if place is not None and len(args) > place else ()
    return (tuple(found) or tuple(default)) if len(found) != 1 else tuple(found) * len(default)


def _seen(case: Case, model: nn.Module, batch: Batch) -> list[_Operator]:
    """The operators of a forward and its loss; none of what does not run on shapes alone."""
    try:
        with alone(), torch.no_grad():
            empty, operators = without_content(model), _Operators()
            given = batch.mapped(lambda part: mapped(part, lambda each: torch.empty_like(each, device="meta")))
            for training in dict.fromkeys((case.phase == "training", False)):
                empty.train(training)
                seed_torch(case.seed, [])  # what chance leaves out, it leaves out of images of all sizes
                with operators:
                    mean(case.loss(given.output(empty), given.target))
            return operators.found
    except Exception:  # noqa: BLE001 - whatever it is: whole images then, and there it is raised if it is the model's own
        return []
