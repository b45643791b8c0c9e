"""Gradients that have left while backward went on, and that a program changes afterwards, to no effect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from zmqtrain.errors import UsageError

#: The steps at the beginning of which values are kept. Later on, they are once a program has touched a gradient: programs that do,
#: do it from the beginning, or again and again.
STEPS_KEPT = 2


@dataclass(frozen=True, slots=True)
class _Seen:
    """A gradient when backward had ended."""

    gradient: Tensor | None
    version: int
    value: tuple[float, float] | None
    """Its norm and its sum; ``None``: they were not computed."""


class LeftGradients:
    """Notices that gradients are other ones when the step is made than they were when backward had ended. What leaves them as they
    are is no change, such as clipping to an infinite norm, by which norms are measured."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = list(parameters)
        self._watched = False
        self._kept = STEPS_KEPT
        self._seen: list[_Seen] = []

    def leave(self) -> None:
        """Gradients leave now, while backward goes on."""
        if not self._watched:
            self._watched = True
            # Queued twice: DistributedDataParallel queues in the meantime what writes the gradients of its buckets.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._remember))

    def _remember(self) -> None:
        values = self._kept > 0
        self._kept -= values
        self._seen = [_seen(parameter.grad, value=values) for _, parameter in self._parameters]

    def require_unchanged(self) -> None:
        """Raise `UsageError` if a gradient was changed since backward, in place or by another one. Forgets them."""
        before, self._seen, self._watched = self._seen, [], False
        for (name, parameter), seen in zip(self._parameters, before, strict=False):
            gradient = parameter.grad
            if gradient is seen.gradient and (gradient is None or gradient._version == seen.version):
                continue
            self._kept = STEPS_KEPT  # it may do so again
            if gradient is None or seen.gradient is None or (seen.value is not None and not _same(_value(gradient), seen.value)):
                raise UsageError(
                    f"the gradient of {name!r} was changed after backward (clipped, scaled, replaced, or set to None), but it had "
                    "left for the model servers during backward, as it was: change the loss instead, or use another exchange"
                )


def _seen(gradient: Tensor | None, *, value: bool) -> _Seen:
    if gradient is None:
        return _Seen(None, 0, None)
    return _Seen(gradient, gradient._version, _value(gradient) if value else None)


def _value(gradient: Tensor) -> tuple[float, float]:
    return float(gradient.norm()), float(gradient.sum())


def _same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))  # NaN is NaN here
