"""What one process makes of a model, with plain torch: for comparison with a run whose steps count on all workers or on none.

Nothing of exchanges, replicas and divided models has a part in it: the model, the optimizer and the schedule are the task's, and
each step is a forward and a backward of the whole batch of all groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from zmqtrain.data.batch import Batch, batch_of
from zmqtrain.data.loader import Reader
from zmqtrain.parallel.turns import generator_state, generators_kept
from zmqtrain.topology.schema import Topology
from zmqtrain.train.batches import partition_of
from zmqtrain.train.random_state import seed_everything
from zmqtrain.train.task import Task, build_model, build_optimizer, task_of_job

#: Sums in another order differ by so much, of the larger of 1 and the value.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}


def comparable(topology: Topology) -> bool:
    """Whether all steps of a run count, each on its whole batch, and the arithmetic is one process's up to the order of sums."""
    compute = topology.compute
    alike = topology.parallel.statistics != "local" and compute.accumulate == 1 and compute.precision == "float32"
    return topology.forms_grids and topology.trains and alike


def trained_alone(
    topology: Topology, steps: int, task: Task | None = None, data_path: str | None = None
) -> Mapping[str, Tensor] | None:
    """The model's state after so many steps of the run; ``None`` if a step draws random numbers, which are others in a run.
    ``task``: in place of the one that the topology names."""
    job = topology.job
    if task is None:
        task = task_of_job(job, data_path, here=Path.cwd())
    with generators_kept():
        seed_everything(job.seed)
        model = build_model(task)
        optimizer, schedule = build_optimizer(task, model, topology)
        drawn = generator_state()
        for batch in _batches(topology, task, steps):
            optimizer.zero_grad()
            task.loss(batch.output(model), batch.target).backward()  # type: ignore[no-untyped-call]
            if topology.optimizer.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), topology.optimizer.clip_norm)
            optimizer.step()
            if schedule is not None:
                schedule.step()
        alike = torch.equal(generator_state(), drawn)
    return dict(model.state_dict()) if alike else None


def _batches(topology: Topology, task: Task, steps: int) -> Iterator[Batch]:
    source = task.training()
    reader = Reader(source.dataset, source.collate, source.transform)
    partition = partition_of(source, topology.compute.groups, topology)
    for step in range(steps):
        indices = partition.run(step, 0, partition.step_samples)
        yield batch_of(reader.prepared(indices, partial(reader.collated, indices), None), len(indices), task.forward)


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """The first tensor that differs by more than rounding, in words; ``None`` if there is none."""
    if found.keys() != expected.keys():
        return f"the run's model has {', '.join(sorted(found))}, but that of one process {', '.join(sorted(expected))}"
    for name, value in expected.items():
        mine = found[name]
        if mine.shape != value.shape or mine.dtype != value.dtype:
            return f"{name} is {mine.dtype} of shape {tuple(mine.shape)}, on one process {value.dtype} of {tuple(value.shape)}"
        apart = (mine - value).abs() / value.abs().clamp(min=1)
        if value.numel() and not float(apart.max()) <= _ROUNDING.get(value.dtype, 0.0):
            return f"{name} of the run's model differs by up to {float(apart.max()):g} from that of one process"
    return None
