"""A task's schedule together with ``[optimizer] scale_lr`` and ``momentum``, which apply to whatever the schedule sets.

Schedules read the learning rate when they are made, or go on from the present one, or set rates of their own (`OneCycleLR`,
`CyclicLR`, `SWALR`), and some set the momentum, too. So a schedule sees the task's own values only, and what the job makes of them
is put on top after each of its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer


class Schedule(Protocol):
    """What is stepped once after each training step."""

    def step(self) -> None: ...


#: Changes the hyperparameters of an optimizer's parameter groups, in place.
Adapt = Callable[[Optimizer], None]

_ADAPTED = ("lr", "momentum", "nesterov", "betas")


class AdaptedSchedule:
    """Steps the task's schedule on the task's own values; between its steps the optimizer has the adapted ones."""

    def __init__(self, schedule: Schedule, optimizer: Optimizer, adapt: Adapt) -> None:
        self._schedule, self._optimizer, self._adapt = schedule, optimizer, adapt
        self._own: list[dict[str, Any]] = []
        self._put_on()

    def step(self) -> None:
        for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
            group.update(own)
        self._schedule.step()
        self._put_on()

    def _put_on(self) -> None:
        self._own = [{key: group[key] for key in _ADAPTED if key in group} for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            if isinstance(group.get("lr"), Tensor):  # schedules change it in place, and must find it again
                group["lr"] = group["lr"].clone()
        self._adapt(self._optimizer)
