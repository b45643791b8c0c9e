"""What an evaluation measures, as sums that workers can add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zmqtrain.train.task import Measure, Task, user_code
from zmqtrain.train.weighting import ignores, parted, require_none_ignored, taken_apart

Sums = npt.NDArray[np.float64]


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of correct classes. ``output``: scores, float, with classes in dimension 1; ``target``: class numbers, integers."""
    return (output.argmax(1) == target).double().mean()


class Metrics:
    """The loss and the task's metrics, each with a sum over samples and the number of samples."""

    def __init__(self, task: Task) -> None:
        measures = {"loss": task.loss, **(task.metrics or {})}
        self._measures: Mapping[str, Measure] = {name: taken_apart(measure) for name, measure in measures.items()}
        self._plain = {name for name, measure in self._measures.items() if ignores(measure)}
        self._guess = task.metrics is None  # use accuracy if the targets turn out to be classes
        self.names: Sequence[str] = [f"eval_{name}" for name in self._measures] + (["eval_accuracy"] if self._guess else [])

    def zeros(self) -> Sums:
        """Zero sums: pairs of (sum, samples), flat; sums of several workers can be added."""
        return np.zeros(2 * len(self.names))

    def add(self, sums: Sums, output: Any, target: Any, samples: int) -> None:
        """Add a batch of ``samples`` samples to ``sums``."""
        for place, (name, measure) in enumerate(self._measures.items()):
            if name in self._plain:
                require_none_ignored(target)
            with user_code(f"the metric {name!r}(output, target)"):
                value = measure(output, target)
                pair = parted(value)
                of = (float(value) * samples, samples) if pair is None else (float(pair[0]), float(pair[1]))
            sums[2 * place : 2 * place + 2] += of
        if self._guess and _are_classes(output, target):
            sums[-2:] += float(accuracy(output, target)) * samples, samples

    def means(self, sums: Sums) -> dict[str, float]:
        """The metrics that apply, by name."""
        pairs = zip(self.names, sums.reshape(-1, 2), strict=True)
        return {name: float(total / samples) for name, (total, samples) in pairs if samples}


def _are_classes(output: Any, target: Any) -> bool:
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and target.dtype != torch.bool
        and output.dim() == target.dim() + 1
        and output.shape[:1] + output.shape[2:] == target.shape
    )
