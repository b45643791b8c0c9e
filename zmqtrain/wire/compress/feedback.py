"""Error feedback: what a codec loses of one step's gradient is added to the next one's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from zmqtrain.wire.compress.envelope import aligned

if TYPE_CHECKING:
    import torch


def with_kept(residuals: Mapping[str, torch.Tensor], key: str, gradient: torch.Tensor, *, in_place: bool = True) -> torch.Tensor:
    """Add what is kept of a stream to its next gradient.

    ``residuals``: what is kept, by stream. ``key``: the stream. ``gradient``: flat, of any float type. ``in_place``: the sum takes
    the residual's memory; False leaves the residual as it is, for callers that may have to give the step up. Returns a flat tensor
    of float32 (float64 for float64) that does not alias ``gradient``. Raises `ValueError` if the two have different sizes.
    """
    import torch

    gradient = aligned(gradient)
    residual = residuals.get(key)
    if residual is None:
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    if residual.shape != gradient.shape:
        raise ValueError(f"{key!r} had {residual.numel()} elements before and has {gradient.numel()} now")
    return residual.add_(gradient) if in_place else residual + gradient


def kept_of(whole: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """What of ``whole`` is not in ``sent``, of any float type. What is not finite is kept until the receiver has seen it."""
    import torch

    kept = whole - sent
    if not bool(kept.isfinite().all()):  # rare: a run that diverges
        kept = torch.where(sent.isfinite(), kept, torch.where(whole.isfinite(), whole, 0.0))
    return kept
