"""A piece's values ahead of where its optimizer's steps lead (`zmqtrain.exchange.look_ahead` says why and how far)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zmqtrain.exchange.look_ahead import is_mean, steps_ahead
from zmqtrain.exchange.momentum import explicit_of


class LookAhead:
    """Makes a piece's updates, each of which ends as far ahead as the momentum then tells. Not ahead at all: plain updates."""

    __slots__ = ("_horizon", "_spare", "ahead")

    def __init__(self, horizon: float) -> None:
        """``horizon``: updates to look ahead; 0: none."""
        self._horizon = horizon
        self._spare: Tensor | None = None
        self.ahead: Tensor | None = None
        """By how much the values are ahead, of their size; ``None``: not at all. A checkpoint keeps it."""

    @torch.no_grad()
    def update(self, values: Tensor, step: Callable[[], Any], group: Mapping[str, Any], updates: int) -> None:
        """Let ``step`` change ``values`` in place, as the optimizer with the hyperparameters ``group`` would, and look ahead from
        there. ``updates``: how many there were before this one."""
        far = self._far(group, updates)
        if not far and self.ahead is None:
            step()
            return
        before = torch.empty_like(values) if self._spare is None else self._spare
        before.copy_(values)
        step()
        moved = torch.sub(values, before, out=before).mul_(far)
        values.add_(moved)
        if self.ahead is not None:
            values.sub_(self.ahead)
        # Memory that was there before costs half of what the kernel hands out page by page.
        self.ahead, self._spare = (moved, self.ahead) if far else (None, None)

    def _far(self, group: Mapping[str, Any], updates: int) -> float:
        momentum = explicit_of(group)
        if not self._horizon or not momentum:
            return 0.0
        far = steps_ahead(momentum, self._horizon)
        # A mean is of full size from the first gradient on, which says little of where the next ones lead.
        return far * (1 - momentum ** (updates + 1)) if is_mean(group) else far
