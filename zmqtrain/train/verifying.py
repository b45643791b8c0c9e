"""Before its first step a worker's group compares its divided model with the task's ordinary one, on a few samples of the batch."""

from __future__ import annotations

import copy
import gc
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.data.batch import Batch
from zmqtrain.data.nested import PLAIN, leaves, mapped
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.heap import give_back, returning_blocks
from zmqtrain.parallel.communicator import Fabric, Label
from zmqtrain.parallel.copying import copied
from zmqtrain.parallel.deferred import Tape, fill
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.parallel.verify import Case, Verified, verified
from zmqtrain.parallel.verify.case import NotComparable, alone, source_of
from zmqtrain.topology.schema import Topology
from zmqtrain.train.divided import loss_on_grid, parallel_model, share_of_model
from zmqtrain.train.random_state import seed_everything
from zmqtrain.train.task import Measure, Task, build_model, build_optimizer, user_code

#: Samples of each column, at least: batch norm needs more than one.
SAMPLES = 2
#: Freed blocks of this size and more go back at once, for holes of theirs in the heap make the process larger; the others do at the
#: end. If those of small weights did at once, too, a third of the time would go into mapping and clearing pages.
_RETURNED_BYTES = 1 << 25


def verify_task(
    task: Task,
    topology: Topology,
    fabric: Fabric,
    grid: Grid,
    ordinary: Ordinary,
    batch: Batch,
    device: torch.device,
    *,
    references: tuple[int, ...] = (),
) -> Verified:
    """Compare. All workers of a group call it, in their compute threads; nothing of the run changes.

    ``grid``: whose columns have the batch. ``batch``: the first one of this worker's column, in the device's memory.
    ``references``: as `Case` has them.

    Raises `zmqtrain.errors.DifferentModelError`, `TaskError`, and `NotComparable`, each on all workers of the group.
    """

    def optimizer(model: nn.Module) -> Optimizer:
        return build_optimizer(task, model, topology)[0]

    def divide() -> ParallelModel:
        runs_both = source_of(references, fabric.rank) == fabric.rank
        return ordinary.divided(device, lambda model, tape: parallel_model(model, topology, fabric, tape=tape), and_whole=runs_both)

    return verify_model(
        lambda: ordinary(device),
        divide,
        loss_on_grid(task.loss, topology),
        optimizer,
        topology,
        fabric,
        grid,
        batch,
        device,
        references=references,
    )


def verify_model(
    make: Callable[[], nn.Module],
    divide: Callable[[], ParallelModel],
    loss: Measure,
    optimizer: Callable[[nn.Module], Optimizer] | None,
    topology: Topology,
    fabric: Fabric,
    grid: Grid,
    batch: Batch,
    device: torch.device,
    *,
    references: tuple[int, ...] = (),
) -> Verified:
    """The same for any model, loss (a mean over samples) and optimizer. ``make`` gives an equal ordinary model at each call, and
    ``divide`` this worker's part of one."""
    try:
        with returning_blocks(_RETURNED_BYTES), user_code("the divided model, compared with the ordinary one,"):
            given = _whole_batch(fabric, grid, batch, _samples(topology, grid))
            case = Case(
                make=make,
                divide=divide,
                batch=given,
                loss=loss,
                optimizer=optimizer,
                share=lambda divided, samples: share_of_model(divided, samples, loss),
                seed=topology.job.seed,
                local_statistics=topology.parallel.statistics == "local",
                dtype=torch.float64,
                smaller=True,
                references=references,
            )
            return verified(case, fabric)
    finally:
        gc.collect()  # models and their hooks know each other
        give_back()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def one_of_each(hosts: Sequence[str]) -> tuple[int, ...]:
    """For each rank, given its host, the rank that runs the ordinary model for it: the first one there. Numbers of a whole model
    travel within hosts, and hosts compute at the same time."""
    return tuple(map(hosts.index, hosts))


