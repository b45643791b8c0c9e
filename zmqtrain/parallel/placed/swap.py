"""While a divided model's forward runs, its modules have whole tensors for parameters and buffers: this process has their parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zmqtrain.errors import UsageError
from zmqtrain.parallel.kept import Kept, links_of
from zmqtrain.parallel.placed.assign import Held
from zmqtrain.parallel.placed.parameters import Use, wrapped
from zmqtrain.parallel.placed.tensor import Placed, World
from zmqtrain.parallel.placement import Placement

_DIVIDED = "and the model is divided: make all parameters in the constructor, and change them in place (torch.Tensor.copy_)"


@dataclass(slots=True)
class _Slot:
    """A module's parameters or buffers."""

    layer: str
    parameters: bool
    tensors: dict[str, Any]
    held: dict[str, tuple[Held, tuple[int, ...], int]]
    """How each is held, the shape of this process's part, and its row."""
    uses: dict[str, Use] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    """Names of buffers that have another shape than in the model that was divided."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The whole of a parameter, as forwards see it: as long as nothing was done to it, it is that of the next forward, too."""

    leaf: Tensor
    address: int
    placement: Placement
    node: Any
    whole: Placed

    def is_of(self, leaf: Tensor) -> bool:
        """Whether it is the whole of this part, and as it was made."""
        whole, local = self.whole, self.whole._local
        same = isinstance(local, Tensor) and local.data_ptr() == leaf.data_ptr() == self.address
        return (
            same and self.leaf is leaf and whole.placement is self.placement
            and whole.grad_fn is self.node and not whole._backward_hooks and not whole.retains_grad
        )  # fmt: skip


