"""A batch, and how its content reaches the model and the loss.

=========================================  ===========================  =========================
a batch, as collated                       the model is called          the loss gets, as target
=========================================  ===========================  =========================
tuple or list of two or more               ``model(*batch[:-1])``       ``batch[-1]``
mapping with one key of `TARGETS`          ``model(**the others)``      the value of that key
anything, with ``Task.forward``            ``forward(model, batch)``    the whole batch
=========================================  ===========================  =========================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from zmqtrain.data.nested import mapped, moved, rows
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.words import typed

#: The keys of a mapping that hold the target; a mapping must have exactly one of them.
TARGETS = ("labels", "label", "targets", "target")
#: ``forward(model, batch)``: the model's output, for batches that do not show how the model is called.
Forward: TypeAlias = Callable[[Any, Any], Any]
#: Begins to copy a tensor to a device's memory, beside the device's arithmetic. What it returns at once gives the copy, where it is
#: used.
Move: TypeAlias = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples, and how the model is called with them. The loss compares ``output(model)`` with ``target``."""

    inputs: tuple[Any, ...]
    target: Any
    samples: int
    arriving: Callable[[], Batch] | None = field(default=None, repr=False, compare=False)
    """Returns the same batch in the device's memory, if it is being copied there."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """The inputs that are passed by name."""
    forward: Forward | None = field(default=None, repr=False, compare=False)
    """Calls the model with the target, which is then the whole batch."""

    def output(self, model: nn.Module) -> Any:
        """The model's output for these samples."""
        if self.forward is not None:
            return self.forward(model, self.target)
        return model(*self.inputs, **self.named)

    def arguments(self, model: nn.Module) -> tuple[Any, ...]:
        """The positional arguments of the model's forward, for callers that need them by position.

        Raises `UsageError` if they are not known: `Task.forward` calls the model, or it takes some arguments by name only."""
        if self.forward is None:
            with suppress(TypeError, ValueError):
                bound = inspect.signature(model.forward).bind(*self.inputs, **self.named)
                if not bound.kwargs:
                    return bound.args
        raise UsageError(
            "the model's arguments must be known by position here: let batches be (input, ..., target), or mappings of the "
            "first arguments of the model's forward, and labels"
        )

    def split(self, parts: int) -> list[Batch]:
        """Divide the batch evenly into ``parts`` parts, as views; fewer if it has fewer samples. Raises `TaskError` if it cannot be
        divided."""
        if parts == 1 or self.samples < 2:
            return [self]
        cuts = np.array_split(np.arange(self.samples), min(parts, self.samples))
        return [self._cut(slice(int(cut[0]), int(cut[-1]) + 1), len(cut)) for cut in cuts]

    def part(self, which: slice) -> Batch:
        """The samples of a slice, as views. Raises `TaskError` if the batch cannot be divided."""
        start, stop, _ = which.indices(self.samples)
        return self if (start, stop) == (0, self.samples) else self._cut(which, stop - start)

    def _cut(self, which: slice, samples: int) -> Batch:
        def cut(part: Any) -> Any:
            return rows(part, which, self.samples)

        named = {name: cut(value) for name, value in self.named.items()}
        if self.forward is not None and type(self.target) in (tuple, list):  # its entries are fields, whatever their number
            target = type(self.target)(cut(each) for each in self.target)
        else:
            target = cut(self.target)
        return replace(self, inputs=tuple(cut(each) for each in self.inputs), target=target, samples=samples, named=named)

    def to(self, device: torch.device) -> Batch:
        """The batch in the device's memory. Called in the compute thread."""
        batch = self if self.arriving is None else self.arriving()
        return batch if device.type == "cpu" else batch.mapped(lambda part: moved(part, device))

    def mapped(self, function: Callable[[Any], Any]) -> Batch:
        """A copy with ``function`` applied to each part: inputs, target and named inputs."""
        inputs, target, named = function((self.inputs, self.target, dict(self.named)))
        return replace(self, inputs=inputs, target=target, named=named, arriving=None)

    def with_inputs(self, function: Callable[[Any], Any]) -> Batch:
        """A copy with ``function`` applied to the inputs alone."""
        if self.forward is not None:
            return replace(self, target=function(self.target))
        return replace(self, inputs=function(self.inputs), named=function(dict(self.named)))

    def on_its_way(self, move: Move) -> Batch:
        """The batch, with a copy to the device begun by ``move``."""
        begun: list[Callable[[], torch.Tensor]] = []

        def begin(tensor: torch.Tensor) -> torch.Tensor:
            begun.append(move(tensor))
            return tensor

        def arrived() -> Batch:
            copies = iter([end() for end in begun])
            return self.mapped(lambda part: mapped(part, lambda _: next(copies)))

        self.mapped(lambda part: mapped(part, begin))
        return replace(self, arriving=arrived)


def batch_of(collated: Any, samples: int, forward: Forward | None = None) -> Batch:
    """Make a `Batch` of ``samples`` collated samples, by the table above. Raises `TaskError` if no row of the table fits."""
    if forward is not None:
        return Batch((), collated, samples, forward=forward)
    if isinstance(collated, Mapping):
        return _of_mapping(collated, samples)
    if not isinstance(collated, tuple | list) or len(collated) < 2:
        raise TaskError(
            f"a batch of the task's data is {typed(collated)}; it must be (input, target), or a mapping with labels: let "
            "data[i] return such a pair, or define Task.forward(model, batch); the loss then gets the whole batch"
        )
    fields: tuple[str, ...] = getattr(collated, "_fields", ())
    wrong = [name for name in fields[:-1] if name in TARGETS]
    if wrong and fields[-1] not in TARGETS:
        raise TaskError(
            f"a batch of the task's data is {typed(collated)} whose last field, which should be the target, is "
            f"{fields[-1]!r}, although it has {wrong[0]!r}: put that field last, or define Task.forward(model, batch)"
        )
    return Batch(tuple(collated[:-1]), collated[-1], samples)


def _of_mapping(collated: Mapping[Any, Any], samples: int) -> Batch:
    found = [key for key in TARGETS if key in collated]
    if len(found) != 1:
        keys = ", ".join(map(repr, collated))
        several = f"has {' and '.join(map(repr, found))}" if found else f"has none of {', '.join(TARGETS)}"
        raise TaskError(
            f"a batch of the task's data is a mapping of {keys}, which {several}, so the target is not known. Define "
            "Task.forward, such as `lambda model, batch: model(batch['x'])`; the loss then gets the whole batch"
        )
    strange = [key for key in collated if not isinstance(key, str)]
    if strange:
        raise TaskError(f"a batch of the task's data is a mapping with the key {strange[0]!r}, which is not a valid argument name")
    named = {str(key): value for key, value in collated.items() if key != found[0]}
    return Batch((), collated[found[0]], samples, named=named)