class Ordinary:
    """The task's model as it is at first. Made before that is divided; a call gives another one, equal, on a device."""

    def __init__(self, task: Task, seed: int, model: nn.Module, tape: Tape | None = None) -> None:
        """``model``: as the task has built it, in the host's memory. What is divided later is this one; a copy is kept.

        ``tape``: of a model whose large tensors have no content yet, and so take no memory in the copy, either."""
        self._task, self._seed, self._tape = task, seed, tape
        self._taken = {id(module) for module in model.modules()}
        self._kept = copied(model)
        self._made: nn.Module | None = None

    def __call__(self, device: torch.device) -> nn.Module:
        """Raises `NotComparable`."""
        if self._kept is not None:
            another, self._made = self._made or self._another(self._kept), None
            return another.to(device)
        with alone():
            seed_everything(self._seed)
            found = build_model(self._task)
        if any(id(module) in self._taken for module in found.modules()):
            raise NotComparable("Task.model() returns the same modules each time, and they are divided now")
        self._taken |= {id(module) for module in found.modules()}
        return found.to(device)

    def divided(
        self, device: torch.device, divide: Callable[[nn.Module, Tape | None], ParallelModel], *, and_whole: bool = False
    ) -> ParallelModel:
        """Another one, divided as ``divide(model, tape)`` does; made part by part where the task's is. Raises `NotComparable`.

        ``and_whole``: the next call is for a whole one, which is made now, since drawing numbers takes longer than copying them."""
        if self._kept is None or self._tape is None:
            return divide(self(device), None)
        if not and_whole:
            return divide(copy.deepcopy(self._kept), self._tape)
        self._made = self._another(self._kept)
        return divide(copy.deepcopy(self._made).to(device), None)

    def _another(self, kept: nn.Module) -> nn.Module:
        another = copy.deepcopy(kept)
        if self._tape is not None:
            fill(another, self._tape, lambda _, whole: whole)
        return another


def _samples(topology: Topology, grid: Grid) -> int:
    """Of each column: so many that each process has one in layers that are divided by samples."""
    layers = topology.parallel.layers
    most = max((grid.size if each.choice == "batch" else Grid.parse(each.grid).columns for each in layers), default=1)
    return max(SAMPLES, -(-most // grid.columns))


def _whole_batch(fabric: Fabric, grid: Grid, batch: Batch, samples: int) -> Batch:
    """So many samples of every column, or what there is.

    Raises `NotComparable`, and `UsageError` where a column's workers have other samples."""
    everyone = tuple(range(fabric.size))
    shapes, content = _digests(_first(batch, SAMPLES))
    own = torch.tensor([batch.samples, shapes, content], dtype=torch.int64)
    told = fabric.among(everyone).all_gather(own, [(3,)] * fabric.size, Label("", "statistics")).wait()
    facts = [tuple(int(number) for number in each) for each in told]
    for column in range(grid.columns):
        if len({facts[rank] for rank in grid.column(grid.rank(0, column))}) > 1:
            raise UsageError(
                f"the workers of column {column} of the grid have read different samples, and should have the same: does the "
                "dataset or the transform draw random numbers that are not torch's, numpy's or Python's own?"
            )
    samples = min(samples, *(fact[0] for fact in facts))
    if samples < 1:
        raise NotComparable("a column has no samples")
    part = _first(batch, samples)
    if grid.columns == 1:
        return part
    if len({fact[1] for fact in facts}) > 1 or shapes == _UNKNOWN:
        raise NotComparable("the columns' samples have different shapes, or are no tensors")
    row = fabric.among(grid.row(fabric.rank))

    def joined(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        parts = row.all_gather(tensor.contiguous(), [tuple(tensor.shape)] * grid.columns, Label("", "statistics")).wait()
        return torch.cat(parts).to(tensor.device)

    found = part.mapped(lambda each: mapped(each, joined))
    return Batch(found.inputs, found.target, samples * grid.columns, named=found.named, forward=found.forward)


def _first(batch: Batch, samples: int) -> Batch:
    """Samples that require a gradient are leaves here, since several models compute gradients with them."""
    try:
        part = batch.part(slice(0, min(samples, batch.samples)))
        return part.mapped(lambda each: mapped(each, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad)))
    except TaskError as error:
        raise NotComparable(str(error)) from error


_UNKNOWN = -1


def _digests(batch: Batch) -> tuple[int, int]:
    """Of the samples' shapes (`_UNKNOWN`: not of tensors alone) and of what is in them."""
    shapes, content = hashlib.blake2b(digest_size=7), hashlib.blake2b(digest_size=7)
    known = True
    for leaf in leaves((batch.inputs, batch.target, dict(batch.named))):
        if isinstance(leaf, Tensor):
            of_samples = leaf.shape[:1] == (batch.samples,)  # of which columns may have different numbers
            shapes.update(f"{leaf.dtype}{list(leaf.shape[of_samples:])};".encode())
            content.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif not isinstance(leaf, PLAIN):
            known = False
        else:
            content.update(repr(leaf).encode())
    return int.from_bytes(shapes.digest(), "little") if known else _UNKNOWN, int.from_bytes(content.digest(), "little")
