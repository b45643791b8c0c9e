"""The ordinary model, in one process, with the random numbers of a divided one.

A divided model's forward begins with a state of torch's generator that all processes have, and its dropout hashes positions
(`zmqtrain.parallel.placed.random`). Here the ordinary forward begins alike, and dropout alone is replaced; all else is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from zmqtrain.data.seeding import seed_torch
from zmqtrain.parallel.model.dropout import keep
from zmqtrain.parallel.placed.model import step_seed
from zmqtrain.parallel.turns import generator_state

_CHANNELS = (functional.dropout1d, functional.dropout2d, functional.dropout3d)


@contextmanager
def drawing_alike(model: nn.Module, seed: int, step: int) -> Iterator[dict[str, int]]:
    """Within, a forward of ``model`` and its backward draw what those of the divided model draw in this step.

    Gives the modules' names, with their numbers in the order in which they are first called."""
    layers, handles, order = [""], list[RemovableHandle](), dict[str, int]()
    saved: list[Any] = []

    def enter(name: str) -> Callable[[nn.Module, Any], None]:
        def run(module: nn.Module, inputs: Any) -> None:
            layers.append(name)
            order.setdefault(name, len(order))

        return run

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if len(layers) > 1:
            layers.pop()

    def begin(module: nn.Module, inputs: Any) -> None:
        saved.append(_states(model))
        seed_torch(step_seed(seed, step), saved[-1][1])

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        _restore(saved.pop())

    try:
        handles.append(model.register_forward_pre_hook(begin))
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
            if isinstance(module, nn.TransformerEncoder):
                handles += _Unseen().hooks(module)
        handles.append(model.register_forward_hook(end, always_call=True))
        # Backward in this thread: a forward that is computed again within it meets the same masks.
        with _SameMasks(seed, step, layers), torch.autograd.set_multithreading_enabled(False):
            yield order
    finally:
        for handle in handles:
            handle.remove()


def backward_within(loss: Tensor) -> None:
    """`Tensor.backward` within `drawing_alike`, where what is computed again (`torch.utils.checkpoint`) draws what it drew before.

    torch's own runs without the modes that are active, since these may take it over."""
    run = torch.autograd.Variable._execution_engine.run_backward
    run((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _states(model: nn.Module) -> tuple[Tensor, dict[int, Tensor]]:
    devices = sorted({each.device.index or 0 for each in model.parameters() if each.device.type == "cuda"})
    return generator_state(), {device: generator_state(device) for device in devices}


def _restore(states: tuple[Tensor, dict[int, Tensor]]) -> None:
    host, devices = states
    torch.set_rng_state(host)
    for device, state in devices.items():
        torch.cuda.set_rng_state(state, device)


class _Unseen:
    """torch's encoder packs padded samples in evaluation, but not where a mode sees its functions, and then gives other outputs: it
    is left alone where it draws nothing."""

    def __init__(self) -> None:
        self._guards: list[Any] = []

    def hooks(self, encoder: nn.TransformerEncoder) -> list[RemovableHandle]:
        return [
            encoder.register_forward_pre_hook(self._begins),
            encoder.register_forward_hook(self._ends, always_call=True),
        ]

    def _begins(self, encoder: nn.Module, inputs: Any) -> None:
        if not any(module.training for module in encoder.modules()):
            self._guards.append(torch._C.DisableTorchFunction())
            self._guards[-1].__enter__()

    def _ends(self, encoder: nn.Module, inputs: Any, output: Any) -> None:
        if self._guards:
            self._guards.pop().__exit__(None, None, None)


class _SameMasks(TorchFunctionMode):
    """Dropout by the hash of positions, of the same draws."""

    def __init__(self, seed: int, step: int, layers: Sequence[str]) -> None:
        super().__init__()
        self._seed, self._step, self._layers = seed, step, layers

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.dropout or func in _CHANNELS:
            return self._dropout(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        channels = func in _CHANNELS
        if not 0 <= p <= 1 or (channels and input.dim() < 3 and training):
            found: Tensor = func(input, p, training, inplace)
            return found
        if not training or p == 0:
            return input
        call, shape = int(torch.randint(1 << 62, ())), tuple(input.shape)
        if channels:
            shape = (*shape[:2], *[1] * (len(shape) - 2))
        key = f"{self._seed}/{self._layers[-1]}/{self._step}/{call}"
        kept = keep(key, p, tuple((0, size) for size in shape), shape, 0, input.device)
        dropped = input * kept.to(input.dtype).div_(max(1 - p, 1e-30))
        return input.copy_(dropped) if inplace else dropped
