"""Optimizers of a script's own loop besides the replicated one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zmqtrain.errors import TaskError


class Stepping(Protocol):
    """What is asked of the replicated model (`zmqtrain.embed.replicated.Replicated`)."""

    step: int

    @property
    def is_updating(self) -> bool:
        """Whether the replica runs its optimizer at this moment."""


class OtherOptimizers:
    """Refuses those that change the replicated model, and knows what the others train. Nothing happens before `attach`."""

    def __init__(
        self, replicated: Stepping, optimizer: Optimizer, parameters: Iterable[nn.Parameter], is_own_thread: Callable[[], bool]
    ) -> None:
        """``optimizer``: the replicated one, of ``parameters``. ``is_own_thread()``: whether the calling thread is the model's."""
        self._replicated, self._optimizer, self._is_own_thread = replicated, optimizer, is_own_thread
        self._own = frozenset(map(id, parameters))
        self._stepped: WeakSet[Optimizer] = WeakSet()  # those that have made steps since the last call of `lasting`
        self._stepped_before: WeakSet[Optimizer] = WeakSet()
        self._begun_at = replicated.step  # the replicated model's step when another optimizer began its own

    def attach(self) -> list[Callable[[], None]]:
        """Begin to watch. Returns the functions that end it."""
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        return [before.remove, after.remove]

    def lasting(self) -> list[Tensor]:
        """What those train that have made steps since the last call, and had made some before. Others may be of a single batch."""
        now, self._stepped = self._stepped, WeakSet()
        lasting = [optimizer for optimizer in now if optimizer in self._stepped_before]
        self._stepped_before |= now
        return [p.detach() for optimizer in lasting for group in optimizer.param_groups for p in group["params"]]

    def _before_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if optimizer is not self._optimizer and self._is_own_thread():
            self._begun_at = self._replicated.step

    def _after_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if optimizer is self._optimizer or not self._is_own_thread():
            return
        self._stepped.add(optimizer)
        if self._replicated.is_updating or self._replicated.step != self._begun_at:  # one of the two calls the other
            return
        if any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"]):
            raise TaskError(
                f"the step() of another optimizer ({type(optimizer).__name__}) than the one that was given to session.replicate() "
                "has changed the model's parameters, and the other workers do not know of that step. Give session.replicate() the "
                "optimizer whose step() is called, and keep it: an optimizer cannot be replaced in a session, but its settings in "
                "optimizer.param_groups can"
            )
