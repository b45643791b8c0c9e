"""Calls a worker's callbacks, in the thread where user code belongs."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from zmqtrain.train.callback import Callback, StepDone

if TYPE_CHECKING:
    from torch import nn


class Callbacks:
    """Keeps calls (from the loop's thread) until `deliver` makes them, in the thread where it is called."""

    def __init__(self, callbacks: Sequence[Callback], rank: int, model: nn.Module | None = None) -> None:
        """``model``: what `Callback.on_parameters` gets."""
        self._callbacks, self._rank, self._model = tuple(callbacks), rank, model
        self._readers = [each for each in callbacks if type(each).on_parameters is not Callback.on_parameters]
        self._calls: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()
        self._workers: tuple[str, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether there is anything to deliver."""
        return not self._calls.empty()

    @property
    def reads(self) -> bool:
        """Whether a callback reads parameters: they must be complete when calls are delivered."""
        return bool(self._readers)

    def parameters(self, step: int) -> None:
        """The model has made ``step`` steps."""
        for each in self._readers:
            assert self._model is not None
            self._calls.put((_name(each, "on_parameters"), partial(each.on_parameters, step, self._model)))

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """``values``: those of the step's event."""
        if not self._callbacks:
            return
        self.parameters(step + 1)
        done = StepDone(
            rank=self._rank,
            step=step,
            loss=values.get("loss"),
            samples=values.get("samples") or 0,
            seconds=values.get("seconds") or 0.0,
            exposed_s=values.get("exposed_s") or 0.0,
            lr=values.get("lr"),
            values=dict(values),
        )
        for each in self._callbacks:
            self._calls.put((_name(each, "on_step"), partial(each.on_step, done)))

    def eval(self, step: int, metrics: Mapping[str, float]) -> None:
        for each in self._callbacks:
            self._calls.put((_name(each, "on_eval"), partial(each.on_eval, step, dict(metrics))))

    def checkpoint(self, step: int) -> None:
        for each in self._callbacks:
            self._calls.put((_name(each, "on_checkpoint"), partial(each.on_checkpoint, step)))

    def view(self, step: int, workers: Sequence[str]) -> None:
        """The workers that train ``step``; only changes are passed on."""
        if self._callbacks and self._workers != tuple(workers):
            self._workers = tuple(workers)
            for each in self._callbacks:
                self._calls.put((_name(each, "on_view"), partial(each.on_view, step, self._workers)))

    def deliver(self) -> None:
        """Make the calls. Raises `TaskError` with what a callback raises."""
        from zmqtrain.train.task import user_code  # with torch, which modelled workers do without

        while True:
            try:
                name, call = self._calls.get_nowait()
            except queue.Empty:
                return
            with user_code(name):
                call()


def _name(callback: Callback, hook: str) -> str:
    """What an error says was called: a task may have several callbacks."""
    return f"{type(callback).__name__}.{hook}()"
