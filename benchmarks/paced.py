"""A model whose layers take as long as a slower device would need for them, whatever trains it: they sleep, in addition to what
their arithmetic takes. So several hosts can be emulated on few processors, which are then not what a run waits for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

#: What sleeps as a whole.
LAYERS = (nn.Conv2d, nn.Linear, nn.LSTM, nn.TransformerEncoderLayer)


def paced(model: nn.Module, profile: Mapping[str, Any], seconds: float) -> nn.Module:
    """This model, with hooks that let a step's forward and backward sleep for ``seconds`` in all. Forward without
    gradients does not sleep.

    Args:
        model: whose layers sleep.
        profile: the relative times of its layers, as in a profile of `benchmarks.compression.profile_of`.
        seconds: how long they sleep in a step.
    """
    times = {name: [0.0, 0.0] for name in _layers(model)}
    for layer in profile["layers"]:
        for name, sums in times.items():
            if layer["name"] == name or layer["name"].startswith(f"{name}."):
                sums[0], sums[1] = sums[0] + layer["forward_s"], sums[1] + layer["backward_s"]
    scale = seconds / sum(forward_s + backward_s for forward_s, backward_s in times.values())
    modules = dict(model.named_modules())
    for name, (forward_s, backward_s) in times.items():
        modules[name].register_forward_pre_hook(partial(_before, forward_s * scale))
        modules[name].register_forward_hook(partial(_after, backward_s * scale))
    return model


def _layers(model: nn.Module, above: str = "") -> list[str]:
    """The names of the outermost of `LAYERS`."""
    found = []
    for name, module in model.named_children():
        full = f"{above}{name}"
        found += [full] if isinstance(module, LAYERS) else _layers(module, f"{full}.")
    return found


def _before(seconds: float, module: nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled():
        time.sleep(seconds)


def _after(seconds: float, module: nn.Module, inputs: Any, output: Any) -> Any:
    """The output, whose gradient arrives before the layer's backward begins, and sleeps first."""
    if isinstance(output, tuple):
        return (_Sleep.apply(output[0], seconds), *output[1:])  # type: ignore[no-untyped-call]
    return _Sleep.apply(output, seconds)  # type: ignore[no-untyped-call]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None
