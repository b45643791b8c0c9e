"""Steps of a task's model on a device, timed layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zmqtrain.data.batch import Batch, batch_of
from zmqtrain.data.loader import Finish
from zmqtrain.plan.layers import LayerShape
from zmqtrain.plan.measure.layer_times import LOSS, LayerTimes
from zmqtrain.plan.measure.phases import fc_begins
from zmqtrain.plan.measure.timing import Patience, Times, clock_of, repeat
from zmqtrain.plan.trace import SAMPLES, trace_layers
from zmqtrain.train.batches import sample_batch
from zmqtrain.train.random_state import seed_everything
from zmqtrain.train.step import Precision, autocast
from zmqtrain.train.task import Task, build_model, build_optimizer_of, user_code

#: Bytes factor per element of a layer's output in a step: the activation, its gradient, and the same again while layers compute.
_COPIES = 3


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps with ``samples`` samples."""

    samples: int
    times: LayerTimes
    conv: Times
    fc: Times
    memory: int

    @property
    def samples_per_s(self) -> float:
        return self.samples / (self.conv.median_s + self.fc.median_s)


class ModelBench:
    """A task's model, for measurements."""

    def __init__(
        self, task: Task, device: torch.device, *, precision: Precision = "float32", channels_last: bool = False, seed: int = 1
    ) -> None:
        """``channels_last``: see ``[compute] channels_last``. Raises `TaskError` if the task's code fails."""
        self.task, self.device, self._precision, self._seed = task, device, precision, seed
        self._clock = clock_of(device)
        seed_everything(seed)
        self.model = build_model(task)
        self.channels_last = channels_last
        """Whether images are laid out with channels last in memory. May be changed."""
        first = self._batch(SAMPLES)
        self.layers: tuple[LayerShape, ...] = trace_layers(self.model, first.arguments(self.model))
        self.model.to(device)
        begin = fc_begins(self.layers)
        self.conv = tuple(layer.name for layer in self.layers[:begin])
        """Names of the layers before the FC phase."""
        self.fc = tuple(layer.name for layer in self.layers[begin:])

    def memory_of(self, samples: int) -> int:
        """An estimate of the bytes that a step of ``samples`` samples needs besides the parameters."""
        return samples * sum(4 * _COPIES * layer.numel_out * layer.calls for layer in self.layers)

    def memory_free(self) -> int:
        """Bytes that are available for a step."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return int(free)
        import psutil

        return int(psutil.virtual_memory().available)

    def steps(self, samples: int, patience: Patience) -> Steps:
        """Measure forward, loss and backward of ``samples`` samples several times. Raises `TaskError` if the task's code fails, and
        torch's error if there is not enough memory."""
        model, times = self.model.train(), LayerTimes(self._clock)
        batch = self._batch(samples).to(self.device)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        warm = 0

        def step() -> None:
            nonlocal warm
            for parameter in model.parameters():
                parameter.grad = None
            with times.going_forward():
                loss = self._loss(batch)
            with times.going_backward(), user_code("the backward pass"):
                loss.backward()  # type: ignore[no-untyped-call]
            warm += 1
            if warm == patience.warm_up:
                times.drop()

        with times.watching(model, [layer.name for layer in self.layers]):
            repeat(step, self._clock, patience)
        memory = torch.cuda.max_memory_allocated(self.device) - before if cuda else self.memory_of(samples)
        return Steps(samples, times, times.together(self.conv), times.together([*self.fc, LOSS]), memory)

    def update_s(self, patience: Patience) -> float:
        """Seconds of one optimizer step on all parameters, which it changes."""
        optimizer, _ = build_optimizer_of(self.task, self.model.train())
        self._loss(self._batch(SAMPLES).to(self.device)).backward()  # type: ignore[no-untyped-call]
        with user_code("the optimizer's step"):
            return Times.of(repeat(lambda: _ignore(optimizer.step()), self._clock, patience)).median_s

    def evaluate_s(self, samples: int, patience: Patience) -> float:
        """Seconds to evaluate all of the task's ``eval_data``, ``samples`` samples at a time; 0: there is none."""
        if self.task.eval_data is None:
            return 0.0
        source = self.task.evaluating()
        assert source is not None
        with user_code("reading samples of Task.eval_data"):
            count = source.samples
            samples = min(samples, count)
            batch = sample_batch(source, samples, self._finish, self._seed).to(self.device)
        self.model.eval()
        try:
            with torch.no_grad(), autocast(self.device, self._precision), user_code("the model's forward, in evaluation"):
                once = repeat(lambda: _ignore(batch.output(self.model)), self._clock, patience)
        finally:
            self.model.train()
        return Times.of(once).median_s * count / samples

    def _batch(self, samples: int) -> Batch:
        """The first samples, repeated if there are too few."""
        with user_code("reading samples of Task.train_data"):
            return sample_batch(self.task.training(), samples, self._finish, self._seed)

    @property
    def _finish(self) -> Finish:
        return Finish(partial(batch_of, forward=self.task.forward), channels_last=self.channels_last)

    def _loss(self, batch: Batch) -> Tensor:
        with autocast(self.device, self._precision):
            with user_code("the model's forward"):
                output = batch.output(self.model)
            with user_code("Task.loss(output, target)"):
                return self.task.loss(output, batch.target)


def products(layers: Sequence[LayerShape], steps: Steps) -> dict[str, float]:
    """Operations of the matrix products in forward and backward, by layer; layers without products are left out."""
    kinds = ("conv", "linear", "recurrent", "attention")
    return {
        layer.name: float(layer.flops * layer.calls * steps.samples * steps.times.passes[layer.name])
        for layer in layers
        if layer.kind in kinds and layer.flops and layer.name in steps.times.passes
    }


def _ignore(_: object) -> None:
    return None
