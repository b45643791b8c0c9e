"""Learning rates while more or fewer workers train than the file says (``[job] on_resize``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from zmqtrain.errors import TaskError


def require_rates(optimizer: Optimizer) -> None:
    """Raise `TaskError` if there is no learning rate in one of the groups of parameters."""
    if any("lr" not in group for group in optimizer.param_groups):
        raise TaskError(
            f"[job] on_resize multiplies learning rates, but {type(optimizer).__name__} has none: its groups of parameters lack "
            '"lr". Set on_resize = "keep"'
        )


@contextmanager
def multiplied(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Let all learning rates be ``factor`` times as large for a while. Schedules, which may go on from the rate as it is, and
    checkpoints must not see this."""
    if factor == 1.0:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