class Swap:
    """Gives the modules of one model whole tensors, and takes them away again."""

    def __init__(self, model: nn.Module, world: World, held: Mapping[str, Held]) -> None:
        self._model, self._world, self._held = model, world, held
        self._structure: list[Any] = []
        self._slots: list[_Slot] = []
        self._recurrent: list[nn.RNNBase] = []
        self._links: list[Kept] = []
        self._kept: dict[int, _Kept] = {}

    @contextmanager
    def during(self) -> Iterator[None]:
        """Modules have whole tensors for parameters and buffers meanwhile."""
        self._look()
        wraps: dict[int, Placed] = {}
        swapped: list[tuple[dict[str, Any], str, Any, Use]] = []
        before, complaint = self._world.held, ""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                for slot in self._slots:
                    self._give(slot, wraps, swapped)
            self._world.held = before | {id(each.kin): each for each in wraps.values()}
            for module in self._recurrent:
                relink(module)
            for link in self._links:
                link.replace(wraps)
            yield
        finally:
            self._world.held = before
            plain = {id(wraps[id(tensor)]): tensor for _, _, tensor, _ in swapped} if self._links else {}
            for link in self._links:
                link.replace(plain)
            for tensors, each, tensor, use in swapped:
                complaint = self._put_back(tensors, each, tensor, use, wraps[id(tensor)]) or complaint
            for module in self._recurrent:
                relink(module)
        for slot in self._slots:
            complaint = self._additions(slot) or complaint
        if complaint:
            raise UsageError(complaint)

    def _look(self) -> None:
        """Find the modules' tensors, again where there are other modules than the last time."""
        structure = structure_of(self._model)
        if structure == self._structure:
            return
        self._structure, self._slots, self._recurrent, self._links = structure, [], [], links_of(self._model)
        held_by: dict[str, dict[str, tuple[Held, tuple[int, ...], int]]] = {}
        for each, held in self._held.items():
            of, _, own = each.rpartition(".")
            held_by.setdefault(of, {})[own] = (held, *_part_of(held, self._world.rank))
        for name, module in self._model.named_modules(remove_duplicate=False):
            placed = held_by.get(name, {})
            if made := [each for each, tensor in module._parameters.items() if tensor is not None and each not in placed]:
                raise UsageError(f"layer {name or 'of the model'} has got a parameter {made[0]!r}, {_DIVIDED}")
            self._slots += [_Slot(name, True, module._parameters, placed), _Slot(name, False, module._buffers, placed)]
            if isinstance(module, nn.RNNBase):
                self._recurrent.append(module)

    def _give(self, slot: _Slot, wraps: dict[int, Placed], swapped: list[tuple[dict[str, Any], str, Any, Use]]) -> None:
        if slot.others:
            slot.others.clear()
        for each, tensor in slot.tensors.items():
            if tensor is None or isinstance(tensor, Placed) or each not in slot.held:
                continue
            there, shape, _ = slot.held[each]
            if tensor.shape != shape:
                slot.others.add(each)
                continue
            use = slot.uses.get(each)
            if use is None or use.leaf is not tensor:
                own = there.assigned
                use = Use(there.shard.layer, each, own.choice, own.grid, tensor, there.shard, own.strips)
                slot.uses[each] = use
            if id(tensor) not in wraps:
                wraps[id(tensor)] = self._whole(use)
            swapped.append((slot.tensors, each, tensor, use))
            slot.tensors[each] = wraps[id(tensor)]

    def _whole(self, use: Use) -> Placed:
        leaf = use.leaf
        if not (isinstance(leaf, nn.Parameter) and leaf.requires_grad and torch.is_grad_enabled()):
            return wrapped(use, self._world)
        kept = self._kept.get(id(leaf))
        if kept is None or kept.whole.use is not use or not kept.is_of(leaf):
            whole = wrapped(use, self._world)
            if not isinstance(whole._local, Tensor):
                return whole  # gathered when it is asked for, as it is then
            self._kept[id(leaf)] = kept = _Kept(leaf, leaf.data_ptr(), whole.placement, whole.grad_fn, whole)
        return kept.whole

    def _put_back(self, tensors: dict[str, Any], name: str, tensor: Tensor, use: Use, wrap: Placed) -> str:
        """The plain tensor, with what the forward has made of it. Returns what is to be complained of."""
        found = tensors.get(name)
        if isinstance(tensor, nn.Parameter):
            tensors[name] = tensor
            if found is wrap and wrap.use is not None and wrap.use.leaf is tensor:
                return ""
            return f"the forward takes the parameter of {use} away, or puts another one in its place, {_DIVIDED}"
        if found is None:
            return ""
        tensors[name] = tensor
        local = wrap._local
        if found is wrap and isinstance(local, Tensor) and (local.is_meta or local.data_ptr() == tensor.data_ptr()):
            return ""
        with torch.no_grad():
            whole = self._world.whole(found) if isinstance(found, Placed) else found
            row = use.shard.members.index(self._world.rank)
            part = use.shard.cut(whole, row) if tuple(whole.shape) == use.shard.shape else whole
            if part.shape == tensor.shape and part.dtype == tensor.dtype:
                tensor.copy_(part)
            else:
                tensors[name] = part
        return ""

    def _additions(self, slot: _Slot) -> str:
        """Let buffers that the forward has registered, or given another shape, be plain tensors, whole on every process.

        Returns what is to be complained of."""
        if slot.tensors.keys() <= slot.held.keys() and not slot.others:
            return ""
        for name, tensor in slot.tensors.items():
            if tensor is None or (name in slot.held and name not in slot.others):
                continue
            if isinstance(tensor, nn.Parameter) or slot.parameters:
                return f"the forward registers a parameter {name!r} of layer {slot.layer or 'of the model'}, {_DIVIDED}"
            if isinstance(tensor, Placed):
                slot.tensors[name] = self._world.whole(tensor.detach())  # type: ignore[arg-type]
        return ""


def structure_of(model: nn.Module) -> list[Any]:
    """All modules, and under which names."""
    found: list[Any] = []
    left = [model]
    while left:
        module = left.pop()
        found.append(module)
        if module._modules:
            found.extend(module._modules)
            left.extend(each for each in module._modules.values() if each is not None)
    return found


def relink(module: nn.RNNBase) -> None:
    """Let a recurrent layer's list of weights be its weights."""
    module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]


def _part_of(held: Held, rank: int) -> tuple[tuple[int, ...], int]:
    row = held.shard.members.index(rank)
    return held.shard.local_shape(row), row
