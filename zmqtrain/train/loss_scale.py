"""The factor on losses in float16 arithmetic, which keeps small gradients from vanishing, like torch's ``GradScaler``."""

from __future__ import annotations

from typing import Any

from zmqtrain.errors import CheckpointError, TaskError

FIRST, MOST, LEAST = 2.0**16, 2.0**40, 2.0**-16
#: Steps without an overflow after which a larger scale is tried.
INTERVAL = 2000


class LossScale:
    """The scale is halved, and the step skipped, when a gradient is not finite; it is doubled after many finite ones. It is a power
    of two, so dividing by it loses no precision.

    Workers that update together judge the same gradient, so their scales stay equal.
    """

    def __init__(self, value: float = FIRST, *, interval: int = INTERVAL) -> None:
        self.value, self._interval = value, interval
        self._good = 0
        self.passed_over = 0
        """Steps so far whose update was skipped."""

    def judged(self, finite: bool) -> bool:
        """Record whether a step's gradient is finite. Returns whether the scale has changed.

        Raises `TaskError` if even the smallest scale does not help."""
        before = self.value
        if not finite:
            self.passed_over += 1
            self._good = 0
            self.value /= 2
            if self.value < LEAST:
                raise TaskError(
                    f"gradients are not finite, even with the smallest scale of losses in float16 ({self.value:g}): the model's "
                    "own values "
                    'overflow. Lower the learning rate, or set [compute] precision = "bfloat16"'
                )
        else:
            self._good += 1
            if self._good >= self._interval:
                self._good, self.value = 0, min(MOST, self.value * 2)
        return self.value != before

    def state(self) -> list[float]:
        """The state for checkpoints."""
        return [self.value, float(self._good), float(self.passed_over)]

    def load(self, state: Any) -> None:
        """Restore what `state` returned; nothing changes if the checkpoint has no scale. Raises `CheckpointError`."""
        match state:
            case None:
                return
            case [float(value), float(good), float(passed_over)] if LEAST <= value <= MOST and 0 <= good < self._interval:
                self.value, self._good, self.passed_over = value, int(good), int(passed_over)
            case _:
                raise CheckpointError(f"the checkpoint has an invalid loss scale: {state!r:.100}")
