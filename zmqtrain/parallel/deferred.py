"""Models whose large tensors are made later, part by part: what a constructor does to them is recorded, and run again for each.

::

    with deferred() as tape:
        model = make()              # large parameters and buffers are `Deferred`: shapes without content
    tape.require(model)             # raises `CannotDeferError`: make the model again, in the ordinary way
    fill(model, tape, part)         # each in turn is made whole, with the bits of the ordinary construction, and a part is kept

Torch's generator advances as in the ordinary construction: what draws random numbers is run at once, too, on memory that is
freed again, and the generator's state before it is kept for the second time. So at any time no more is in memory than one tensor
and what it is made of, beside the small tensors, which are ordinary ones.

What cannot be recorded is computed at once from the tensors' values (``weight.max().item()``), or ends in `CannotDeferError`: code
that reaches a tensor's memory past torch's operators (numpy, ``data_ptr``), and references to deferred tensors that are neither
parameters, buffers nor attributes of a module.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from zmqtrain.parallel.turns import generator_state, turn

#: Tensors of fewer bytes are ordinary ones: they cost little memory, and recording costs time.
SMALLEST_BYTES = 1 << 18

_ATEN = torch.ops.aten
#: Random operators that draw as many numbers whatever the content of their tensors is.
_DRAWS_BY_SHAPE = frozenset(
    {
        _ATEN.normal_.default, _ATEN.uniform_.default, _ATEN.random_.default, _ATEN.random_.to, getattr(_ATEN.random_, "from"),
        _ATEN.exponential_.default, _ATEN.cauchy_.default, _ATEN.log_normal_.default, _ATEN.bernoulli_.float,
    }
)  # fmt: skip
_OWN = frozenset({"_tape", "_slot", "_twin", "_is_param"})


class CannotDeferError(Exception):
    """The model's constructor does what cannot be recorded: the text says what. Made in the ordinary way, it is right."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a deferred tensor among the arguments of a recorded operator."""

    number: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """An operator that was called."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]
    """The slots of its results, flat."""
    touched: frozenset[int]
    """The storages that it reads, writes or makes."""
    state: Tensor | None
    """The state of the generator that it draws from, before the draw."""


class Deferred(Tensor):
    """A tensor of a known shape, whose content is made when it is needed (`Tape.value`)."""

    _tape: Tape
    _slot: int
    _twin: Tensor
    """The same on the meta device: which tensors share memory is seen from these."""

    @staticmethod
    def __new__(cls, twin: Tensor, tape: Tape, slot: int) -> Deferred:
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            twin.size(),
            strides=twin.stride(),
            storage_offset=twin.storage_offset(),
            dtype=twin.dtype,
            device=torch.device("cpu"),
        )
        found._tape, found._slot, found._twin = tape, slot, twin
        return found

    def __init__(self, twin: Tensor, tape: Tape, slot: int) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tape = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Deferred))._tape
        return tape.dispatch(func, tuple(args), kwargs or {})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            return _set_data(args[0], args[1])
        if func == Tensor.tolist:
            return args[0]._tape.value(args[0]).tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[Any, Any]) -> Tensor:
        if id(self) in memo:
            return cast(Tensor, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol at the moment")
        with torch.no_grad():
            copied = self.detach().clone(memory_format=torch.preserve_format)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, self.requires_grad)
        else:
            storage = ("deferred", _storage(self._twin))
            if storage in memo:
                raise self._tape.failure("it copies tensors that share memory")
            memo[storage] = True
            copied.requires_grad_(self.requires_grad)
            copied.__dict__.update(copy.deepcopy(attributes(self), memo))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._tape.failure("it pickles tensors")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Deferred({list(self.shape)}, {self.dtype})"


def is_deferred(value: object) -> TypeGuard[Deferred]:
    """Whether a tensor has no content yet."""
    return isinstance(value, Deferred)


def twin_of(tensor: Tensor) -> Tensor:
    """What shows with which others a tensor shares memory: itself, or if it is deferred, its twin on the meta device."""
    return tensor._twin if isinstance(tensor, Deferred) else tensor


def attributes(tensor: Tensor) -> dict[str, Any]:
    """What people have set on a tensor: attributes of their own."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN}


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if not isinstance(tensor, Deferred) or not isinstance(value, Deferred):
        tape = next(each for each in (tensor, value) if isinstance(each, Deferred))._tape
        raise tape.failure("it sets a tensor's .data to one that was made otherwise")
    with torch.no_grad():
        alias = value.detach()
    assert isinstance(alias, Deferred)
    if value is not tensor:
        with torch._C.DisableTorchFunctionSubclass():
            tensor.data = value
    tensor._slot, tensor._twin = alias._slot, alias._twin


