"""A tensor of which each process holds a part.

It has the shape of the whole, and so all that a model's forward does with sizes is what it does in one process. Below autograd
every operator that meets one comes to `zmqtrain.parallel.placed.dispatch`, in forward and in backward alike: gradients are such
tensors, too, and say of themselves whether they are the same on all processes, parts, or summands.

`to_local` and `from_local` lead a layer's own code, which computes on parts and sends its own messages, out of this world and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zmqtrain.errors import UsageError
from zmqtrain.events import NullRecorder, Recorder
from zmqtrain.parallel.communicator import Fabric, Label, Phase, Term
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.dropout import Batch
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.once import no_forward_mode, once_differentiable
from zmqtrain.parallel.placed.functions import BOTH, BY_SAMPLES, FUNCTIONS
from zmqtrain.parallel.placement import Block, Placement, changed, laid, lengths, remembered, settled, within
from zmqtrain.parallel.redistribute import carry, route


@dataclass(slots=True)
class World:
    """The context that all tensors of a divided model share: its processes, its grid and the batch."""

    fabric: Fabric
    grid: Grid
    """The grid whose columns divide the samples of a batch."""
    batch: Batch = field(default_factory=lambda: Batch(0))
    seed: int = 0
    statistics: Literal["whole", "local"] = "whole"
    """Those of batch norm: of the whole batch, or of this process's samples."""
    recorder: Recorder = field(default_factory=NullRecorder)
    overlap: bool = True
    """Whether the interior of a strip is computed while its halo is on its way."""
    helpers: dict[Any, Any] = field(default_factory=dict)
    """What computes parts of layers."""
    strict: bool = False
    """Whether an operator that is computed on gathered tensors is an error."""
    gathered: dict[str, str] = field(default_factory=dict)
    """Operators that were computed on gathered tensors, by name of the layer: for people who want to know what is slow."""
    layers: list[str] = field(default_factory=lambda: [""])
    """The module whose forward runs, within those around it."""
    backward: bool = False
    both: bool = False
    """Whether there are tensors with two divided dimensions, which not all rules know."""
    held: dict[int, Placed] = field(default_factory=dict)
    """While a forward runs: parameters and buffers, by the ids of their `Kin`."""
    outside: Callable[[Callable[..., Any]], None] | None = None
    """If there is one: called with each function of torch that is given one of the tensors. Raises an error if it may not be."""

    @property
    def rank(self) -> int:
        return self.fabric.rank

    @property
    def layer(self) -> str:
        """The innermost module whose forward runs."""
        return self.layers[-1]

    def note(self, name: str, reason: str) -> None:
        """Something is computed on gathered tensors: an event says so, once."""
        if name not in self.gathered:
            self.gathered[name] = reason
            self.recorder.event("left whole", layer=name, reason=reason)

    def label(self, term: Term, phase: Phase | None = None, layer: str | None = None) -> Label:
        """The label of a message: the layer, the term of its arithmetic, and the phase."""
        return Label(self.layer if layer is None else layer, term, phase or ("backward" if self.in_backward else "forward"))

    @property
    def in_backward(self) -> bool:
        """Whether autograd computes gradients at the moment."""
        return self.backward or torch._C._current_graph_task_id() != -1

    def site(self, grid: Grid, layer: str | None = None) -> Site:
        """This process's place on a grid."""
        return Site(self.layer if layer is None else layer, grid, self.fabric)

    def members(self, placement: Placement, among: str) -> tuple[int, ...]:
        """The ranks of this process's ``row`` or ``column`` on the grid, or ``all``."""
        grid = placement.grid
        if among == "row":
            return grid.row(self.rank)
        return grid.column(self.rank) if among == "column" else tuple(range(grid.size))

    def whole_of(self, grid: Grid) -> Placement:
        """The same on every process."""
        return _everywhere(grid)

    def block(self, placement: Placement, shape: Sequence[int]) -> Block:
        """The block of a tensor with this placement and shape that this process holds."""
        return placement.block(shape, self.rank)

    def cut(self, whole: Tensor, placement: Placement) -> Tensor:
        """This process's part of a tensor that is the same on every process: a view of it."""
        where = _where(placement, tuple(whole.shape), self.rank)
        return whole if where is None else whole[where]

    def placed(self, local: Tensor, placement: Placement, shape: Sequence[int]) -> Placed:
        """The tensor of which this process holds ``local``."""
        assert local.shape == placement.local_shape(shape, self.rank), (local.shape, placement, shape)
        return Placed(local, placement, tuple(shape), self)

    def relaid(self, value: Placed, target: Placement, label: Label | None = None) -> Tensor:
        """This process's part of ``value`` in another placement. Below autograd; blocks, and all processes must call it."""
        local, source = value.local, value.placement
        if unchanged(source, target, value.shape):
            return local
        if source.summands != "none" and target.summands != source.summands:
            group = self.fabric.among(self.members(source, source.summands))
            (local,) = group.all_reduce(local.contiguous(), label or self.label("dx")).wait()
            source = settled(source)
        if unchanged(source, target, value.shape):
            return local
        if target.summands not in ("none", source.summands):
            raise AssertionError(f"a tensor does not become summands by itself: {source} to {target}")
        shape = tuple(value.shape)
        way = route(settled(source), settled(target), shape)
        if way.unchanged:
            return local
        if label is None:
            label = self.label("redistribute")
            if source.origin and source.divided is not None and target.divided is None and source.grid == target.grid:
                label = self.label("all_gather", layer=source.origin)
        return carry(local, way, self.fabric, label)

    def whole_features(self, value: Placed) -> Tensor:
        """This process's samples, with nothing else divided."""
        return self.relaid(value, value.placement.whole())

    def whole(self, value: Placed) -> Tensor:
        """All of ``value``, on every process."""
        return self.relaid(value, self.whole_of(value.placement.grid))


