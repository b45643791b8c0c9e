"""Machines whose copies of a task differ do not train something else unnoticed."""

from __future__ import annotations

from pathlib import Path

from tests.launcher.launched import Launched

TASK = """
import os
import helper
import torch
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task():
    inputs = torch.ones(32, 4)
    return Task(model=lambda: torch.nn.Linear(4, 1), loss=torch.nn.functional.mse_loss,
                optimizer=lambda p: torch.optim.SGD(p, lr=helper.LR), train_data=TensorDataset(inputs, inputs[:, :1]))
"""
FILE = """
[job]
task = "task.py"
steps = 2
[[hosts]]
name = "one"
slots = 1
environment = {{ PYTHONPATH = "{folder}/one" }}
[[hosts]]
name = "other"
slots = 1
environment = {{ PYTHONPATH = "{folder}/other" }}
[compute]
batch_size = 4
"""


def launch(folder: Path, *helpers: str) -> Launched:
    """``helpers``: what the two hosts have of a module."""
    for name, text in zip(("one", "other"), helpers, strict=True):
        (folder / name).mkdir()
        (folder / name / "helper.py").write_text(text)
    (folder / "task.py").write_text(TASK)
    (folder / "job.toml").write_text(FILE.format(folder=folder))
    return Launched(folder, "job.toml")


def test_another_learning_rate_ends_the_run(tmp_path: Path) -> None:
    with launch(tmp_path, "LR = 0.1\n", "LR = 0.3\n") as run:
        assert run.end() == 3, run
    assert "the optimizer of worker/" in run.error_text
    assert "'group 0: lr = 0.1'" in run.error_text
    assert "'group 0: lr = 0.3'" in run.error_text


def test_a_file_that_differs_is_warned_of(tmp_path: Path) -> None:
    with launch(tmp_path, "LR = 0.1\n", "LR = 0.1  # as before\n") as run:
        assert run.end() == 0, run
        said = [line for line in run.lines if "helper.py (module helper)" in line]
        assert len(said) == 1, run
        assert "they may train something else" in said[0]
