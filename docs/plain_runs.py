"""Trials as plain PyTorch loops, with gradients as old as groups make them, in the time that updates take: ten times cheaper.

The arithmetic is real. A group takes ``groups`` times an update's time for a batch, varying by a tenth, and its gradient is of the
parameters that there were when it began. Nothing of the runtime is in between.
"""

from __future__ import annotations

import copy
import heapq
import math
import random
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from zmqtrain import Task
from zmqtrain.topology.schema import Topology
from zmqtrain.tune.job import job_of
from zmqtrain.tune.monitor import TrialMonitor
from zmqtrain.tune.trial import Outcome, Trial

#: Seconds of starting and ending a run. One that is stopped goes on until the next report: workers report twice a second.
AROUND_S, REPORT_S = 0.02, 0.5
#: By what times vary.
SPREAD = 0.1
#: Between the seeds of two orders of the data: farther than those of a search's trials are from each other.
ORDERS_APART = 1_000_000


class PlainRuns:
    """Implements `zmqtrain.experiment.runs.Runs`."""

    def __init__(self, topology: Topology, task: Task, update_s: Mapping[int, float], order: int = 0) -> None:
        """``update_s``: seconds of an update by groups. ``order``: of the data and of the times; 0 is the job's own seed."""
        self._topology, self._task, self._update_s, self._order = topology, task, update_s, order
        self._ends: dict[int, dict[str, Tensor]] = {}
        self.elapsed_s = 0.0

    def shows(self, trial: Trial) -> bool:
        return False

    def run(self, trial: Trial) -> Outcome:
        job = job_of(self._topology, trial, None).job
        assert job.steps is not None
        groups, tune = trial.setting.groups, self._topology.tune
        torch.manual_seed(self._topology.job.seed)
        model = self._task.model()
        if trial.start is not None:
            model.load_state_dict(self._ends[trial.start])
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.setting.lr, momentum=trial.setting.momentum)
        seed = job.seed + ORDERS_APART * self._order
        batches, chance = self._batches(seed), random.Random(seed)
        readers = [model] if groups == 1 else [copy.deepcopy(model) for _ in range(groups)]
        monitor = TrialMonitor(trial, 1, tune.target_loss, tune.smooth)

        def takes_s() -> float:
            return groups * self._update_s[groups] * max(0.1, chance.gauss(1.0, SPREAD))

        ends = [(takes_s() * (1 + group) / groups, group) for group in range(groups)]
        heapq.heapify(ends)
        steps, read, made, now = [0] * groups, [0] * groups, 0, 0.0
        until_s = math.inf  # when it hears that it is to stop
        while ends and ends[0][0] <= until_s:
            now, group = heapq.heappop(ends)
            loss = self._step(model, readers[group], optimizer, next(batches))
            steps[group] += 1
            values = {"loss": loss, "seconds": now if made == 0 else 0.0, "staleness": made - read[group]}
            made += 1
            read[group] = made
            monitor.observe({"kind": "step", "time": now, "step": steps[group], "values": values}, group)
            if job.checkpoint_every and steps[group] % job.checkpoint_every == 0:
                monitor.observe({"kind": "checkpoint", "step": steps[group]}, group)
            if monitor.stop is not None and math.isinf(until_s):
                until_s = math.ceil(now / REPORT_S) * REPORT_S
            if steps[group] < job.steps:
                heapq.heappush(ends, (now + takes_s(), group))
        self._ends[trial.number] = model.state_dict()
        return monitor.outcome(whole_s=now + AROUND_S)

    def _step(self, model: nn.Module, reader: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
        """A gradient of the reader's parameters for the model's; the reader has the new ones then."""
        reader.zero_grad()
        loss = self._task.loss(reader(batch[0]), batch[1])
        loss.backward()
        if reader is not model:
            for mine, its in zip(model.parameters(), reader.parameters(), strict=True):
                mine.grad = its.grad
        optimizer.step()
        if reader is not model:
            with torch.no_grad():
                for mine, its in zip(model.parameters(), reader.parameters(), strict=True):
                    its.copy_(mine)
        return loss.item()

    def _batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, targets = self._task.train_data.tensors  # type: ignore[attr-defined]
        for part in batch_indices(len(inputs), self._topology.compute.batch_size, seed):
            yield inputs[part], targets[part]


def batch_indices(samples: int, size: int, seed: int) -> Iterator[Tensor]:
    """Of whole batches, epoch after epoch, each shuffled."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(samples, generator=generator)
        for begin in range(0, samples - size + 1, size):
            yield order[begin : begin + size]