class Tape:
    """The operations of a model's constructor on deferred tensors, recorded to be carried out later."""

    def __init__(self, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self.device = torch.device("cpu")
        """Where the model belongs once it has content."""
        self._smallest = smallest_bytes
        self._entries: list[_Entry] = []
        self._twins: list[Tensor] = []  # so that no storage's address is used twice
        self._logs: dict[int, list[int]] = {}
        self._slots = 0
        self._made: list[weakref.ref[Deferred]] = []
        self._reason: str | None = None

    def failure(self, reason: str) -> CannotDeferError:
        """The error to raise. `require` raises it again, even if a person's code takes it for another one."""
        self._reason = self._reason or reason
        return CannotDeferError(reason)

    def require(self, model: nn.Module) -> None:
        """Raise `CannotDeferError` unless all deferred tensors are in the model, where they can be replaced."""
        if self._reason is not None:
            raise CannotDeferError(self._reason)
        containers: set[int] = set()
        for module in model.modules():
            kept = vars(module)
            containers |= {id(module._parameters), id(module._buffers), id(kept)}
            if isinstance(module, nn.RNNBase):  # a list of its own parameters, which is linked anew
                containers.add(id(module._flat_weights))
            for tensor in (*module._parameters.values(), *module._buffers.values(), *kept.values()):
                if isinstance(tensor, Deferred):
                    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                        raise self.failure("it registers hooks on parameters")
                    if not tensor.is_leaf:
                        raise self.failure("it keeps what was computed of parameters, with its gradient")
        if self._referred(containers):
            gc.collect()
            if self._referred(containers):
                raise self.failure("it keeps tensors elsewhere than in its modules' parameters, buffers and attributes")

    def _referred(self, containers: set[int]) -> bool:
        """Whether Python code has a deferred tensor elsewhere. Autograd keeps the tensors that others are views of: no harm."""
        alive = tuple(filter(is_deferred, [reference() for reference in self._made]))
        for each in gc.get_referrers(*alive) if alive else ():
            if each is not alive and id(each) not in containers and not isinstance(each, FrameType):
                return True
        return False

    def value(self, tensor: Tensor) -> Tensor:
        """The tensor's content as it is now, in memory of its own; a tensor that is not deferred as it is.

        Raises `CannotDeferError`."""
        if not isinstance(tensor, Deferred):
            return tensor
        return self._values([tensor])[0]

    def _values(self, tensors: Sequence[Deferred]) -> list[Tensor]:
        wanted = self._needed({_storage(each._twin) for each in tensors})
        real: dict[int, Tensor] = {}
        with torch.no_grad(), turn(), no_dispatch():
            before = generator_state()
            try:
                for index in sorted(wanted):
                    self._run(self._entries[index], real)
            except CannotDeferError:
                raise
            except Exception as error:
                raise self.failure(f"its tensors cannot be made again: {type(error).__name__}: {error}") from error
            finally:
                torch.set_rng_state(before)
        found = [real[each._slot] for each in tensors]
        for tensor, each in zip(found, tensors, strict=True):
            if tensor.shape != each.shape or tensor.dtype != each.dtype:
                raise self.failure("a tensor has another shape when it is made again")
        return found

    def _needed(self, storages: set[int]) -> set[int]:
        """The operators whose results are in these storages, and all that those have read, up to then."""
        wanted: set[int] = set()
        until: dict[int, int] = {}
        open_ = [(storage, len(self._entries)) for storage in storages]
        while open_:
            storage, last = open_.pop()
            if until.get(storage, -1) >= last:
                continue
            until[storage] = last
            for index in self._logs.get(storage, ()):
                if index > last:
                    break
                if index not in wanted:
                    wanted.add(index)
                    open_ += [(each, index) for each in self._entries[index].touched]
        return wanted

    @staticmethod
    def _run(entry: _Entry, real: dict[int, Tensor]) -> None:
        args, kwargs = pytree.tree_map(
            lambda each: real[each.number] if isinstance(each, _Slot) else each, (entry.args, dict(entry.kwargs))
        )
        if entry.state is not None:
            if kwargs.get("generator") is not None:
                kwargs["generator"] = torch.Generator().set_state(entry.state)
            else:
                torch.set_rng_state(entry.state)
        results = pytree.tree_leaves(entry.function(*args, **kwargs))
        real |= {slot: result for slot, result in zip(entry.results, results, strict=True) if slot is not None}

    # Recording.

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, making: bool = False) -> Any:
        """Run or record an operator. ``making``: whether large new tensors are to be deferred."""
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(each, Deferred) for each in leaves):
            return self._record(func, args, kwargs)
        if making and func.namespace == "aten" and not any(isinstance(each, Tensor) for each in leaves):
            return self._make(func, args, kwargs)
        return func(*args, **kwargs)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A new tensor: deferred if it is large."""
        device = kwargs.get("device")
        plain = (device is None or torch.device(device).type == "cpu") and not kwargs.get("pin_memory")
        if plain and kwargs.get("layout") in (None, torch.strided):
            given = {name: value for name, value in kwargs.items() if name != "generator"} | {"device": "meta"}
            try:
                twin = func(*args, **given)
            except (RuntimeError, TypeError):
                twin = None
            if isinstance(twin, Tensor) and twin.nbytes >= self._smallest:
                state = _state(func, kwargs)
                if state is not None:
                    func(*args, **kwargs)  # freed at once: the generator is as it would be
                return self._noted(func, args, kwargs, twin, state, {}, ())
        return func(*args, **kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Note what an operator does to deferred tensors, or run it at once."""
        written = _written(func, args, kwargs)
        device = kwargs.get("device")
        kind = None if device is None else torch.device(device).type
        if any(not isinstance(each, Deferred) for each in written) or kind not in (None, "cpu", "meta"):
            return self._at_once(func, args, kwargs)
        twins: dict[int, Deferred] = {}
        captured: set[int] = set()

        def twin(value: Any) -> Any:
            if isinstance(value, Deferred):
                twins[id(value._twin)] = value
                return value._twin
            if isinstance(value, Tensor):
                with no_dispatch():
                    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
                captured.add(_storage(made))
                return made
            return None if isinstance(value, torch.Generator) else value

        inputs, named = pytree.tree_map(twin, (args, dict(kwargs)))
        changed = [each for each in written if isinstance(each, Deferred)]
        storages = [_storage(each._twin) for each in changed]
        if kind is not None:
            named["device"] = "meta"
        try:
            result = func(*inputs, **named)
        except (NotImplementedError, RuntimeError):
            return self._at_once(func, args, kwargs)
        if kind == "meta":
            return result
        if [_storage(each._twin) for each in changed] != storages:
            raise self.failure("it gives a tensor other memory")
        if any(isinstance(each, Tensor) and _storage(each) in captured for each in pytree.tree_leaves(result)):
            raise self.failure(f"{func} of a tensor and one that was made otherwise share memory")
        if torch.Tag.inplace_view in func.tags:
            with no_dispatch():  # the wrapper's own shape
                func(*args, **kwargs)
        state = _state(func, kwargs)
        if state is not None:
            self._draw(func, args, kwargs)
        return self._noted(func, args, kwargs, result, state, twins, changed)

    def _noted(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        state: Tensor | None,
        twins: Mapping[int, Deferred],
        changed: Sequence[Deferred],
    ) -> Any:
        """Write an operator down. Returns its result with deferred tensors for those of the meta device."""
        slots: list[int | None] = []
        own: set[int] = {_storage(each._twin) for each in changed}

        def deferred_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                slots.append(None)
                return value
            found = twins.get(id(value))
            if found is None:
                self._slots += 1
                self._twins.append(value)
                found = Deferred(value, self, self._slots)
                self._made.append(weakref.ref(found))
            slots.append(found._slot)
            own.add(_storage(value))
            return found

        output = pytree.tree_map(deferred_of, result)
        touched = own | {_storage(each._twin) for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Deferred)}

        def kept(value: Any) -> Any:
            if isinstance(value, Deferred):
                return _Slot(value._slot)
            if isinstance(value, Tensor):
                with no_dispatch():
                    return value.detach().clone()  # it may be changed afterwards
            return value

        inputs, named = pytree.tree_map(kept, (args, dict(kwargs)))
        for storage in own:
            self._logs.setdefault(storage, []).append(len(self._entries))
        self._entries.append(_Entry(func, inputs, named, tuple(slots), frozenset(touched), state))
        return output

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let the generator advance as it does in the ordinary construction."""
        if func in _DRAWS_BY_SHAPE:

            def memory(value: Any) -> Any:
                if isinstance(value, Deferred):
                    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
                return value

            given = pytree.tree_map(memory, (args, dict(kwargs)))
        else:
            given = self._real(args, kwargs)
        with torch.no_grad(), no_dispatch():
            func(*given[0], **given[1])

    def _at_once(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on the tensors' content: it reads it, as ``item()`` does, or writes to an ordinary tensor."""
        if any(isinstance(each, Deferred) for each in _written(func, args, kwargs)):
            raise self.failure(f"{func} depends on the content of tensors")
        real_written = {id(each) for each in _written(func, args, kwargs)}
        if not real_written and any(each.alias_info is not None for each in func._schema.returns):
            raise self.failure(f"{func} gives a view that depends on the content of tensors")
        given = self._real(args, kwargs)
        with torch.no_grad(), no_dispatch():
            return func(*given[0], **given[1])

    def _real(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Deferred)]
        values = dict(zip(map(id, given), self._values(given), strict=True))
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda each: values[id(each)] if isinstance(each, Deferred) else each, (args, dict(kwargs))
        )
        return found


