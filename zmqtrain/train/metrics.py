"""What an evaluation measures, as sums that workers can add up.

A metric is the mean of its values for batches, weighted by their samples, so it must be a mean itself: a sum, a root of a mean or
an F1 score would depend on how the samples are divided. The first batches whose halves have other values show which metrics are
none. These get NaN as their number of samples, on whichever worker it is seen, and are left out by all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zmqtrain.errors import TaskError, UsageError
from zmqtrain.topology.job import Job
from zmqtrain.topology.suggest import did_you_mean
from zmqtrain.train.task import Measure, Task, user_code
from zmqtrain.train.weighting import (
    LOSSES_TRIED,
    Halves,
    ignored_by_model,
    of_model,
    parted,
    rows_counted,
    taken_apart,
    tried_on_halves,
    weight_of,
)
from zmqtrain.words import typed

Sums = npt.NDArray[np.float64]
#: A batch with more samples shows by itself whether a metric is a mean.
SMALL = 64
MOST_JOINED = 8


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of correct classes. ``output``: scores, float, with classes in dimension 1; ``target``: class numbers, integers."""
    return (output.argmax(1) == target).double().mean()


def require_metric(task: Task, job: Job) -> None:
    """Raise `UsageError` if the job evaluates, but the task has no data for it, or has no such metric as training shall go on
    until. Whether it has ``accuracy``, which is there by default where targets are classes, only an evaluation shows."""
    until = job.until
    if task.eval_data is None and (until is not None or job.eval_every):
        raise UsageError(f"[job] {'eval_every' if until is None else 'until'} needs an evaluation: give the task eval_data")
    if until is None:
        return
    names = ["loss", *(["accuracy"] if task.metrics is None else task.metrics)]
    if until.metric.removeprefix("eval_") not in names and until.metric not in names:
        near = did_you_mean(until.metric, [f"eval_{name}" for name in names])
        hint = f"did you mean {near!r}?" if near else f"the task has {', '.join(names)}"
        raise UsageError(f"[job] until: there is no metric {until.metric!r}; {hint}")


