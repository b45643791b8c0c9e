"""By what losses are multiplied in float16 arithmetic, so that small gradients do not vanish: as torch's ``GradScaler``."""

from __future__ import annotations

from typing import Any

from zmqtrain.errors import CheckpointError, TaskError

FIRST, MOST, LEAST = 2.0**16, 2.0**40, 2.0**-16
#: Steps without an overflow after which a larger scale is tried.
INTERVAL = 2000


class LossScale:
    """Halved, and the step passed over, when a gradient is not finite; doubled after many that were. A power of two, so no digit is
    lost when it is divided out again.

    Workers that update together judge the same gradient, so they stay equal.
    """

    def __init__(self, value: float = FIRST, *, interval: int = INTERVAL) -> None:
        self.value, self._interval = value, interval
        self._good = 0
        self.passed_over = 0
        """Steps without an update so far."""

    def judged(self, finite: bool) -> bool:
        """A step's gradient is finite, or not. Returns whether the scale is another now.

        Raises `TaskError` when no scale helps."""
        before = self.value
        if not finite:
            self.passed_over += 1
            self._good = 0
            self.value /= 2
            if self.value < LEAST:
                raise TaskError(
                    f"gradients are not finite, by whatever losses are multiplied in float16 (now {self.value:g}): the model's own "
                    'values overflow. Lower the learning rate, or set [compute] precision = "bfloat16"'
                )
        else:
            self._good += 1
            if self._good >= self._interval:
                self._good, self.value = 0, min(MOST, self.value * 2)
        return self.value != before

    def state(self) -> list[float]:
        """For checkpoints."""
        return [self.value, float(self._good), float(self.passed_over)]

    def load(self, state: Any) -> None:
        """What `state` gave; nothing changes where a checkpoint has none. Raises `CheckpointError`."""
        match state:
            case None:
                return
            case [float(value), float(good), float(passed_over)] if LEAST <= value <= MOST and 0 <= good < self._interval:
                self.value, self._good, self.passed_over = value, int(good), int(passed_over)
            case _:
                raise CheckpointError(f"the checkpoint holds {state!r:.100} as the scale of losses")
