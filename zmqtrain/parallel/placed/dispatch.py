"""What becomes of an operator that meets a placed tensor.

In this order: a rule of its own (`RULES`, filled by the modules of this package); for operators that compute each element by
itself, the rule of those; an operator without a rule is computed on whole tensors by every process alike.
That is slower and never wrong: all processes draw the same numbers, and compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from zmqtrain.errors import UsageError
from zmqtrain.parallel.placed.parameters import settle
from zmqtrain.parallel.placed.tensor import DISPATCH, Placed, World, dense, plain
from zmqtrain.parallel.placement import Placement, sampleless, settled, undivided


class Rule(Protocol):
    """What an operator gives, for arguments of which one at least is placed; ``NotImplemented`` where it is none for these."""

    def __call__(self, world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any: ...


#: By operator (an overload, or all overloads of a name).
RULES: dict[Any, Rule] = {}
#: Those that are given tensors with two divided dimensions as they are; the others get them with one.
BOTH: set[Rule] = set()
Operators: TypeAlias = Any
aten = torch.ops.aten
#: Operators that compute each element by itself and are not marked so.
POINTWISE = {
    *(
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
        aten._prelu_kernel.default,
    ),
    *(
        aten._prelu_kernel_backward.default,
        aten.fill_.Tensor,
        aten.fill.Tensor,
        aten.fill.Scalar,
        aten.where.self,
        aten.isnan.default,
    ),
    *(aten.hardswish.default, aten.hardswish_.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default),
    *(aten.hardtanh_backward.default, aten.log_sigmoid_backward.default, aten.rrelu_with_noise_backward.default),
}
#: Operators that change arguments, by number, and do not say so.
CHANGES = {aten.native_batch_norm.default: (3, 4), aten.cudnn_batch_norm.default: (3, 4), aten.miopen_batch_norm.default: (3, 4)}
#: Of kernels that call other operators, and so come back here.
_ONE_BY_ONE = torch._C.DispatchKey.CompositeExplicitAutograd


def rule(*operators: Operators, both: bool = False) -> Callable[[Rule], Rule]:
    """Register the rule of some operators. ``both``: it knows tensors of which two dimensions are divided."""

    def register(function: Rule) -> Rule:
        if both:
            BOTH.add(function)
        for operator in operators:
            assert operator not in RULES, operator
            RULES[operator] = function
        return function

    return register


@dataclass(frozen=True, slots=True)
class _Kind:
    """What matters of an operator, looked up once."""

    packet: Any
    """All overloads of its name."""
    reviews: bool
    """It makes of its argument a view of itself."""
    pointwise: bool
    writes: bool
    """It changes arguments."""
    lists: bool
    """It does to each tensor of lists what an operator on tensors does, like ``torch._foreach_add_``."""


@cache
def _kind(func: Any) -> _Kind:
    tags = func.tags
    pointwise = (torch.Tag.pointwise in tags or func in POINTWISE) and torch.Tag.nondeterministic_seeded not in tags
    writes = func._schema.is_mutable or func in CHANGES
    lists = func._schema.name.startswith("aten::_foreach_") and func.has_kernel_for_dispatch_key(_ONE_BY_ONE)
    return _Kind(func.overloadpacket, torch.Tag.inplace_view in tags, pointwise, writes, lists)


def dispatch(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator of which an argument is placed."""
    world = args[0].world if args and isinstance(args[0], Placed) else world_of(args, kwargs)
    kind = _kind(func)
    if kind.reviews:
        return _reviewed(func, args, kwargs)
    if kind.lists:
        return func._op_dk(_ONE_BY_ONE, *args, **kwargs)
    if not kind.writes:
        return _result(world, func, kind, args, kwargs)
    result = _result(world, func, kind, args, kwargs)
    if world.held:
        for value in _written(func, args, kwargs):
            if isinstance(value, Placed):
                settle(value)
    return result


