"""The losses of a step, read without making the device wait.

On a CPU a loss can be read as soon as it is computed, and a bad one stops the step before its backward. On a device with memory of
its own, reading it at once would wait for all queued work. Instead it is copied beside the arithmetic, and read when the first
gradients after it arrive on the host, before any of them are sent. Copies in one direction end in the order in which they began, so
the loss has arrived by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from zmqtrain.errors import NonFiniteLossError
from zmqtrain.train.device.base import Staging
from zmqtrain.train.shared import allocate_privately


class Losses:
    """The losses of one worker's steps. Called in the compute thread; `StepLosses.sound` in any thread."""

    def __init__(self, staging: Staging | None, rank: int, micro_batches: int, *, stop: bool) -> None:
        """``micro_batches``: the largest number of losses in a step. ``stop``: whether a loss that is not finite stops the run."""
        self._staging, self._rank, self._stop = staging, rank, stop
        self._places: list[Tensor] = []
        if staging is not None:  # two steps in turn: buckets of the previous step may still be on their way
            places = allocate_privately(2 * micro_batches, torch.float64)
            staging.pin(places)
            self._places = list(places.view(2, micro_batches))

    def of_step(self, step: int) -> StepLosses:
        """The losses of a step that begins."""
        place = self._places[step % 2] if self._places else None
        return StepLosses(step, self._rank, self._staging, place, stop=self._stop)


class StepLosses:
    """The losses of one step's micro-batches; each is the mean over its samples."""

    def __init__(self, step: int, rank: int, staging: Staging | None, place: Tensor | None, *, stop: bool) -> None:
        self._step, self._rank, self._stop = step, rank, stop
        self._staging, self._place = staging, place
        self._values: list[float] = []
        self._counts: list[int] = []
        self._copies: list[tuple[Tensor, Callable[[], None]]] = []  # keeps each source until it has been copied

    def add(self, loss: Tensor, samples: int, *, wait: bool = False) -> None:
        """Add the loss (one element) of a micro-batch whose backward comes next. ``wait``: check at once that it is finite.

        Raises `NonFiniteLossError` if it is known not to be.
        """
        self._counts.append(samples)
        if self._staging is None or self._place is None:
            self._values.append(float(loss.detach()))
        else:
            number = len(self._copies)
            source = loss.detach().reshape(1).to(torch.float64)
            wait_for = self._staging.to_host(source, self._place[number : number + 1], _nothing)
            self._copies.append((source, wait_for))
            if not wait:
                return
        self.check()

    def check(self) -> None:
        """Raise `NonFiniteLossError` if a loss is not finite. Waits for all copies."""
        if self._stop:
            for value in self._read():
                if not math.isfinite(value):
                    raise NonFiniteLossError(value, self._rank, self._step)

    def sound(self, *, arrived: bool = False) -> bool:
        """Whether the step's results may be used. ``arrived``: all copies are known to have ended; otherwise it waits for them."""
        return not self._stop or all(map(math.isfinite, self._values if self._place is None else self._read(arrived=arrived)))

    def mean(self) -> float | None:
        """The mean over all samples; None if there are none. Raises `NonFiniteLossError`."""
        self.check()
        weighted = sum(value * count for value, count in zip(self._read(), self._counts, strict=True))
        return weighted / self.samples if self.samples else None

    @property
    def samples(self) -> int:
        """The number of samples in all micro-batches so far."""
        return sum(self._counts)

    def _read(self, *, arrived: bool = False) -> list[float]:
        if self._place is None:
            return self._values
        if not arrived:
            for _, wait in self._copies:
                wait()
        values: list[float] = self._place[: len(self._copies)].tolist()
        return values


def _nothing() -> None:
    """Called at the end of a copy. The reader knows by other means that the copy has ended."""
