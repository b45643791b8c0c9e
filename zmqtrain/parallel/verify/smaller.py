"""A comparison on a part of each image, where the divided model does the same to it as to the whole one.

What a comparison costs goes with the images' area. What it shows does not: that is the same operators, and parts that are cut, sent
and joined in the same ways. So the ordinary model first runs on shapes alone, on whole images and on smaller ones, and these are
taken if

* the operators are the same, in the same order, in training and in evaluation;
* along every size that is smaller, parts are even or uneven as before, and none becomes empty;
* no part becomes shorter than what a kernel reaches into the next one, nor any size, so that each of its weights meets something;
* where a kernel takes strides, parts of its outputs begin as far from those of its inputs.

Which sizes come from the images' heights, and which from their widths, is seen where only one of these is smaller. So strips of the
height may have to be as high as those of whole images, and be less wide all the same.

A model that looks at sizes, or at numbers, to decide what to do, gets whole images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from zmqtrain.parallel.modelled import emptied
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.verify.case import Case, alone, mean

#: Height and width of images.
Images: TypeAlias = Sequence[tuple[int, int]]
#: The same, and those of what is taken of them.
Sizes: TypeAlias = Mapping[tuple[int, int], tuple[int, int]]
#: Images up to this side are taken as they are.
SMALLEST = 64
#: Networks halve their images, mostly five times, to two rows and columns at least: so many a 3x3 kernel reaches over.
FIRST, STEP = 48, 32
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


@dataclass(frozen=True, slots=True)
class Parts:
    """Into how many parts a plan divides heights and widths of images."""

    heights: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def either(self) -> tuple[int, ...]:
        """For a size that comes from both, or nobody knows from which."""
        return tuple(sorted({*self.heights, *self.widths}))


def parts_of(divided: ParallelModel) -> Parts:
    """The parts into which a divided model's plan cuts images."""
    strips = {held.assigned.strips for held in divided._assignment.held.values()} - {None}
    heights, widths = ({getattr(each, side) for each in strips} - {1} for side in ("height", "width"))
    return Parts(tuple(sorted(heights)), tuple(sorted(widths)))


