"""``[job] preload`` in launches: what is imported once for all roles of a host, and what cannot be."""

from __future__ import annotations

from pathlib import Path

from tests.launcher.launched import Launched, prepare

TASK = """
import torch
import slow
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task():
    print("read by", slow.by)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return Task(
        model=lambda: nn.Linear(4, 2),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=TensorDataset(x, (x[:, 0] > 0).long()),
    )
"""
TOPOLOGY = """
[job]
task = "task.py"
steps = 2
oversubscribe = true
preload = ["slow"]
[[hosts]]
name = "here"
slots = 2
environment = { COLOUR = "red" }
[compute]
group_size = 2
batch_size = 4
threads = 3
"""
SLOW = """
import os
by = os.getpid(), os.environ["COLOUR"], os.environ["OMP_NUM_THREADS"], os.environ.get("RANK")
"""


def test_a_module_is_imported_once_for_all_workers_of_a_host(tmp_path: Path) -> None:
    prepare(tmp_path, TASK, TOPOLOGY)
    (tmp_path / "slow.py").write_text(SLOW)
    with Launched(tmp_path, "trial.toml") as run:
        assert run.end() == 0, run
        said = [(run.run / "logs" / f"worker-{rank}.log").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert "'red', '3', None)" in said[0]  # the host's variables, and none of a role's


def test_a_module_that_cannot_be_shared_ends_the_run_and_is_named(tmp_path: Path) -> None:
    prepare(tmp_path, TASK, TOPOLOGY)
    (tmp_path / "slow.py").write_text(
        SLOW + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with Launched(tmp_path, "trial.toml") as run:
        assert run.end() == 2, run
        error = run.json("error.json")
    assert error["verdict"] == "topology"
    assert "[job] preload: slow starts threads when it is imported" in error["message"]
    assert "agent/here" in error["message"] or error["peer"] == "agent/here"
