"""Forward and backward times of each layer of a model, measured by hooks.

Between two hooks the time belongs to one layer, including what a model does between its layers (a function, a sum of branches)::

    forward     time that ends with a layer's end is the layer's: its own, and that of functions before it
    backward    time that starts with the gradient of a layer's output is the layer's: its own, and that of functions before it

so functions count with the layer after them in both directions, the times add up to the whole step, and no time counts twice. The
loss, with everything after the last layer, counts as one more layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zmqtrain.plan.measure.timing import Clock, Times
from zmqtrain.plan.trace import _first

#: The name of the loss among the layers.
LOSS = "loss"


class LayerTimes:
    """Seconds of each layer; for every step one forward and one backward time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.forward: dict[str, list[float]] = defaultdict(list)
        self.backward: dict[str, list[float]] = defaultdict(list)
        self.passes: dict[str, int] = {}
        """How many products each layer does in forward and backward: 3, or 2 if the gradient of its input is not needed; 1 or 2 if
        it has no weights to train."""
        self._last_s = 0.0
        self._owner = LOSS
        self._now: dict[str, float] = {}
        self._seen: list[object] = []

    @contextmanager
    def watching(self, model: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """A context that records the times of these modules of the model."""
        modules = dict(model.named_modules())
        hooks = [modules[name].register_forward_hook(self._hook(name)) for name in names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._seen.clear()

    @contextmanager
    def going_forward(self) -> Iterator[None]:
        """A context for the model's forward and its loss."""
        self._now = defaultdict(float)
        self._seen.clear()
        self._last_s = self._clock()
        yield
        self._add(LOSS)
        self._keep(self.forward)

    @contextmanager
    def going_backward(self) -> Iterator[None]:
        """A context for the backward of both."""
        self._now, self._owner = defaultdict(float), LOSS
        self._last_s = self._clock()
        yield
        self._add(self._owner)
        self._keep(self.backward)

    def drop(self) -> None:
        """Discard the steps so far, which were a warm-up."""
        self.forward.clear()
        self.backward.clear()

    def of(self, name: str) -> tuple[Times, Times]:
        """Forward and backward of a layer, or of the `LOSS`."""
        return Times.of(self.forward.get(name) or [0.0]), Times.of(self.backward.get(name) or [0.0])

    def together(self, names: Sequence[str]) -> Times:
        """Forward and backward of several layers, summed."""
        totals = [0.0] * len(self.forward[LOSS])
        for name in names:
            for table in (self.forward, self.backward):
                for step, seconds in enumerate(table.get(name, ())):
                    totals[step] += seconds
        return Times.of(totals)

    def _hook(self, name: str) -> Any:
        def ended(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            self._add(name)
            source, target = _first(given), _first(output)
            if target is None or not target.requires_grad:
                return
            trained = any(parameter.requires_grad for parameter in module.parameters())
            self.passes[name] = 1 + trained + (source is not None and source.requires_grad)
            # A layer that returns its input has no backward, and its hook would conflict with that of the other layer.
            if all(target.grad_fn is not seen for seen in self._seen):
                self._seen.append(target.grad_fn)
                target.register_hook(begun)  # type: ignore[no-untyped-call]

        def begun(gradient: Tensor) -> None:
            self._add(self._owner)
            self._owner = name

        return ended

    def _add(self, name: str) -> None:
        now = self._clock()
        self._now[name] += now - self._last_s
        self._last_s = now

    def _keep(self, into: dict[str, list[float]]) -> None:
        """Give every layer a time for every step, also if the step did not call it."""
        steps = len(into[LOSS])
        for name in {*into, *self._now}:
            into[name] += [0.0] * (steps - len(into[name]))
            into[name].append(self._now.get(name, 0.0))
