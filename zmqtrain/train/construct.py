"""A worker's part of its task's model, made without the whole model in memory where its constructor allows that."""

from __future__ import annotations

import torch

from zmqtrain.errors import TaskError
from zmqtrain.events import Recorder
from zmqtrain.heap import returning_blocks
from zmqtrain.membership.alike import Facts
from zmqtrain.parallel.deferred import SMALLEST_BYTES, CannotDeferError, Tape, deferred, is_deferred
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.network import NetworkFabric
from zmqtrain.parallel.placed.model import ParallelModel
from zmqtrain.topology.schema import Topology
from zmqtrain.train.alike import facts_of_model
from zmqtrain.train.divided import divide
from zmqtrain.train.random_state import seed_everything
from zmqtrain.train.task import Task, build_model
from zmqtrain.train.verifying import Ordinary


def divided_model(
    task: Task, topology: Topology, fabric: NetworkFabric, device: torch.device, recorder: Recorder
) -> tuple[ParallelModel, Ordinary | None, Facts]:
    """This worker's part on a device, with the ordinary model's initial weights, what it is to be compared with, and what other
    workers must have alike of the whole model.

    Large tensors are made one after another and cut at once, so that this needs the memory of the part and of one tensor. A model
    that cannot be made so is made whole first, and an event `made whole` says why. Raises `TaskError` and `UsageError`. Called in
    the compute thread, in a `turn`."""
    if not topology.parallel.verify:
        recorder.event("not verified", reason="[parallel] verify = false")
    reason: str | None = None
    if _has_rows(topology):
        seed_everything(topology.job.seed)
        tape = Tape()
        try:
            with returning_blocks(SMALLEST_BYTES):
                return _made(task, topology, fabric, device, recorder, tape)
        except CannotDeferError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - if it is not of this way to make the model, the other one has it, too
            reason = f"it raised {type(error).__name__}: {error}"
    if reason is not None:
        recorder.event("made whole", reason=reason)
    seed_everything(topology.job.seed)
    return _made(task, topology, fabric, device, recorder, None)


def _made(
    task: Task, topology: Topology, fabric: NetworkFabric, device: torch.device, recorder: Recorder, tape: Tape | None
) -> tuple[ParallelModel, Ordinary | None, Facts]:
    if tape is None:
        model = build_model(task)
        if any(is_deferred(each) for each in (*model.parameters(), *model.buffers())):
            raise TaskError("Task.model() returns the same model each time it is called: let it make a new one")
    else:
        tape.device = device
        with deferred(tape):
            model = build_model(task)
        tape.require(model)
    ordinary = Ordinary(task, topology.job.seed, model, tape) if topology.parallel.verify else None
    if tape is None:
        model = model.to(device)
    facts = facts_of_model(model)
    return divide(model, topology, fabric, recorder, tape), ordinary, facts


def _has_rows(topology: Topology) -> bool:
    """Whether anything is divided over rows. Otherwise all workers hold all parameters."""
    grids = [topology.compute.grid, *(each.grid for each in topology.parallel.layers)]
    return any(Grid.parse(each).rows > 1 for each in grids if each is not None)