def _storage(twin: Tensor) -> int:
    return int(twin.untyped_storage()._cdata)


def _state(func: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Of the generator that an operator draws from; ``None`` for one that does not draw."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator")
    return generator_state() if generator is None else cast(Tensor, generator.get_state())


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]
    return found


class _Deferring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._tape.dispatch(func, tuple(args), kwargs or {}, making=True)


@contextmanager
def deferred(tape: Tape | None = None) -> Iterator[Tape]:
    """Large tensors that are made within, in this thread, are deferred."""
    tape = tape or Tape()
    with _Deferring(tape):
        yield tape


def fill(model: nn.Module, tape: Tape, part: Callable[[str, Tensor], Tensor]) -> list[Tensor]:
    """Put content in place of all deferred tensors of a model, one after another.

    ``part(name, whole)``: what is to be kept of a parameter or buffer. Attributes of modules are kept whole. Returns what stands
    now where deferred tensors stood. Raises `CannotDeferError`."""
    done: dict[int, Tensor] = {}
    before: list[Tensor] = []  # so that no id is used twice

    def made(tensor: Deferred, name: str | None = None) -> Tensor:
        if id(tensor) not in done:
            found = tape.value(tensor)
            if name is not None:
                found = part(name, found)
            if isinstance(tensor, nn.Parameter):
                found = nn.Parameter(found, tensor.requires_grad)
            found.__dict__.update(attributes(tensor))
            done[id(tensor)] = found
            before.append(tensor)
        return done[id(tensor)]

    for prefix, module in model.named_modules(remove_duplicate=False):
        tensors: dict[str, Any]
        for tensors in (module._parameters, module._buffers):
            for each, tensor in list(tensors.items()):
                if isinstance(tensor, Deferred):
                    tensors[each] = made(tensor, f"{prefix}.{each}" if prefix else each)
        for each, value in list(vars(module).items()):
            if isinstance(value, Deferred):
                vars(module)[each] = made(value)
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]
    return list(done.values())
