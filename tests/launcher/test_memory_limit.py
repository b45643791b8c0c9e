"""A model larger than what a worker may have of memory trains on a grid."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launcher.launched import Launched, prepare

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits on a process's data need Linux")

#: 32 weights of 4 MiB, and as much again for gradients. The limit comes on top of what a worker has when it loads its task. Each of
#: four needs some 70 MiB, and more where several layers travel at once.
TASK = """
import resource
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from zmqtrain import Task

LIMIT = 120 << 20


def task():
    torch.set_num_threads(1)
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + LIMIT, resource.RLIM_INFINITY))
    inputs = torch.randn(8, 1024, generator=torch.Generator().manual_seed(1))
    return Task(
        model=lambda: nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(32)]),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        train_data=TensorDataset(inputs, inputs),
    )
"""
TOPOLOGY = """
[job]
task = "task.py:task"
steps = 2
checkpoint_every = 0
oversubscribe = true
[compute]
group_size = {rows}
batch_size = 4
grid = "{rows}x1"
[parallel]
verify = false
"""


def test_one_worker_cannot_hold_it(tmp_path: Path) -> None:
    with Launched(prepare(tmp_path, TASK, TOPOLOGY.format(rows=1)), "trial.toml") as launched:
        assert launched.end() != 0
    assert "allocate memory" in launched.error_text + "".join(launched.lines), launched


def test_four_workers_train_it(tmp_path: Path) -> None:
    with Launched(prepare(tmp_path, TASK, TOPOLOGY.format(rows=4)), "trial.toml") as launched:
        assert launched.end() == 0, launched
    assert launched.json("summary.json")["steps"] == 2
    assert (launched.run / "model.safetensors").stat().st_size > 32 * (4 << 20)
