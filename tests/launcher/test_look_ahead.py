"""Once for real: asynchronous groups in processes look ahead, say so, and a resumed run goes on where it was ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launcher.launched import Launched
from zmqtrain.exchange.norm_limit import LIMIT
from zmqtrain.train.checkpoint.folder import find_checkpoints

TASK = """
import torch
from zmqtrain import Task

def task():
    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(5))
    return Task(
        model=lambda: torch.nn.Linear(5, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
        train_data=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
    )
"""
TOPOLOGY = """
[job]
name = "trial"
task = "given.py:task"
steps = {steps}
checkpoint_every = 10
oversubscribe = true

[compute]
groups = 3
batch_size = 8
threads = 1

[exchange]
kind = "model_server"
staleness = "async"
"""


def test_look_ahead_and_go_on(tmp_path: Path) -> None:
    checkpoint: Path | None = None
    for steps in (10, 20):
        folder = tmp_path / str(steps)
        folder.mkdir()
        (folder / "given.py").write_text(TASK)
        (folder / "trial.toml").write_text(TOPOLOGY.format(steps=steps))
        with Launched(folder, "trial.toml", *(("--resume", str(checkpoint)) if checkpoint else ())) as run:
            assert run.end() == 0, run
        summary = json.loads((folder / "run" / "summary.json").read_text())
        told = summary["momentum"]
        explicit = 0.9 ** (1 / 3)
        assert (told["target"], told["explicit"]) == (0.9, pytest.approx(explicit))
        assert told["look_ahead"] == {
            "updates": 3.5,
            "steps": pytest.approx(explicit * (1 - explicit**3.5) / (1 - explicit)),
            "lr_factor": pytest.approx((1 - explicit) / 0.1 / 3),
            "rise": 0.0,
            "norm_limit": LIMIT,
            "recovery": 3.0,
        }
        assert any("(up to 3 times that where steps are too small), gradients up to 1.2 times" in line for line in run.lines), run
        assert any("gradients up to 1.2 times their running mean; looked 3.5 updates ahead" in line for line in run.lines), run
        checkpoint = find_checkpoints(folder / "run" / "checkpoints")[-1]
        kept = load_file(next(checkpoint.glob("server-0*.safetensors")))
        values = [name for name in kept if name.endswith(".values")]
        assert values
        for name in values:
            ahead = kept[name.removesuffix("values") + "ahead"]
            assert ahead.shape == kept[name].shape
            assert ahead.abs().sum() > 0
        assert summary["steps"] == steps