@cache
def _everywhere(grid: Grid) -> Placement:
    return laid(grid, sample_dimension=None)


@remembered
def _where(placement: Placement, shape: tuple[int, ...], rank: int) -> tuple[slice, ...] | None:
    """Where a rank's part is in the whole; ``None`` where it is all of it."""
    block, every = placement.block(shape, rank), tuple((0, size) for size in shape)
    return None if block == every else within(block, every)


_UNCHANGED: dict[tuple[int, int, tuple[int, ...]], tuple[Placement, Placement, bool]] = {}
_MOST_PAIRS = 16384


def unchanged(source: Placement, target: Placement, shape: tuple[int, ...]) -> bool:
    """Whether every process has what it has in ``target``, too. Raises `UsageError` for grids of different sizes."""
    if source is target:
        return True
    key = (id(source), id(target), shape)  # of what is kept below, so that no other has these ids
    known = _UNCHANGED.get(key)
    if known is None:
        if len(_UNCHANGED) >= _MOST_PAIRS:
            _UNCHANGED.clear()
        found = source == target or (source.summands == target.summands and _same_blocks(source, target, shape))
        known = _UNCHANGED[key] = source, target, found
    return known[2]


def _same_blocks(one: Placement, other: Placement, shape: Sequence[int]) -> bool:
    if one.grid.size != other.grid.size:
        raise UsageError(f"the grids {one.grid} and {other.grid} have different numbers of processes")
    alike = one.grid == other.grid or one.summands == "none"  # a row is other processes on another grid
    return alike and all(one.block(shape, rank) == other.block(shape, rank) for rank in range(one.grid.size))


#: Within, what is asked of a placed tensor is answered by torch itself, and functions are their operators.
_Operators = torch._C.DisableTorchFunctionSubclass
_make: Callable[..., Any] = Tensor._make_wrapper_subclass
_DATA, _GRAD, _REQUIRES_GRAD = (cast(Any, vars(torch._C.TensorBase)[each]) for each in ("data", "grad", "requires_grad"))
#: What becomes of an operator: `zmqtrain.parallel.placed.dispatch.dispatch`, which knows this module.
DISPATCH: list[Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]] = []


