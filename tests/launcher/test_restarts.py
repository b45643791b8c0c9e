"""A run that cannot go on without a process, in processes: it begins again from its newest checkpoint."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.launcher.launched import Launched, prepare

TASK = """
import os, signal
from pathlib import Path
import torch
from zmqtrain import Task

x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8).double(), torch.nn.Linear(8, 3).double()
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        if Path("kills").exists() and self.steps == 12 and os.environ.get("ZMQTRAIN_PEER") == "worker/1":
            Path("kills").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.second(torch.relu(self.first(x)))

def task():
    return Task(
        model=Model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train_data=torch.utils.data.TensorDataset(x, torch.arange(64) % 3),
    )
"""
TOPOLOGY = """
[job]
task = "task.py"
epochs = 3
checkpoint_every = 4
timeout = "60 s"
oversubscribe = true
restarts = 1
[compute]
groups = 1
group_size = 2
grid = "2x1"
batch_size = 8
[parallel]
verify = false
"""


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "model.safetensors")


def test_a_grid_of_which_a_worker_is_killed(tmp_path: Path) -> None:
    whole, again = (prepare(tmp_path / name, TASK, TOPOLOGY) for name in ("whole", "again"))
    (again / "kills").touch()
    with Launched(whole, "trial.toml") as run:
        assert run.end() == 0, run
    with Launched(again, "trial.toml") as run:
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        (restart,) = [event for event in events if event["kind"] == "restart"]
        assert restart["step"] in (4, 8), "its newest checkpoint"
        assert "worker/1" in restart["values"]["reason"]
        assert any("killed by SIGKILL" in line for line in run.lines)
        assert any(f"begins again from the checkpoint of step {restart['step']} (restart 1 of 1)" in line for line in run.lines)
        summary = run.json("summary.json")
        assert (summary["status"], summary["restarts"], summary["steps"]) == ("done", 1, 24)
        assert summary["account"] == {"due": 192, "counted": 192, "repeated": 0, "lost": 0, "why": None}
        assert not (run.run / "error.json").exists()
    mine, theirs = trained(again), trained(whole)
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
