"""``zmqtrain plan FILE --verify``: the model, divided as planned, compared with the ordinary one. Each worker is a thread."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from zmqtrain.data.batch import batch_of
from zmqtrain.data.loader import Finish
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.assign import main_grid
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.verify import Verified
from zmqtrain.parallel.verify.case import alone
from zmqtrain.testing.threads import run_ranks
from zmqtrain.topology.schema import Topology
from zmqtrain.train.batches import sample_batch
from zmqtrain.train.data_path import data_path_of
from zmqtrain.train.random_state import seed_everything
from zmqtrain.train.task import build_model, task_of_job, user_code
from zmqtrain.train.verifying import SAMPLES, Ordinary, verify_task


def verify_plan(topology: Topology, data: str | None) -> dict[str, Any]:
    """What was compared, as a row. ``topology``: with its grid and plan decided.

    Raises `DifferentModelError` if the divided model is another one, and `TaskError` if the task's own code fails.
    """
    job, grid = topology.job, Grid.parse(topology.compute.grid or f"1x{topology.compute.group_size}")
    assert job.task is not None
    layers = tuple(LayerPlan(each.layer, each.choice, Grid.parse(each.grid), each.strips) for each in topology.parallel.layers)
    grid = main_grid(Plan(layers) if layers else None, grid)
    task = task_of_job(job, data_path_of(data, topology))
    with alone():
        seed_everything(job.seed)
        ordinary = Ordinary(task, job.seed, build_model(task))
    each = max(SAMPLES, grid.rows)
    with user_code("reading samples of Task.train_data"):
        finish = Finish(partial(batch_of, forward=task.forward))
        batch = sample_batch(task.training(), each * grid.columns, finish, job.seed)

    def on_rank(fabric: Fabric) -> Verified:
        column = grid.place(fabric.rank)[1]
        own = batch.part(slice(each * column, each * (column + 1)))
        return verify_task(task, topology, fabric, grid, ordinary, own, torch.device("cpu"))

    found = run_ranks(grid.size, on_rank, timeout_s=None)[0][0]  # others wait while one runs the ordinary model
    return {"row": "verified", "grid": str(grid), "samples": found.samples, "precision": found.precision, "images": found.images}
