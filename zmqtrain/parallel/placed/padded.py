"""What torch's encoder makes of padding in evaluation: zeros.

Without gradients `torch.nn.TransformerEncoder` packs samples of several lengths, and what it puts in place of padding at the end is
zero, unlike in training. It does not pack placed tensors, so the zeros are put there by hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zmqtrain.parallel.placed.functions import FUNCTIONS
from zmqtrain.parallel.placed.tensor import Placed

_FORWARD = inspect.signature(nn.TransformerEncoder.forward)


def zero_padding(model: nn.Module) -> list[RemovableHandle]:
    """Let all encoders within a model do so."""
    handles: list[RemovableHandle] = []
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoder) or type(module).forward is not nn.TransformerEncoder.forward:
            continue
        if module.use_nested_tensor and len(module.layers):
            handles += _Zeros().hooks(module)
    return handles


class _Zeros:
    """Fills one encoder's padded outputs with zeros."""

    def __init__(self) -> None:
        self._padding: Tensor | None = None

    def hooks(self, encoder: nn.TransformerEncoder) -> list[RemovableHandle]:
        return [
            encoder.register_forward_pre_hook(self._begins, with_kwargs=True),
            encoder.layers[-1].register_forward_hook(self._last),  # the encoder's norm comes after it
            encoder.register_forward_hook(self._ends, always_call=True),
        ]

    def _begins(self, encoder: nn.TransformerEncoder, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        given = _FORWARD.bind(encoder, *inputs, **named).arguments
        padding = given.get("src_key_padding_mask")
        if isinstance(padding, Tensor) and given.get("mask") is None and _packs(encoder, given["src"], padding):
            self._padding = padding.bool()

    def _last(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return None if self._padding is None else output.masked_fill(self._padding.unsqueeze(-1), 0.0)

    def _ends(self, encoder: nn.Module, inputs: Any, output: Any) -> None:
        self._padding = None


def _packs(encoder: nn.TransformerEncoder, src: Tensor, padding: Tensor) -> bool:
    """Whether torch's encoder does so with tensors that are not placed: its own conditions, in its own order."""
    first = encoder.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or first.training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled() and (src.requires_grad or any(each.requires_grad for each in first.parameters())):
        return False
    kept = padding.bool().logical_not()
    return not getattr(encoder, "mask_check", True) or torch._nested_tensor_from_mask_left_aligned(src, kept)


def _left_aligned(src: Tensor, kept: Tensor) -> bool:
    """Whether what is padded comes last in each sample. Of the sequences no more than their number and length matters."""
    whole = kept.world.whole(kept.detach()) if isinstance(kept, Placed) else kept  # type: ignore[arg-type]
    return torch._nested_tensor_from_mask_left_aligned(whole.new_empty((*src.shape[:2], 1), dtype=torch.float32), whole)


FUNCTIONS[torch._nested_tensor_from_mask_left_aligned] = _left_aligned