class Metrics:
    """The loss and the task's metrics, each with a sum over samples and the number of samples."""

    def __init__(self, task: Task) -> None:
        measures = {"loss": task.loss, **(task.metrics or {})}
        self._measures: Mapping[str, Measure] = {name: taken_apart(measure, plain=True) for name, measure in measures.items()}
        self._tries = dict.fromkeys(measures, LOSSES_TRIED)  # batches from which it can be seen
        self._no_means: set[str] = set()  # seen here
        self._joined: list[tuple[Tensor, Tensor]] = []  # the outputs and targets of the first batches, if these are small
        self._joins = MOST_JOINED  # so many more batches are joined
        self._guess = task.metrics is None  # use accuracy if the targets turn out to be classes
        self.names: Sequence[str] = [f"eval_{name}" for name in self._measures] + (["eval_accuracy"] if self._guess else [])

    def zeros(self) -> Sums:
        """Zero sums: pairs of (sum, samples), flat; sums of several workers can be added."""
        return np.zeros(2 * len(self.names))

    def add(self, sums: Sums, output: Any, target: Any, samples: int, *, alone: bool = False) -> None:
        """Add a batch of ``samples`` samples to ``sums``. ``alone``: there is no other batch, so its values need not be means."""
        joined = None if alone else self._join(output, target, samples)
        for place, (name, measure) in enumerate(self._measures.items()):
            with user_code(f"the metric {name!r}(output, target)"):
                value = measure(output, target)
                pair = parted(value)
                count = rows_counted(target, samples)
                of = (_number(name, value) * count, float(count)) if pair is None else (float(pair[0]), float(pair[1]))
                if not alone and (self._tries[name] or (pair is None and count != samples)):
                    self._try(name, measure, output, target, samples, value if pair is None else pair[1], weighted=pair is not None)
                if joined is not None:
                    self._try_joined(name, measure, *joined)
                if name in self._no_means:
                    of = of[0], math.nan
            sums[2 * place : 2 * place + 2] += of
        if self._guess and _are_classes(output, target):
            sums[-2:] += float(accuracy(output, target)) * len(target), len(target)

    def _join(self, output: Any, target: Any, samples: int) -> tuple[Tensor, Tensor] | None:
        """The outputs and targets of 2, 4 and 8 small batches together, which show more than a few samples do; else ``None``."""
        if not self._joins:
            return None
        self._joins -= 1
        both = [each for each in (output, target) if isinstance(each, Tensor) and each.shape[:1] == (samples,)]
        alike = all(one.shape[1:] == other.shape[1:] for pair in self._joined for one, other in zip(pair, both, strict=False))
        if len(both) < 2 or samples > SMALL or not alike:
            self._joins, self._joined = 0, []
            return None
        self._joined.append((both[0], both[1]))
        number = len(self._joined)
        outputs, targets = zip(*self._joined, strict=True)
        joined = None if number == 1 or number & (number - 1) else (torch.cat(outputs), torch.cat(targets))
        if not self._joins:
            self._joined = []
        return joined

    def _try_joined(self, name: str, measure: Measure, output: Tensor, target: Tensor) -> None:
        """Do as `_try` does, with several batches."""
        try:
            value = measure(output, target)
            pair = parted(value)
        except Exception:  # noqa: BLE001 - it has given values for the batches, and that is all that is asked of it
            return
        tries = self._tries[name]
        self._try(name, measure, output, target, len(output), value if pair is None else pair[1], weighted=pair is not None)
        self._tries[name] = tries

    def _try(self, name: str, measure: Measure, output: Any, target: Any, samples: int, value: Any, *, weighted: bool) -> None:
        """Notice a measure that is no mean, or whose ``value`` is no weight, as far as a batch shows it. One of which each half has
        the same value shows nothing: the recall of a model that is always right is 1, as a mean would be."""
        if weighted:
            count = samples
            found = tried_on_halves(measure, output, target, samples, value, of=weight_of) if samples > 1 else None
            good = found is None or found.adds_up
        else:
            count = rows_counted(target, samples)
            found = tried_on_halves(measure, output, target, count, value)  # a single sample comes several times
            good = _is_mean(found, output, target, value, count == samples)
        if not good:
            self._no_means.add(name)
        if self._tries[name] and count > 1 and (found is None or weighted or not found.alike):
            self._tries[name] -= 1

    def means(self, sums: Sums) -> dict[str, float]:
        """The metrics that apply, by name. One whose weights add up to 0 (the precision where nothing was found) is NaN."""
        found: dict[str, float] = {}
        for name, (total, samples) in zip(self.names, sums.reshape(-1, 2), strict=True):
            if not math.isnan(samples) and (samples or name.removeprefix("eval_") in self._measures):
                found[name] = float(total / samples) if samples else math.nan
        return found

    def left_out(self, sums: Sums) -> list[str]:
        """The names of those that are no means."""
        return [name for name, samples in zip(self.names, sums[1::2].tolist(), strict=True) if math.isnan(samples)]


def _number(name: str, value: Any) -> float:
    """The value of a metric as a number. Raises `TaskError` if it is none."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return float(value)
        what = f"a tensor of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    elif isinstance(value, str | bytes | bytearray) or value is None:  # float("0.5") would be a number
        what = f"{value!r}"
    else:
        try:
            return float(value)
        except (TypeError, ValueError):
            what = typed(value)
    raise TaskError(f"the metric {name!r}(output, target) returned {what}: let it return one number, or the pair (sum, weight)")


def _is_mean(found: Halves | None, output: Any, target: Any, value: Any, by_sample: bool) -> bool:
    """Whether the value of a batch is the mean of its rows, as far as that can be seen. ``by_sample``: it has a row for each."""
    if (of_model(value, output) or (found is not None and found.alike)) and ignored_by_model(target) is not None:
        return False
    return by_sample if found is None else found.mean


def _are_classes(output: Any, target: Any) -> bool:
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and target.dtype != torch.bool
        and output.dim() == target.dim() + 1
        and output.shape[:1] + output.shape[2:] == target.shape
    )