def _result(world: World, func: Any, kind: _Kind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found = RULES.get(func) or RULES.get(kind.packet)
    if found is not None:
        if world.both and found not in BOTH:
            args, kwargs = _one_dimension(world, func, args, kwargs)
        result = found(world, func, args, kwargs)
        if result is not NotImplemented:
            return result
    if kind.pointwise:
        from zmqtrain.parallel.placed.pointwise import pointwise

        result = pointwise(world, func, args, kwargs)
        if result is not NotImplemented:
            return result
    return on_whole(world, func, args, kwargs)


DISPATCH.append(dispatch)


def _one_dimension(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Arguments of which one dimension at most is divided over the rows."""
    if not any(isinstance(each, Placed) and each.placement.across is not None for each in tensors(args, kwargs)):
        return args, kwargs
    kept = {id(each) for each in (_written(func, args, kwargs) or args[:1])} if _is_view(func) or func._schema.is_mutable else set()

    def relaid(leaf: Any) -> Any:
        if not isinstance(leaf, Placed) or leaf.placement.across is None:
            return leaf
        target = _along_one(leaf)
        if id(leaf) in kept:
            become(world, leaf, target)
            return leaf
        return Placed(world.relaid(leaf, target), target, tuple(leaf.shape), world, strides=leaf.stride())

    found = pytree.tree_map(relaid, (list(args), dict(kwargs)))
    return found[0], found[1]


def _along_one(value: Placed) -> Placement:
    """The placement of a tensor with its first divided dimension alone divided."""
    divided = value.placement.divided
    assert divided is not None
    return value.placement.along(divided, value.shape[divided])


def _reviewed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A tensor becomes a view of itself, like ``transpose_``."""
    value = args[0]
    if func.overloadpacket is aten.set_:
        name = str(value.use) if isinstance(value, Placed) and value.use is not None else f"a tensor of shape {tuple(value.shape)}"
        raise UsageError(f"{name} is given other memory in the forward (set_), and the model is divided: use torch.Tensor.copy_")
    packet = getattr(aten, func._schema.name.removeprefix("aten::").removesuffix("_"), None)
    given = [argument.type for argument in func._schema.arguments]
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    of_same = [each for each in overloads if [argument.type for argument in each._schema.arguments] == given]
    if not of_same:
        raise UsageError(f"{func.name()} of a divided tensor is not possible: use the function that returns a new tensor")
    found = dispatch(of_same[0], args, kwargs)
    value.resized(found)
    with no_dispatch():
        func(*args, **kwargs)  # the sizes that autograd and people see
    return value


def tensors(*values: Any) -> list[Any]:
    """All leaves of nested arguments that are tensors."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def world_of(*values: Any) -> World:
    """The world of the first placed tensor."""
    return first_placed(values).world


def first_placed(values: Any) -> Placed:
    """The first placed tensor of nested arguments. Raises `StopIteration` where there is none."""
    return next(leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Placed))


def grid_of(*values: Any) -> Any:
    """The grid of the first placed tensor."""
    return first_placed(values).placement.grid


def on_whole(world: World, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operator on whole tensors, by every process alike. What it writes to becomes whole; what it returns is."""
    grid = grid_of(args, kwargs)
    if any(value.placement.divided is not None or value.placement.sample_dimension is not None for value in tensors(args, kwargs)
           if isinstance(value, Placed)):  # fmt: skip
        name = f"{world.layer}: {func.name()}" if world.layer else func.name()
        if world.strict:
            raise UsageError(
                f"layer {world.layer or 'of the model'}: {func.name()} has no rule for divided tensors, and strict = true asks for "
                "one; without it, the operator is computed on gathered tensors by all workers alike"
            )
        world.note(name, "it has no rule for divided tensors, and is computed on gathered ones by all workers")
    written = _written(func, args, kwargs)
    placement = world.whole_of(grid)
    for value in written:
        if isinstance(value, Placed):
            become(world, value, placement)
            changing(value)
    if _is_view(func) and isinstance(args[0], Placed):
        become(world, args[0], placement)  # so that a change of the view is one of what it is a view of
    local_args, local_kwargs = pytree.tree_map(plain, (list(args), dict(kwargs)))
    result = func(*local_args, **local_kwargs)
    kin = args[0].kin if args and isinstance(args[0], Placed) and _is_view(func) else None
    by_memory = {id(value.local): value for value in written if isinstance(value, Placed)}

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, Placed):
            return leaf
        if id(leaf) in by_memory:
            return by_memory[id(leaf)]
        return Placed(leaf, placement, tuple(leaf.shape), world, kin, strides=leaf.stride() if kin is not None else None)

    return pytree.tree_map(back, result)


def become(world: World, value: Placed, placement: Placement) -> None:
    """Let a tensor lie in another way from now on. It stays the same tensor: what is done to it in place is done to it."""
    if value.placement == placement:
        return
    local = world.relaid(value, placement)
    if local is value.local or local.data_ptr() == value.local.data_ptr():
        local = local.clone() if value.placement.summands == "none" and local.shape != value.local.shape else local
    held = world.held.get(id(value.kin))
    together = held is not None and held is not value and _same(held, value)
    if value.kin.count > 1 + together:
        value.kin.parted = True
    value.local, value.placement = local, placement
    if held is not None and together:  # value is held.data: a change of it is one of the parameter
        held.local, held.placement = local, placement


def _same(one: Placed, other: Placed) -> bool:
    """Whether two tensors are the same memory, in the same way."""
    if one.shape != other.shape or one.placement != other.placement or one.stride() != other.stride():
        return False
    return not one.local.is_meta and one.local.data_ptr() == other.local.data_ptr()


def changing(value: Placed) -> None:
    """Raise `UsageError` where a change in place would not be seen by views that it should be seen by."""
    if value.kin.parted and value.kin.count > 1:
        raise UsageError(
            f"layer {value.world.layer or 'of the model'}: a tensor of shape {tuple(value.shape)} is changed in place while others "
            "are views of it, and its parts had to be gathered in between: change a clone() of it instead, or leave the layer "
            "whole ([parallel] whole)"
        )


def result_like(value: Placed, local: Tensor, *, view: bool = False) -> Placed:
    """A tensor of the same shape and place. ``view``: in the same memory."""
    if view:
        return Placed(local, value.placement, value.shape, value.world, value.kin, strides=value.stride())
    strides = None if value.is_contiguous() else dense(value.shape, value.stride())
    return Placed(local, value.placement, value.shape, value.world, strides=strides)


def freed(value: Placed, dimensions: Sequence[int], *, keep_summands: bool = False) -> Placement:
    """Its placement, with these dimensions whole."""
    placement = value.placement
    if not keep_summands and placement.summands != "none":
        placement = settled(placement)
    if placement.across is not None and {placement.divided, placement.across} & set(dimensions):
        left = next((each for each in (placement.divided, placement.across) if each not in dimensions), None)
        placement = undivided(placement) if left is None else placement.along(left, value.shape[left])
    elif placement.divided is not None and placement.divided in dimensions:
        placement = undivided(placement)
    if placement.sample_dimension is not None and placement.sample_dimension in dimensions:
        placement = sampleless(placement)
    return placement


def _is_view(func: Any) -> bool:
    return bool(func.is_view)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator changes."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if (argument.alias_info is not None and argument.alias_info.is_write) or number in CHANGES.get(func, ()):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found.extend(tensors(value))
    return found