class Placed(Tensor):
    """A tensor of which this process holds the part ``local``, as ``placement`` says. Made by `World.placed` and `from_local`."""

    placement: Placement
    world: World
    kin: Kin
    _size: torch.Size
    _local: Tensor | Callable[[], Tensor]
    use: Any = None
    """Of a parameter: `zmqtrain.parallel.placed.parameters.Use`."""
    parts: tuple[Placed, ...] = ()
    """Of what several activations are packed in: these (`zmqtrain.parallel.placed.packed`)."""

    @staticmethod
    def __new__(
        cls,
        local: Tensor | Callable[[], Tensor],
        placement: Placement,
        shape: tuple[int, ...],
        world: World,
        kin: Kin | None = None,
        *,
        like: Tensor | None = None,
        strides: Sequence[int] | None = None,
    ) -> Placed:
        """Not to be called from outside.

        Args:
            local: the part, or what makes it when it is asked for, ``like`` this one in type and device.
            strides: of the whole tensor, as one process would have it; row by row if there are none. They are the same on all
                processes, because torch chooses operators by them: how a part lies in memory is another thing.
        """
        known = like if like is not None else cast(Tensor, local)
        found: Placed = _make(
            cls, shape, strides=strides, dtype=known.dtype, layout=known.layout, device=known.device, requires_grad=False
        )
        found._size = torch.Size(shape)
        if isinstance(local, Tensor) and (local.is_conj() or local.is_neg()):  # it would say so, and the whole tensor does not
            local = local.resolve_conj().resolve_neg()
            if kin is not None:
                kin.parted = True
        found._local, found.placement, found.world = local, placement, world
        if placement.across is not None:
            world.both = True
        if kin is None:
            found.kin = Kin()
        else:
            found.kin = kin
            kin.count += 1
        return found

    # What models ask for most is answered here. Torch's own answer takes the way through `__torch_function__`.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the whole tensor."""
        return self._size

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dimensions."""
        return len(self._size)

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self._size)

    def size(self, dim: int | None = None) -> Any:
        """The size of the whole tensor, as `torch.Tensor.size` gives it."""
        return self._size if dim is None else self._size[dim]

    @property
    def local(self) -> Tensor:
        """This process's part of the tensor, as an ordinary tensor."""
        found = self._local
        if not isinstance(found, Tensor):
            found = self._local = found()
        return found

    @local.setter
    def local(self, part: Tensor) -> None:
        self._local = part

    def resized(self, like: Placed) -> None:
        """The tensor has become a view of itself, which is as ``like``."""
        self._local, self.placement, self._size = like._local, like.placement, like._size

    def __del__(self) -> None:
        self.kin.count -= 1

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed(shape={tuple(self.shape)}, dtype={self.dtype}, {self.placement})"

    __str__ = __repr__

    def tolist(self) -> Any:
        """The values of the whole tensor."""
        return self.world.whole(self.detach()).tolist()  # type: ignore[arg-type]

    def numpy(self, *, force: bool = False) -> Any:
        """The values of the whole tensor, in memory of their own."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.world.whole(self.detach()).numpy(force=force)  # type: ignore[arg-type]

    # What a person's forward does to a parameter past torch's operators.

    @property
    def data(self) -> Placed:
        """The same memory, unknown to autograd."""
        return Placed(self.local.data, self.placement, self._size, self.world, self.kin, strides=self.stride())

    @data.setter
    def data(self, value: Tensor) -> None:
        """Other content; of a parameter or buffer, in the memory that it has, since buckets and optimizers know that.

        Raises `UsageError` for what would have the same memory as something else."""
        if isinstance(value, Placed) and value.kin is self.kin and value.placement == self.placement:
            own, given = self.local, value.local
            if (own.data_ptr(), own.stride(), own.shape) == (given.data_ptr(), given.stride(), given.shape):
                return  # x.data += y has changed it already
        seen = max(value.kin.count if isinstance(value, Placed) else 0, self.kin.count if self.use is not None else 0) > 1
        if not isinstance(value, Placed) or value.shape != self.shape or value.dtype != self.dtype or seen:
            raise UsageError(
                f"{self._named()} is given the memory of another tensor in the forward (x.data = y), and the model is divided: "
                "write x.data.copy_(y), or let y be computed in the forward, of the shape and type of x, with nothing else a view "
                "of x or of y"
            )
        if self.use is not None:
            self.use.write(value)
            self._local, self.placement = self.use.held(self.world)
            value._shares_memory_of(self)
            return
        with _Operators():
            _DATA.__set__(self, value)
        self._shares_memory_of(value)

    def _shares_memory_of(self, other: Placed) -> None:
        self.kin.count -= 1
        self.kin, self._local, self.placement = other.kin, other._local, other.placement
        self.kin.count += 1

    @property
    def grad(self) -> Tensor | None:
        """See `torch.Tensor.grad`. Raises `UsageError` for a parameter that has one: it is a part of a sum."""
        if self.use is None:
            with _Operators():
                return cast(Tensor | None, _GRAD.__get__(self))
        if self.use.leaf.grad is not None:
            raise UsageError(
                f"the forward reads the gradient of {self._named()}, which is a part of a sum where the model is divided"
            )
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self.use is not None and (value is not None or self.use.leaf.grad is not None):
            raise UsageError(
                f"the forward sets the gradient of {self._named()}, which is a part of a sum where the model is divided"
            )
        with _Operators():
            _GRAD.__set__(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> Placed:
        """See `torch.Tensor.requires_grad_`. Raises `UsageError` for a parameter that the forward begins or ends to train."""
        if self.use is None:
            with _Operators():
                return super().requires_grad_(requires_grad)  # type: ignore[return-value]
        if requires_grad != self.use.leaf.requires_grad:
            raise UsageError(
                f"the forward begins or ends to train {self._named()} (requires_grad), and the model is divided: do it before "
                "that, or use detach() where it is not to be trained"
            )
        return self

    @property
    def requires_grad(self) -> bool:
        """Whether autograd computes a gradient for it."""
        with _Operators():
            return cast(bool, _REQUIRES_GRAD.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def _named(self) -> str:
        if self.use is None:
            return f"layer {self.world.layer or 'of the model'}: a tensor of shape {tuple(self.shape)}"
        return str(self.use)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        """See `torch.Tensor.register_hook`. Raises `UsageError` for a parameter: layers compute with its part."""
        if self.use is not None:
            raise UsageError(
                f"layer {self.use.layer}: a hook that a forward registers on its parameter {self.use.name!r} would see some of its "
                "gradient where the model is divided: register it on the model's parameter before the model is divided, or leave "
                "the hook out"
            )
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Placed:
        return self.clone()  # type: ignore[return-value]

    @property
    def divided(self) -> int | None:
        """The dimension that is divided over the rows."""
        return self.placement.divided

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for world in _worlds(args):
            if world.outside is not None:
                world.outside(func)
        if func in BY_SAMPLES:
            args, kwargs = shared_out(args, kwargs or {})
        rule = FUNCTIONS.get(func)
        if rule is not None and not _transformed():
            if func not in BOTH and any(world.both for world in _worlds(args)):
                args, kwargs = pytree.tree_map(along_one, (tuple(args), dict(kwargs or {})))
            found = rule(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        with _Operators():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with _Operators():
            return DISPATCH[0](func, args, kwargs or {})


def _transformed() -> bool:
    """Whether this is within a transform of `torch.func`, which looks into operators: those have rules of their own."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@dataclass(slots=True)