def sizes_of(case: Case, model: nn.Module, batch: Batch, parts: Parts) -> Sizes:
    """What to take of images of which sizes; nothing where they are best taken whole. ``model``: the ordinary one."""
    images = _image_sizes(batch)
    most = max((side for pair in images for side in pair), default=0)
    if not case.smaller or most <= SMALLEST or refers_to_itself(model):
        return {}
    seen = _Seen(case, model, batch)
    whole = seen.on({})

    every = [[[parts.either] * len(shape) for shape in each.sizes] for each in whole]

    def both(side: int) -> Iterator[Sizes]:
        sizes = _cut(images, side)
        if _still_differ(sizes) and seen.alike(sizes, whole, every):
            yield sizes

    if not whole:
        return {}
    sides = [FIRST, *range(SMALLEST, most * 3 // 4 + 1, STEP)]
    first, *larger = sides
    at_first = both(first) if len({*itertools.chain(*images)}) > 1 or _promising(whole, first / most, parts) else ()
    found = itertools.chain(at_first, _apart(seen, whole, images, sides, parts), *map(both, larger))
    return next(found, {})


def _promising(whole: Sequence[_Operator], share: float, parts: Parts) -> bool:
    """Whether images that are smaller by ``share`` may do, if all sizes are by as much: to run them takes longer."""
    return all(
        any(_alike(size, round_(size * share), kernel.reach, parts.either) for round_ in (math.floor, math.ceil))
        for operator in whole
        for kernel, size in zip(operator.kernels, operator.given[-len(operator.kernels) :], strict=False)
    )


def _apart(seen: _Seen, whole: Sequence[_Operator], images: Images, sides: Sequence[int], parts: Parts) -> Iterator[Sizes]:
    """Heights and widths that are found one without the other; nothing where sizes do not say from which of them they come."""
    probes = [_lower(images, sides[0]), _narrower(images, sides[0])]
    if any(part == pair for sizes in probes for pair, part in sizes.items()):
        return  # too small for it
    lower, narrower = map(seen.on, probes)
    if not _comparable(whole, lower) or not _comparable(whole, narrower):
        return
    origins = [_Origin.of(*each) for each in zip(whole, lower, narrower, strict=True)]
    if any(operator.kernels and origin.turned for operator, origin in zip(whole, origins, strict=True)):
        return

    each = [origin.parts(parts) for origin in origins]

    def fits(sizes: Sizes) -> bool:
        return seen.alike(sizes, whole, each)

    def promising(probe: Sequence[_Operator], whole_side: int) -> Iterator[int]:
        """The sides that may do, if all sizes lie between those of the probe and of the whole as they themselves do."""
        for side in sides:
            share = (side - sides[0]) / max(whole_side - sides[0], 1)
            if len(images) > 1 or all(
                any(_alike(one, round_(two + (one - two) * share), 0, numbers) for round_ in (math.floor, math.ceil))
                for operator, small, parts_of_it in zip(whole, probe, each, strict=True)
                for shapes in zip(operator.sizes, small.sizes, parts_of_it, strict=True)
                for one, two, numbers in zip(*shapes, strict=True)
            ):
                yield side

    (tallest, widest) = map(max, zip(*images, strict=True))
    height = next((side for side in promising(lower, tallest) if fits(_lower(images, side))), None)
    heights = _lower(images, height) if height else {}
    together = (_narrower(images, side, heights) for side in promising(narrower, widest) if fits(_narrower(images, side)))
    yield from (sizes for sizes in together if _still_differ(sizes) and fits(sizes))
    if heights and _still_differ(heights):
        yield heights


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


def _cut(images: Images, side: int) -> Sizes:
    """Sides of about ``side``. Those that differ still do."""
    smaller = _smaller({each for pair in images for each in pair}, side)
    return {(height, width): (smaller[height], smaller[width]) for height, width in images}


def _lower(images: Images, side: int) -> Sizes:
    """Heights of about ``side``, and whole widths."""
    smaller = _smaller({height for height, _ in images}, side)
    return {(height, width): (smaller[height], width) for height, width in images}


def _narrower(images: Images, side: int, lower: Sizes | None = None) -> Sizes:
    """Widths of about ``side``, and whole heights or those of ``lower``."""
    smaller = _smaller({width for _, width in images}, side)
    return {pair: ((lower or {}).get(pair, pair)[0], smaller[pair[1]]) for pair in images}


def _smaller(sides: Iterable[int], side: int) -> dict[int, int]:
    """For each of these sides one of about ``side``, or itself. Those that differ still do."""
    large = sorted(each for each in sides if each > side)
    return {each: each for each in sides} | {each: min(side + STEP * number, each) for number, each in enumerate(large)}


def _still_differ(sizes: Sizes) -> bool:
    """Whether no two sides have become alike: a model that takes one for the other would then not be seen to."""
    taken: dict[int, set[int]] = {}
    for whole, part in sizes.items():
        for before, after in zip(whole, part, strict=True):
            taken.setdefault(after, set()).add(before)
    return all(len(each) == 1 for each in taken.values())


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

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """All shapes, that of what it was given first."""
        return self.given, *self.shapes

    def comparable(self, other: _Operator) -> bool:
        """Whether ``other`` is the same one, on shapes with as many dimensions."""
        return (
            self.func is other.func
            and self.kernels == other.kernels
            and [len(each) for each in self.sizes] == [len(each) for each in other.sizes]
        )

    def like(self, other: _Operator, parts: _PartsOfEach) -> bool:
        """Whether ``other``, a comparable one of smaller images, does the same. ``parts``: of each size of each shape."""
        for whole, part, each in zip(self.sizes, other.sizes, parts, strict=True):
            if not all(_alike(one, two, 0, numbers) for one, two, numbers in zip(whole, part, each, strict=True)):
                return False
        for place, kernel in enumerate(self.kernels, -len(self.kernels)):
            before, after = ((each.given[place], each.shapes[0][place]) for each in (self, other))
            numbers = parts[0][place]
            if not _alike(before[0], after[0], kernel.reach, numbers):
                return False
            if before != after and any(
                kernel.apart(*before, parts=number) != kernel.apart(*after, parts=number) for number in numbers
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


#: Into how many parts each size of some shapes may be divided.
_PartsOfEach: TypeAlias = Sequence[Sequence[Sequence[int]]]


def _comparable(whole: Sequence[_Operator], other: Sequence[_Operator]) -> bool:
    return len(whole) == len(other) and all(one.comparable(two) for one, two in zip(whole, other, strict=True))


@dataclass(frozen=True, slots=True)
class _Origin:
    """Which sizes of an operator's shapes come from heights of images, and which from widths."""

    heights: tuple[tuple[bool, ...], ...]
    widths: tuple[tuple[bool, ...], ...]

    @classmethod
    def of(cls, whole: _Operator, lower: _Operator, narrower: _Operator) -> _Origin:
        """The dimensions whose sizes are others where images are lower, and where they are narrower."""

        def others(other: _Operator) -> tuple[tuple[bool, ...], ...]:
            return tuple(
                tuple(one != two for one, two in zip(mine, theirs, strict=True))
                for mine, theirs in zip(whole.sizes, other.sizes, strict=True)
            )

        return cls(others(lower), others(narrower))

    @property
    def turned(self) -> bool:
        """Whether it is given anything but heights, and widths after them: strips would be of something else."""
        high, wide = self.heights[0], self.widths[0]
        few = len(high) < 4 and any((*high, *wide))
        return few or any((*high[:-2], *wide[:-2])) or high[-1] or wide[-2]

    def parts(self, parts: Parts) -> _PartsOfEach:
        """Into how many each of them may be divided."""
        ways = {(True, False): parts.heights, (False, True): parts.widths}
        return [
            [ways.get(each, parts.either) for each in zip(high, wide, strict=True)]
            for high, wide in zip(self.heights, self.widths, strict=True)
        ]


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

    def __init__(self, known: dict[Any, tuple[_Operator, Any]], expected: Callable[[int, _Operator], bool] | None) -> None:
        """``known``: what operators have made of which shapes, as they do each time. torch finds it out in Python, which takes most
        of the time. ``expected``: whether an operator of this number may be what comes; one that may not raises `_OtherError`.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[_Operator] = []
        self._known, self._expected = known, expected

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            key = None if func.is_view or func._schema.is_mutable else (func, _described(args), _described(kwargs or {}))
            known = self._known.get(key)
        except TypeError:  # what cannot be described
            key = known = None
        if known is not None:
            self._note(known[0])
            return _made(known[1])
        result = _normalized(*args) if func is aten.native_batch_norm.default else func(*args, **(kwargs or {}))
        given = next(_shapes((args, kwargs)), ())
        operator = _Operator(func, given, tuple(_shapes(result)), _kernels(func, args))
        if key is not None and given and all(each.is_meta for each in pytree.tree_leaves(result)):
            self._known[key] = operator, _described(result)
        self._note(operator)
        return result

    def _note(self, operator: _Operator) -> None:
        self.found.append(operator)
        if self._expected is not None and not self._expected(len(self.found) - 1, operator):
            raise _OtherError


def _normalized(images: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What batch norm gives on shapes alone. torch goes through all of its arithmetic, for half of the time of a ResNet."""
    moments = torch.empty(images.shape[1], dtype=images.dtype, device=images.device)
    return torch.empty_like(images), moments, moments.clone()


class _OtherError(Exception):
    """Something else is done than to whole images."""


@dataclass(frozen=True, slots=True)
class _Description:
    """Describes a tensor by all but its content."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _described(value: Any) -> Any:
    """What a result's shape may depend on. Raises `TypeError` where something else has a say."""
    if isinstance(value, Tensor):
        if not value.is_meta or value.layout is not torch.strided:
            raise TypeError
        return _Description(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((key, _described(each)) for key, each in value.items())
    return type(value), value


def _made(described: Any) -> Any:
    """Such tensors."""
    if isinstance(described, tuple):
        return tuple(map(_made, described))
    return torch.empty_strided(described.size, described.stride, dtype=described.dtype, device="meta")


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


class _Seen:
    """The operators of forwards and losses on images of several sizes."""

    def __init__(self, case: Case, model: nn.Module, batch: Batch) -> None:
        self._case, self._model, self._batch = case, model, batch
        self._found: dict[Any, list[_Operator]] = {}
        self._known: dict[Any, tuple[_Operator, Any]] = {}

    def on(self, sizes: Sizes) -> list[_Operator]:
        """All of them, on parts of images; none of what does not run on shapes alone."""
        key = tuple(sizes.items())
        if key not in self._found:
            self._found[key] = self._run(sizes)
        return self._found[key]

    def alike(self, sizes: Sizes, whole: Sequence[_Operator], parts: Sequence[_PartsOfEach]) -> bool:
        """Whether the same is done to parts of images as to the whole ones, if each size is divided into so many parts. Runs no
        further than where it is not."""

        def expected(number: int, operator: _Operator) -> bool:
            if number >= len(whole):
                return False
            return whole[number].comparable(operator) and whole[number].like(operator, parts[number])

        found = self._found.get(tuple(sizes.items()))
        if found is None:
            found = self._run(sizes, expected)
        return len(found) == len(whole) and all(expected(*each) for each in enumerate(found))

    def _run(self, sizes: Sizes, expected: Callable[[int, _Operator], bool] | None = None) -> list[_Operator]:
        case, batch = self._case, cropped(self._batch, sizes)
        try:
            with alone(), torch.no_grad():
                empty, operators = emptied(self._model), _Operators(self._known, expected)
                given = batch.mapped(lambda part: mapped(part, lambda each: torch.empty_like(each, device="meta")))
                for training in dict.fromkeys((case.phase == "training", False)):
                    empty.train(training)
                    seed_torch(case.seed, [])  # what chance leaves out, it leaves out of images of all sizes
                    with operators:
                        mean(case.loss(given.output(empty), given.target))
                return operators.found
        except Exception:  # noqa: BLE001 - whatever it is: whole images then, and there it is raised if it is the model's own
            return []
