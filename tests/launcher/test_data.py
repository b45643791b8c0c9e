"""Loader processes of real workers, and streams in real sessions: nothing hangs, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from tests.launcher.launched import Launched

TOPOLOGY = """
[job]
name = "trial"
task = "task.py:task"
steps = 12
checkpoint_every = 5
keep_checkpoints = 9
timeout = "20 s"
oversubscribe = true

[compute]
groups = 2
batch_size = 8
threads = 1

[exchange]
kind = "allreduce"
"""

TASK = """
import os, random, time
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info
from zmqtrain import Task

class Images(Dataset):
    def __init__(self, bad):
        self.bad = bad
    def __len__(self):
        return 48
    def __getitem__(self, index):
        if self.bad == "slow":
            info = get_worker_info()
            print("loads", os.getpid(), "for", os.getppid(), flush=True)
            time.sleep(0.2)
        if self.bad == "raises" and index == 30:
            raise ValueError("this image is broken")
        noise = torch.rand(6) + float(np.random.rand()) + random.random()
        return {"image": torch.full((6,), index / 48) + 0.1 * noise, "label": index % 3, "name": f"number {index}"}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    def forward(self, image):
        return self.layers(image)

def task(workers=0, bad=""):
    data = DataLoader(Images(bad), batch_size=8, shuffle=True, num_workers=workers)
    return Task(
        model=Net,
        forward=lambda model, batch: model(batch["image"]),
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch["label"]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train_data=data,
    )
"""

SCRIPT = """
import torch, zmqtrain
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

class Numbers(IterableDataset):
    def __init__(self, start=0, stop=27):
        self.start, self.stop = start, stop
    def __iter__(self):
        for number in range(self.start, self.stop):
            yield {"x": torch.full((2,), number / 27), "y": torch.tensor(number % 2)}

with zmqtrain.session() as session:
    model, optimizer = session.replicate(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1))
    def train(batches):
        seen = []
        for batch in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
            seen += (batch["x"][:, 0] * 27).round().int().tolist()
        return seen
    print("all", train(session.batches(Numbers())))
    part = lambda data, rank, world: Numbers(100 * rank, 100 * rank + 9 - 4 * rank)  # the second one's is shorter
    print("parts", train(session.batches(DataLoader(Numbers(), batch_size=4, num_workers=1), shard=part)))
    listed = [{"x": torch.full((2,), number / 27), "y": number % 2} for number in range(27)]
    print("listed", train(session.batches(DataLoader(listed, batch_size=6, num_workers=2))))
"""


def launch(folder: Path, *arguments: str) -> Launched:
    (folder / "trial.toml").write_text(TOPOLOGY)
    (folder / "task.py").write_text(TASK)
    (folder / "script.py").write_text(SCRIPT)
    return Launched(folder, "trial.toml", *arguments)


def losses(run: Path) -> dict[tuple[int, int], float]:
    """By rank and step."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {(event["rank"], event["step"]): event["values"]["loss"] for event in events if event["kind"] == "step"}


def test_results_do_not_depend_on_how_many_processes_load_and_a_run_is_resumed_to_the_bit(tmp_path: Path) -> None:
    found = []
    for name, arguments in (("none", ()), ("two", ("--set", "job.args.workers=2"))):
        folder = tmp_path / name
        folder.mkdir()
        with launch(folder, *arguments) as run:
            assert run.end() == 0, run
            found.append(losses(run.run))
            summary = run.json("summary.json")
            assert summary["data"]["source"] == "dataset"
            assert summary["data"]["order"] == "a new one each epoch, from the job's seed"
            assert summary["data_wait_s"]["median"] >= 0
    assert found[0] == found[1]
    assert len(found[0]) == 24
    folder = tmp_path / "again"
    folder.mkdir()
    checkpoint = tmp_path / "two" / "run" / "checkpoints" / "step-00000005"
    with launch(folder, "--set", "job.args.workers=1", "--resume", str(checkpoint)) as run:
        assert run.end() == 0, run
        again = losses(run.run)
    assert again == {key: loss for key, loss in found[0].items() if key[1] >= 5}


def test_what_a_loader_process_raises_is_shown_as_the_person_s_own(tmp_path: Path) -> None:
    with launch(tmp_path, "--set", "job.args.workers=2", "--set", "job.args.bad=raises") as run:
        assert run.end() == 3, run
        assert 'raise ValueError("this image is broken")' in run.error_text
        assert "zmqtrain/data" not in run.error_text
        error = run.json("error.json")
        assert (error["verdict"], error["exit_code"]) == ("user code", 3)
        assert "raised ValueError: this image is broken" in error["message"]


def test_a_killed_worker_leaves_no_loader_process(tmp_path: Path) -> None:
    with launch(tmp_path, "--set", "job.args.workers=2", "--set", "job.args.bad=slow") as run:
        found = run.wait_for(r"worker/0 \| loads (\d+) for (\d+)")[0]
        loaders = [psutil.Process(int(found[1]))]
        worker = psutil.Process(int(found[2]))
        loaders += worker.children()
        assert len(loaders) >= 2
        os.kill(worker.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(loaders, timeout=20)
        assert not alive
        assert run.end(killed=True) >= 128, run


def test_sessions_end_a_stream_together(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    trial = (
        TOPOLOGY.replace('task = "task.py:task"', "")
        .replace("checkpoint_every = 5\nkeep_checkpoints = 9", "")
        .replace("steps = 12", "")
    )
    (tmp_path / "trial.toml").write_text(trial.replace("batch_size = 8", "batch_size = 4"))
    with Launched(tmp_path, "trial.toml", "script.py") as run:
        assert run.end() == 0, run
        said: dict[str, list[Any]] = {}
        for rank in range(2):
            for line in (run.run / "logs" / f"worker-{rank}.log").read_text().splitlines():
                kind, _, values = line.partition(" ")
                said.setdefault(kind, []).append(json.loads(values))
    assert sorted(said["all"][0] + said["all"][1]) == list(range(24))
    assert said["parts"] == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert [len(values) for values in said["listed"]] == [12, 12]
    assert sorted(said["listed"][0] + said["listed"][1]) == list(range(24))
