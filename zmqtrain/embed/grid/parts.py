"""Parameters and gradients of which this worker has a part only, as the user's loop sees them.

Any computation with a part would give another result than in one process. So what a loop may do with parts is listed here: scale
them by a number, ask for their norm (which is then the whole one's), look at their type. Anything else raises an error at the line
that does it. While the session itself computes, its `Guard` is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zmqtrain.embed.gradients import HARMLESS, Watch, WatchedGradient, plain
from zmqtrain.embed.grid.meeting import What
from zmqtrain.errors import TaskError
from zmqtrain.parallel.shard import Shard


class Meet(Protocol):
    """`zmqtrain.embed.grid.meeting.Meetings.meet`, for the compute thread."""

    def __call__(self, what: What, numbers: Sequence[float] = ()) -> list[list[float]]: ...


class Guard:
    """Says whether parts may be used as they are, since the session itself is computing. Used in the compute thread."""

    def __init__(self, meet: Meet) -> None:
        self.meet = meet
        self.depth = 0
        self.in_backward = False
        self.reading = 0
        """Calls of ``state_dict`` or ``load_state_dict`` that are under way, within one another."""

    @property
    def open(self) -> bool:
        return self.depth > 0 or self.reading > 0 or self.in_backward

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Parts may be used within."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


_TENSOR: Any = Tensor
#: What code may ask of a parameter, and do to it, without its elements.
_OF_PARAMETERS = HARMLESS | {
    *(_TENSOR.grad.__get__, _TENSOR.grad.__set__, _TENSOR.grad.__delete__, _TENSOR.requires_grad.__set__),
    *(Tensor.requires_grad_, Tensor.is_contiguous, Tensor.is_complex, Tensor.__hash__, _TENSOR._version.__get__),
}
#: In place, with numbers, these do to each part what they do to the whole.
_WITH_NUMBERS = frozenset(
    {
        *(Tensor.mul_, Tensor.div_, Tensor.__imul__, Tensor.__itruediv__, Tensor.neg_, Tensor.sign_, Tensor.zero_, Tensor.fill_),
        *(Tensor.add_, Tensor.sub_, Tensor.__iadd__, Tensor.__isub__, Tensor.nan_to_num_, Tensor.detach_, Tensor.requires_grad_),
        *(Tensor.clamp_, Tensor.clamp_min_, Tensor.clamp_max_, Tensor.clip_),
        *(torch.clamp_, torch._foreach_mul_, torch._foreach_clamp_min_, torch._foreach_clamp_max_, torch._foreach_zero_),
    }
)
_AS_IT_IS = frozenset({Tensor.detach, _TENSOR.data.__get__})
_NORMS = frozenset({Tensor.norm, torch.norm, torch.linalg.vector_norm, torch.linalg.norm})


NO_COPY = (
    "a copy of a model that [compute] grid divides would have parts of parameters only: copy the model before "
    "session.replicate(), and load model.state_dict() into the copy, which all workers of the group must call"
)


class PartParameter(nn.Parameter):
    """A parameter of a divided model. Parameters become ones (`guarded`) and stop being ones (`unguarded`)."""

    guard: Guard
    name_in_model: str

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _OF_PARAMETERS:
            for part in _of_type(PartParameter, (*args, *(kwargs or {}).values())):
                if not part.guard.open:
                    raise TaskError(
                        f"{_name(func)} of the parameter {part.name_in_model!r}: [compute] grid divides the model, so this worker "
                        "has parts of parameters only, and what it would compute of them is something else. model.state_dict() "
                        "gives whole ones, if all workers of the group call it; a penalty on weights belongs into the model's "
                        "forward, which returns it"
                    )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a part of the parameter {self.name_in_model!r}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TaskError(NO_COPY)


def guarded(name: str, parameter: nn.Parameter, guard: Guard) -> None:
    """Let a parameter be a `PartParameter`. It stays the same object."""
    parameter.__class__ = PartParameter
    assert isinstance(parameter, PartParameter)
    parameter.guard, parameter.name_in_model = guard, name


def unguarded(parameter: nn.Parameter) -> None:
    """Let it be an ordinary parameter again."""
    if isinstance(parameter, PartParameter):
        del parameter.guard, parameter.name_in_model
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


class PartGradient(WatchedGradient):
    """This worker's part of a whole gradient, summed over all samples."""

    guard: Guard
    shard: Shard
    name_in_model: str

    @classmethod
    def part(cls, gradient: Tensor, watch: Watch, guard: Guard, name: str, shard: Shard) -> PartGradient:
        found: PartGradient = Tensor._make_subclass(cls, gradient)
        found.watch, found.guard, found.name_in_model, found.shard = watch, guard, name, shard
        return found

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        parts = list(_of_type(PartGradient, (*args, *named.values())))
        if func in HARMLESS or all(part.guard.open for part in parts):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        for part in _of_type(WatchedGradient, (*args, *named.values())):
            part.watch.used = True
        first = parts[0]
        if func in _AS_IT_IS:
            return cls.part(plain(first), first.watch, first.guard, first.name_in_model, first.shard)
        if func in _WITH_NUMBERS and not any(
            each.dim() and not isinstance(each, WatchedGradient) for each in _of_type(Tensor, (*args, *named.values()))
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        if func in _NORMS and (order := _order(func, *args[1:], **named)) is not None:
            return _norm(first, order)
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(first.guard, *args)
        raise TaskError(
            f"{_name(func)} of the gradient of {first.name_in_model!r}: [compute] grid divides the model, so this worker has a "
            "part of this gradient only, and what it would compute of it is something else. torch's clip_grad_norm_ and "
            "clip_grad_value_ work, session.clip_grad_norm_() is faster, p.grad.norm() is the whole gradient's, and p.grad may be "
            "scaled in place by a number"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a part of the gradient of {self.name_in_model!r}>"


def _order(func: Any, *args: Any, **named: Any) -> float | None:
    """The order of a norm of all elements together; ``None`` if it is another kind of norm."""
    order = args[0] if args else named.pop("p", named.pop("ord", None))
    if len(args) > 1 or any(value is not None and value is not False for value in named.values()):
        return None
    if order is None or order == "fro":
        return 2.0
    if func is torch.linalg.norm or isinstance(order, str):  # of a matrix, it is another one
        return None
    return float(order)


def _norm(part: PartGradient, order: float) -> Tensor:
    """The norm of the whole gradient."""
    gradient, shard = plain(part), part.shard
    own = torch.linalg.vector_norm(gradient, order, dtype=torch.promote_types(gradient.dtype, torch.float32))
    said = part.guard.meet("a norm of gradients", [float(own)])
    norms = torch.tensor([said[member][0] for member in shard.members], dtype=torch.float64)
    whole = norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)
    return whole.to(gradient.device, own.dtype)


def _unscale(guard: Guard, gradients: Sequence[Tensor], found: Tensor, scale: Tensor) -> None:
    """What a GradScaler does: all workers of the group must find the same."""
    torch._amp_foreach_non_finite_check_and_unscale_([plain(each) for each in gradients], found, scale)
    found.fill_(max(numbers[0] for numbers in guard.meet("unscaling of gradients", [float(found)])))


def _of_type(kind: Any, arguments: Any) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, kind):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _of_type(kind, argument)


def _name(func: Any) -> str:
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", "an attribute"))
    return str(getattr(func, "__name__", func))