class Kin:
    """Tensors whose parts lie in the same memory, as views of one another do in one process."""

    count: int = 1
    """How many there are."""
    parted: bool = False
    """Whether one of them had to be gathered, so that a change of one would no longer be a change of all."""


def _worlds(args: Sequence[Any]) -> Iterator[World]:
    """Those of tensors among the arguments of a function, or in lists among them."""
    for each in args:
        if isinstance(each, Placed):
            yield each.world
        elif isinstance(each, list | tuple):
            yield from _worlds(each)


def shared_out(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments of a layer's function. Where its weights are batch-parallel, the others are this process's share of the samples.

    What is divided already stays so: a layer before this one has found it worth while.
    """
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Placed)]
    use = next((leaf.use for leaf in leaves if leaf.use is not None and leaf.use.choice == "batch"), None)
    if use is None or all(_is_share(leaf) for leaf in leaves):
        return args, kwargs
    found: dict[int, Placed] = {}  # layers ask whether query, key and value are the same

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Placed) or leaf.use is not None or _is_share(leaf):
            return leaf
        if id(leaf) not in found:
            there = leaf.placement
            target = laid(use.grid, "all", sample_dimension=there.sample_dimension, sample_unit=there.sample_unit)
            own = to_local(leaf, target, leaf.world, layer=use.layer)
            found[id(leaf)] = from_local(own, target, leaf.shape, leaf.world)
        return found[id(leaf)]

    return pytree.tree_map(moved, (tuple(args), dict(kwargs)))  # type: ignore[no-any-return]


def _is_share(value: Placed) -> bool:
    """Whether no process has more of it than it needs."""
    there = value.placement
    return there.sample_dimension is None or there.samples == "all" or there.divided is not None


def along_one(value: Any) -> Any:
    """A tensor of which two dimensions are divided, with the first of them alone divided; anything else as it is."""
    if not isinstance(value, Placed) or value.placement.across is None:
        return value
    divided = value.placement.divided
    assert divided is not None
    target = settled(value.placement.along(divided, value.shape[divided]))
    return from_local(to_local(value, target, value.world), target, value.shape, value.world)


def dense(shape: Sequence[int], like: Sequence[int] = ()) -> tuple[int, ...]:
    """Strides of a tensor without gaps: row by row, or with dimensions in the order in which strides ``like`` have them."""
    order = range(len(shape))
    if like:
        order = sorted(order, key=lambda each: (-like[each], each))  # type: ignore[assignment]
    found, step = [0] * len(shape), 1
    for dimension in reversed(order):
        found[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(found)


def plain(value: Any) -> Any:
    """All of a tensor, on every process; anything else as it is."""
    return value.world.whole(value) if isinstance(value, Placed) else value


def from_local(
    local: Tensor, placement: Placement, shape: Sequence[int], world: World, *, gradient: Placement | None = None
) -> Placed:
    """The tensor of which this process's layer has computed ``local``, with its gradient: that of ``local`` is its part.

    ``gradient``: how the layer takes it, if not as ``placement`` says.
    """
    return cast(Placed, _FromLocal.apply(local, placement, tuple(shape), world, gradient or placement))  # type: ignore[no-untyped-call]


def contributed(placement: Placement) -> Placement:
    """How a layer with parameters of its own takes and gives gradients of an activation that lies so.

    A parameter's gradient is the sum over the row. What has no samples is the same in all columns, and so would be what they find:
    its gradient stays, or becomes, summands, of which each column has its own.
    """
    return changed(placement, summands="row") if placement.sample_dimension is None and placement.grid.columns > 1 else placement


def to_local(
    value: Tensor,
    target: Placement,
    world: World,
    *,
    gradient: Placement | None = None,
    layer: str | None = None,
    moved: bool = False,
) -> Tensor:
    """This process's part of ``value`` in the placement ``target``, for a layer's own code; with its gradient.

    Args:
        value: a placed tensor, or one that is the same on all processes.
        gradient: what the gradient that the layer computes for this part is; by default a part like it, whole in what it is of.
        layer: that needs it, in labels of messages.
        moved: whether a message is always that layer's, also one that gathers what a model-parallel layer has left divided.
    """
    layer = world.layer if layer is None else layer
    if not isinstance(value, Placed):
        if not value.requires_grad:
            return world.cut(value, target)
        value = from_local(value, world.whole_of(target.grid), value.shape, world)
    return cast(Tensor, _ToLocal.apply(value, target, gradient or target, world, layer, moved))  # type: ignore[no-untyped-call]


class _FromLocal(torch.autograd.Function):
    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(ctx: Any, local: Tensor, placement: Placement, shape: tuple[int, ...], world: World, gradient: Placement) -> Placed:
        ctx.gradient, ctx.world, ctx.shape = gradient, world, shape
        return world.placed(local.detach(), placement, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        world, wanted = ctx.world, ctx.gradient
        with in_backward(world):
            if not isinstance(gradient, Placed):  # made of nothing but sizes: the same on all
                gradient = Placed(gradient, world.whole_of(wanted.grid), ctx.shape, world)
            if wanted.summands in ("none", gradient.placement.summands):
                return world.relaid(gradient, wanted), None, None, None, None
            found = world.relaid(gradient, changed(wanted, summands="none"))
            first = wanted.grid.place(world.rank)[1] == 0  # one of the row counts
            return found if first else torch.zeros_like(found), None, None, None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Placed, target: Placement, gradient: Placement, world: World, layer: str, moved: bool) -> Tensor:
        source, shape = value.placement, value.shape
        ctx.source, ctx.target, ctx.gradient, ctx.world = source, target, gradient, world
        ctx.shape, ctx.layer = shape, layer
        if unchanged(source, target, shape):
            return value.local.detach()
        label = None
        if moved or not source.origin or source.divided is None or target.divided is not None:
            label = world.label("redistribute", "forward", layer)
        return world.relaid(value, target, label).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        world = ctx.world
        with in_backward(world):
            found = world.placed(gradient, ctx.gradient, ctx.shape)
            if ctx.gradient is ctx.target and ctx.source.summands == "none":
                # To where the activation came from, as it came: at once, while others wait for it.
                if unchanged(ctx.target, ctx.source, ctx.shape):
                    return world.placed(gradient, ctx.source, ctx.shape), None, None, None, None, None
                label = world.label("redistribute", "backward", ctx.layer)
                found = world.placed(world.relaid(found, ctx.source, label), ctx.source, ctx.shape)
        return found, None, None, None, None, None


class in_backward:  # noqa: N801 - a context manager
    """Messages within are backward's."""

    def __init__(self, world: World) -> None:
        self._world, self._before = world, world.backward
        self._operators = _Operators()

    def __enter__(self) -> None:
        self._world.backward = True
        self._operators.__enter__()

    def __exit__(self, *_: object) -> None:
        self._operators.__exit__(None, None, None)
        self._world.backward = self._before


def local_sizes(placement: Placement, shape: Sequence[int], world: World) -> tuple[int, ...]:
    """The shape of this process's part."""
    return lengths(world.block(placement, shape))


def numel(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape."""
    return math.prod(shape)
