"""Gradients that leave while ``backward()`` is running, and are gone when it returns: the state of one step of a user's loop.

A step is one backward, and those within ``accumulating()`` before it, which only add to the model's gradients. What comes too late,
or in another order, raises `TaskError`: a second backward, a forward or ``zero_grad()`` between backward and ``optimizer.step()``,
gradients that were replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from zmqtrain.embed.gradients import MIXED, GoneGradient, plain
from zmqtrain.errors import TaskError
from zmqtrain.train.replica import TorchReplica

#: What helps a loop that needs its gradients for longer.
HOLD = "call session.replicate(model, optimizer, overlap=False)"


@dataclass(frozen=True, slots=True)
class Step:
    """What the state of a step follows from."""

    weight: float
    """The weight of this worker's gradient in its group's."""
    only_adding: bool
    """Whether this backward is within ``accumulating()``."""
    exchanges: bool
    """Whether this step's gradients are exchanged at its end, and not added to the next step's."""


class Overlapped:
    """The gradients of a replica that leaves them to the exchange. All methods in the caller's thread."""

    def __init__(self, replica: TorchReplica) -> None:
        self._replica = replica
        self._views = replica.memory.gradient_views()
        self._gone = {name: GoneGradient(parameter) for name, parameter in replica.named.items()}
        self._adding = False  # a backward of this step has added to gradients
        self._carried = False  # the previous step has not exchanged its gradients, and this one adds to them
        self._zeroed = "no"
        self.leaving = False
        """Whether a backward of this step has handed gradients over."""

    def entering(self) -> None:
        """A forward begins."""
        if self.leaving:
            raise TaskError(
                "a forward between backward() and optimizer.step(), or after optimizer.step() was left out: the gradients have "
                "been sent, and parameters that arrive are those of the next step. Put all backward() of a step but the last "
                f"within session.accumulating(), and call a forward for another purpose after optimizer.step(); or {HOLD}"
            )

    def begin_backward(self, step: Step) -> None:
        """The first gradient of a backward is about to arrive."""
        replica = self._replica
        if self.leaving:
            raise TaskError(
                "backward() a second time in a step, or after optimizer.step() was left out: the gradients of the first one have "
                f"been sent. Put all but the last within session.accumulating(), or {HOLD}"
            )
        if not self._adding and not self._carried:
            if self._zeroed == "no" and any(self._is_left(name, parameter) for name, parameter in replica.named.items()):
                raise TaskError(
                    "gradients of the previous step still exist, and backward() would add to them: call optimizer.zero_grad(), "
                    f"or {HOLD}"
                )
            for parameter in replica.parameters:
                parameter.grad = None
        divisor = 1.0 / step.weight if step.weight else float("inf")
        if self._adding and divisor != replica.divisor:
            raise TaskError(MIXED)
        replica.divisor = divisor
        self._adding = True
        self.leaving = step.exchanges and not step.only_adding
        replica.begin_backward(last=self.leaving)

    def arriving(self, name: str, parameter: nn.Parameter) -> None:
        """Autograd is about to add to the parameter's gradient."""
        if parameter.grad is self._gone[name]:
            parameter.grad = self._views[name].detach()

    def end_backward(self) -> None:
        """A backward is over."""
        for name, parameter in self._replica.named.items():
            if parameter.grad is not None:
                parameter.grad = self._gone[name]

    def zero(self, set_to_none: bool) -> None:
        """``optimizer.zero_grad()``."""
        if self.leaving:
            raise TaskError(f"zero_grad() between backward() and optimizer.step(): the gradients have been sent already; {HOLD}")
        if self._carried:
            if self._adding:
                raise TaskError(
                    "zero_grad() after backward(), although gradients of earlier steps are being accumulated "
                    "([exchange] every): call it before backward()"
                )
            return  # they are exchanged together with those of the next steps
        self._zeroed, self._adding = "to None" if set_to_none else "to zero", False
        for parameter in self._replica.parameters:
            parameter.grad = None

    def end(self, *, exchanges: bool, there: Callable[[tuple[str, ...]], None], same_settings: bool) -> None:
        """``optimizer.step()`` ends the step.

        Args:
            exchanges: as in `Step`.
            there: raises `TaskError` if one of these parameters, which have no gradient, is not the model's any more.
            same_settings: whether the optimizer's settings are those with which gradients have left, if it matters.
        """
        replica = self._replica
        if not self._adding or (exchanges and not self.leaving):
            raise TaskError(
                "optimizer.step() without a forward and a backward of the replicated model before it (outside of accumulating())"
            )
        missing = replica.missing()
        there(tuple(missing))
        if missing and self._zeroed != "to zero" and not self._carried:
            raise TaskError(
                f"no gradient has reached {missing[0]!r} in this step, but one reached it in the first step. Whether other "
                f"workers have one is known too late: {HOLD}"
            )
        left = [n for n, p in replica.named.items() if p.grad is not self._gone[n] and n not in missing]
        if left:
            raise TaskError(f"the gradient of {left[0]!r} was replaced after backward(), when it had been sent already: {HOLD}")
        if not same_settings:
            raise TaskError(
                "the optimizer's settings (a learning rate?) were changed between backward() and optimizer.step(): gradients had "
                "been sent to the model servers with the old settings. Change them before backward() or after optimizer.step(), "
                f"or {HOLD}"
            )
        self._carried = not exchanges
        replica.without, replica.zeros_count = frozenset(), self._zeroed == "to zero"
        replica.end_backward()

    def ended(self) -> None:
        """The exchange has ended the step."""
        self.leaving = self._adding = False
        self._zeroed = "no"

    def _is_left(self, name: str, parameter: nn.Parameter) -> bool:
        gradient = parameter.grad
        if gradient is None:
            return False
        return gradient is self._gone[name] or bool(plain(gradient).any())


def shown(gradient: Tensor | None) -> Tensor | None:
    """A gradient as it is left to a loop whose model is no longer replicated: none if it has gone."""
    if gradient is None or isinstance(gradient, GoneGradient):
        return None
    return plain(gradient)
