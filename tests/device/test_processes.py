"""What a person starts: launches whose workers are processes that compute on a GPU, two of them on the same one.

Without a GPU, ``ZMQTRAIN_TEST_DEVICE=cpu`` shows that these tests themselves are right.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launched import Launched
from tests.launcher.test_grid import PLAN, TASK
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parent.parent.parent

TOPOLOGY = """
[job]
task = "task.py"
steps = 8
oversubscribe = true
timeout = "60 s"
[[hosts]]
name = "localhost"
slots = {workers}
devices = [{devices}]
[compute]
group_size = {workers}
batch_size = 24
grid = "{grid}"
[parallel]
statistics = "whole"
{plan}
[exchange]
kind = "{exchange}"
"""


def losses(folder: Path, device: str, grid: str, exchange: str = "allreduce", plan: str = "") -> list[float]:
    """Of each step, by the whole group; then that of the evaluation."""
    folder.mkdir()
    rows, columns = map(int, grid.split("x"))
    workers = rows * columns
    devices = ", ".join([f'"{device}"'] * workers)
    (folder / "task.py").write_text(TASK)
    (folder / "trial.toml").write_text(TOPOLOGY.format(workers=workers, devices=devices, grid=grid, plan=plan, exchange=exchange))
    with Launched(folder, "trial.toml") as run:
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
    started = [event["values"] for event in events if event["kind"] == "start"]
    assert {each["device"] for each in started} == {device}
    means: dict[int, list[float]] = {}
    for event in events:
        if event["kind"] == "step" and event["rank"] < columns:
            means.setdefault(event["step"], []).append(event["values"]["loss"])
    (evaluation,) = [event["values"] for event in events if event["kind"] == "eval"]
    return [*(sum(means[step]) / columns for step in sorted(means)), evaluation["eval_loss"]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of one process on the CPU."""
    return losses(tmp_path_factory.mktemp("cpu") / "run", "cpu", "1x1")


@pytest.mark.parametrize(
    ("grid", "exchange", "plan"),
    [("1x1", "allreduce", ""), ("1x2", "allreduce", ""), ("1x2", "model_server", ""), ("2x2", "allreduce", PLAN)],
    ids=["alone", "summed in the host's memory", "servers", "divided"],
)
def test_workers_that_share_a_card(grid: str, exchange: str, plan: str, kind: str, expected: list[float], tmp_path: Path) -> None:
    place = "cpu" if kind == "cpu" else f"{kind}:0"
    # Statistics of batch norm are those of a worker's own samples where nothing is divided.
    found = losses(tmp_path / "run", place, grid, exchange, plan)
    if plan or grid == "1x1":
        assert found == pytest.approx(expected, rel=1e-6)
    else:
        assert found == pytest.approx(losses(tmp_path / "plain", "cpu", grid, exchange), rel=1e-6)


def test_the_demo(kind: str, tmp_path: Path) -> None:
    if find_spec("sklearn") is None:
        pytest.skip("scikit-learn, which has the digits, is not installed")
    options = ["--set", f"compute.device={kind}", "--set", "job.epochs=10", "--set", f"job.task={ROOT}/examples/digits.py:task"]
    with Launched(tmp_path, *options, str(ROOT / "launch" / "digits.toml")) as run:
        assert run.end() == 0, run
        assert run.json("summary.json")["eval"]["eval_accuracy"] > 0.8


#: Two ranks on one card with DistributedDataParallel over zmq; or one rank with a backend for each kind of device.
PROGRAM = """
import os, sys, torch, zmqtrain.c10d
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
backend, place = sys.argv[1:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device(place, 0) if place != "cpu" else torch.device("cpu")
dist.init_process_group(backend, store=dist.FileStore(os.environ["STORE"], size), rank=rank, world_size=size)
here, there = torch.full((3,), rank + 1.0), torch.full((3,), rank + 1.0, device=device)
dist.all_reduce(here)
dist.all_reduce(there)
assert here.tolist() == there.tolist() == [sum(range(1, size + 1))] * 3
torch.manual_seed(0)
model = torch.nn.Linear(4, 3).to(device)
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(6 * size, 4, generator=torch.Generator().manual_seed(step))
    loss = replica(x[rank::size].to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(" ".join(f"{value:.4f}" for value in model.weight.detach().cpu().flatten().tolist()), flush=True)
dist.destroy_process_group()
"""


def ranks(folder: Path, backend: str, place: str, size: int) -> set[str]:
    """What they print."""
    folder.mkdir()
    environment: dict[str, Any] = {**os.environ, "STORE": str(folder / "store"), "WORLD_SIZE": str(size), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, backend, place],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=PATIENCE_S) for process in processes]
    assert all(process.returncode == 0 for process in processes), [errors for _, errors in said]
    return {output for output, _ in said}


def test_distributed_data_parallel_on_one_card(kind: str, tmp_path: Path) -> None:
    (found,) = ranks(tmp_path / "here", "zmq", kind, 2)
    (due,) = ranks(tmp_path / "cpu", "gloo", "cpu", 2)
    for one, other in zip(found.split(), due.split(), strict=True):
        assert float(one) == pytest.approx(float(other), abs=2e-4)


def test_nccl_for_the_gpu_and_zmq_for_the_cpu(kind: str, tmp_path: Path) -> None:
    if kind != "cuda":
        pytest.skip("NCCL needs a CUDA device")
    (found,) = ranks(tmp_path / "here", "cpu:zmq,cuda:nccl", kind, 1)
    assert found
