"""Error feedback: what a codec loses of one step's gradient is added to the next one's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def kept_of(whole: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """What of ``whole`` is not in ``sent``, of any float type. What is not finite is kept until the receiver has seen it."""
    import torch

    kept = whole - sent
    if not bool(kept.isfinite().all()):  # rare: a run that diverges
        kept = torch.where(sent.isfinite(), kept, torch.where(whole.isfinite(), whole, 0.0))
    return kept
