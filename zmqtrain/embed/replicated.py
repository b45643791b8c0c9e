"""A model and an optimizer of the user's own loop, kept in touch with the other workers.

The loop stays as it is. What it calls anyway tells how far it is::

    output = model(inputs)       the step begins; each layer waits for its parameters when the forward reaches it
    loss.backward()              gradients leave, bucket by bucket, while backward goes on
    optimizer.step()             the step ends: the exchange updates the model, or the optimizer does
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.embed.crossing import Crossing
from zmqtrain.errors import TaskError
from zmqtrain.exchange.base import Exchange
from zmqtrain.train.replica import TorchReplica


class Replicated:
    """Attached to a model and optimizer until `detach`."""

    def __init__(
        self,
        replica: TorchReplica,
        exchange: Exchange,
        crossing: Crossing,
        *,
        weight: Callable[[], float],
        ended: Callable[[int, float, float], None],
    ) -> None:
        """``weight()``: by what this worker's gradient of the step counts in its group; the group's weights add up to 1.
        ``ended(step, seconds, exposed_s)`` is called after each step, on the loop's thread."""
        self.replica, self.exchange = replica, exchange
        self.step = 0
        self._crossing, self._weight, self._ended = crossing, weight, ended
        self._factor = 1.0
        self._in_step = False  # a forward with gradients has begun
        self._handing_over = False  # the backward that comes is the step's last
        self._only_adding = False  # within accumulating()
        self._updating = False  # the replica runs the local optimizer
        self._began_s = self._crossing.loop.time()
        self._undo: list[Callable[[], None]] = []
        self._hook(replica.model, replica.parameters)
        self._patch(replica.optimizer)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Forward and backward in here only add to the gradients; the last ones of a step must be outside."""
        self._only_adding = True
        try:
            yield
        finally:
            self._only_adding = False

    def detach(self) -> None:
        """Give model and optimizer back as they came."""
        self.replica.release()
        while self._undo:
            self._undo.pop()()

    # The model.

    def _hook(self, model: nn.Module, parameters: list[nn.Parameter]) -> None:
        before = model.register_forward_pre_hook(self._before_forward, prepend=True)
        after = model.register_forward_hook(self._after_forward)
        weights = [parameter.register_hook(self._weigh) for parameter in parameters]  # type: ignore[no-untyped-call]
        self._undo += [handle.remove for handle in (before, after, *weights)]

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        self._crossing.check_thread("the forward of a replicated model")
        if torch.is_grad_enabled() and not self._in_step:
            self._in_step = True
            self._factor = self._weight()
            self._crossing.loop.call_soon_threadsafe(self.exchange.begin_step, self.step)
            self.replica.begin_step(self.step)
        elif not self._in_step:  # an evaluation: it, too, waits for the parameters
            self.replica.begin_step(self.step)

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._handing_over = not self._only_adding
            self.replica.begin_backward(last=self._handing_over and self.exchange.exchanges(self.step))

    def _weigh(self, gradient: Tensor) -> Tensor | None:
        return None if self._factor == 1.0 else gradient * self._factor

    # The optimizer. It keeps its class and its identity, so that schedules, and code that looks at it, go on working.

    def _patch(self, optimizer: Optimizer) -> None:
        step_before, zero_before = optimizer.step, optimizer.zero_grad
        own: dict[str, Any] = {
            name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)
        }  # a schedule wraps step

        @wraps(step_before)
        def step(self_: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
            if self._updating:
                return step_before() if closure is None else step_before(closure)
            if closure is not None:
                raise TaskError("optimizer.step(closure) computes gradients several times a step; call step() without a closure")
            self_._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules look at it
            self.end_step()
            return None

        @wraps(zero_before)
        def zero_grad(self_: Optimizer, set_to_none: bool = True) -> None:
            # Between steps gradients may be on their way, and are zeroed when the next step takes their memory back.
            if self._in_step:
                for parameter in self.replica.parameters:
                    if parameter.grad is not None:
                        parameter.grad.zero_()

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

        def restore() -> None:
            del optimizer.step, optimizer.zero_grad
            vars(optimizer).update(own)

        self._undo.append(restore)

    def end_step(self) -> None:
        """``optimizer.step()``. Raises what broke the exchange."""
        if not self._handing_over:
            raise TaskError(
                "optimizer.step() without a forward and a backward of the replicated model before it (outside of accumulating())"
            )
        self.replica.end_backward()
        exposed_s = self.replica.waited_s
        self._handing_over = self._in_step = False
        self._updating = True
        waited = self._crossing.loop.time()
        try:
            self._crossing.wait(self.exchange.end_step(), "optimizer.step()")
        finally:
            self._updating = False
        now = self._crossing.loop.time()
        self._crossing.loop.call_soon_threadsafe(self._ended, self.step, now - self._began_s, exposed_s + now - waited)
        self._began_s = now
        self.step += 1
