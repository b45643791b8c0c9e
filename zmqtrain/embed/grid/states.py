"""``state_dict()`` and ``load_state_dict()`` of a script's divided model and optimizer: they give and take whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.data.nested import leaves
from zmqtrain.embed.grid.digest import digest
from zmqtrain.embed.grid.meeting import What
from zmqtrain.errors import TaskError
from zmqtrain.parallel.shard import Shard, gather_state
from zmqtrain.train.hooks import OwnHook

if TYPE_CHECKING:
    from zmqtrain.embed.grid.model import DividedScript


class States:
    """Attached to a model and its optimizer until `release`. In the script's thread; all workers of a group must take part."""

    def __init__(self, divided: DividedScript, served: bool) -> None:
        """``served``: the optimizer's state is with model servers, and nobody may ask for it."""
        self._divided = divided
        self._undo: list[Callable[[], None]] = []
        for name, module in divided.model.named_modules():
            hooks = (
                module.register_state_dict_pre_hook(OwnHook(self._reading)),
                module.register_state_dict_post_hook(OwnHook(_Read(self, name))),
                module.register_load_state_dict_pre_hook(OwnHook(_Loading(self, name))),
                module.register_load_state_dict_post_hook(OwnHook(self._loaded)),
            )
            self._undo += [hook.remove for hook in hooks]
        if not served:
            optimizer = divided.optimizer
            self._undo += [
                optimizer.register_state_dict_post_hook(OwnHook(self._optimizer_read)).remove,
                optimizer.register_load_state_dict_pre_hook(OwnHook(self._optimizer_loading)).remove,
            ]

    def release(self) -> None:
        while self._undo:
            self._undo.pop()()

    def whole(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
        """Bring parts together, on all workers of the group."""
        return gather_state(tensors, shards, self._divided.parallel.fabric)

    def of_optimizer(self) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """The whole tensors of which the optimizer has parts, by parameter and key."""
        divided = self._divided
        names = {id(parameter): name for name, parameter in divided.model.named_parameters()}
        for group in divided.optimizer.param_groups:
            for parameter in group["params"]:
                shard = divided.shards[names[id(parameter)]]
                for key, tensor in divided.optimizer.state.get(parameter, {}).items():
                    if isinstance(tensor, Tensor) and divided.is_part(tensor, shard):
                        yield parameter, key, self.whole({key: tensor}, {key: shard})[key]

    # The model's.

    def _reading(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        guard = self._divided.guard
        if not guard.depth:
            if not guard.reading:
                guard.meet("model.state_dict()", [])
            guard.reading += 1

    def read(self, name: str, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """A module has put its own tensors, and its children theirs, into ``state``."""
        divided = self._divided
        if divided.guard.depth:  # for the session itself, which knows that they are parts
            return
        for own in (*module._parameters, *module._buffers):
            shard, tensor = divided.shards.get(f"{name}.{own}" if name else own), state.get(prefix + own)
            if shard is not None and isinstance(tensor, Tensor) and divided.is_part(tensor, shard):
                state[prefix + own] = self.whole({own: tensor}, {own: shard})[own]
        divided.guard.reading -= 1

    def loading(self, name: str, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """A module is about to take its own tensors from ``state``."""
        divided = self._divided
        if not divided.guard.reading:
            self._alike("model.load_state_dict()", state)
        divided.guard.reading += 1
        for own in (*module._parameters, *module._buffers):
            shard, tensor = divided.shards.get(f"{name}.{own}" if name else own), state.get(prefix + own)
            if shard is not None and isinstance(tensor, Tensor) and tuple(tensor.shape) == shard.shape:
                state[prefix + own] = divided.cut(tensor, shard)

    def _loaded(self, module: nn.Module, keys: Any) -> None:
        self._divided.guard.reading -= 1

    def _alike(self, what: What, state: object) -> None:
        """All workers of the group must load the same."""
        found = [tensor for tensor in leaves(state) if isinstance(tensor, Tensor)]
        said = self._divided.guard.meet(what, [digest(found)])
        if any(numbers != said[0] for numbers in said):
            raise TaskError(
                f"{what}: the workers of a group have given different states, but [compute] grid divides the model, so each takes "
                "its part of what it is given: load the same, whole state on all of them"
            )

    # The optimizer's.

    def _optimizer_read(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        if self._divided.guard.depth:
            return None
        self._divided.guard.meet("optimizer.state_dict()", [])
        numbers: dict[int, int] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
        found = {number: dict(kept) for number, kept in state["state"].items()}
        for parameter, key, tensor in self.of_optimizer():
            found[numbers[id(parameter)]][key] = tensor
        return {**state, "state": found}

    def _optimizer_loading(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        divided = self._divided
        self._alike("optimizer.load_state_dict()", state["state"])
        names = {id(parameter): name for name, parameter in divided.model.named_parameters()}
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        saved = [number for group in state["param_groups"] for number in group["params"]]
        shards = {number: divided.shards[name] for number, name in zip(saved, order, strict=False)}

        def cut(number: Any, value: Any) -> Any:
            shard = shards.get(number)
            if shard is None or shard.dimension is None or not isinstance(value, Tensor) or tuple(value.shape) != shard.shape:
                return value
            return divided.cut(value, shard)

        found = {number: {key: cut(number, value) for key, value in kept.items()} for number, kept in state["state"].items()}
        return {**state, "state": found}


class _Read:
    """The hook of one module."""

    def __init__(self, states: States, name: str) -> None:
        self._states, self._name = states, name

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self._states.read(self._name, module, state, prefix)


class _Loading:
    """The hook of one module."""

    def __init__(self, states: States, name: str) -> None:
        self._states, self._name = states, name

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self._states.loading(self._name, module, state, prefix)
