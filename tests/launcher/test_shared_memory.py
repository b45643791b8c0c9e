"""Workers of one host add up their gradients in memory: the same numbers as over the network, and nothing left of it afterwards."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.launcher.launched import Launched
from tests.launcher.test_elastic import TASK
from zmqtrain.arena import shared_memory_missing

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))

TOPOLOGY = """
[job]
task = "task.py"
epochs = 2
timeout = "20 s"
[[hosts]]
name = "h[1-2]"
slots = 2
[compute]
groups = 2
group_size = 2
batch_size = 16
bucket_size = 1000
[exchange]
kind = "allreduce"
[network]
bandwidth = "1 Gbit/s"
"""


def launch(folder: Path, *options: str) -> list[tuple[int, int, float]]:
    """Step, rank and loss of every step."""
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "trial.toml").write_text(TOPOLOGY)
    with Launched(folder, "trial.toml", "--emulate", *options) as run:
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
    return sorted((event["step"], event["rank"], event["values"]["loss"]) for event in events if event["kind"] == "step")


def test_sums_in_memory_are_sums_over_the_network(tmp_path: Path) -> None:
    """Two hosts of two workers: within hosts in memory, between them slice by slice."""
    shared, network = (launch(tmp_path / value, "--set", f"compute.shared_memory={value}") for value in ("true", "false"))
    assert [row[:2] for row in shared] == [row[:2] for row in network]
    for (_, _, one), (_, _, other) in zip(shared, network, strict=True):
        assert one == pytest.approx(other, rel=1e-5)  # sums of four, in another order perhaps


SESSION = """
import os, torch, zmqtrain
torch.manual_seed(0)
with zmqtrain.session() as session:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.replicate(model, optimizer)
    generator = torch.Generator().manual_seed(session.rank)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    print("parameters", [round(float(value), 6) for p in model.parameters() for value in p.flatten()], flush=True)
"""


def test_a_loop_of_ones_own_gets_them_as_well(tmp_path: Path) -> None:
    """Its optimizer runs when it says so, on gradients of its own."""
    (tmp_path / "script.py").write_text(SESSION)
    found = []
    for value in ("true", "false"):
        file = f'[job]\noversubscribe = true\n[compute]\ngroups = 3\nshared_memory = {value}\n[exchange]\nkind = "allreduce"\n'
        (tmp_path / "trial.toml").write_text(file + "[optimizer]\nclip_norm = 0.5\n")
        with Launched(tmp_path, "trial.toml", "script.py") as run:
            assert run.end() == 0, run
            found += [line.partition("parameters ")[2] for line in run.lines if "parameters [" in line]
        for path in sorted(run.run.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        run.run.rmdir()
    assert len(found) == 6
    assert len(set(found)) == 1


WAITING = """
import os, pathlib, time, torch
from zmqtrain import Task

class Data(torch.utils.data.Dataset):
    def __len__(self): return 10_000
    def __getitem__(self, index): return torch.ones(4), torch.ones(2)

def loss(output, target):
    print("rank", os.environ["RANK"], "is process", os.getpid(), flush=True)
    time.sleep(0.02)
    return (output - target).square().mean()

def task():
    return Task(model=lambda: torch.nn.Linear(4, 2), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.001), train_data=Data())
"""


@pytest.mark.parametrize(("number", "told"), [(signal.SIGKILL, "was killed"), (signal.SIGSTOP, "stands still")])
def test_a_worker_that_is_killed_or_stands_still_ends_the_run_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, told: str
) -> None:
    (tmp_path / "task.py").write_text(WAITING)
    file = '[job]\ntask = "task.py"\ntimeout = "20 s"\noversubscribe = true\n[compute]\ngroups = 3\nbatch_size = 4\n'
    (tmp_path / "trial.toml").write_text(file + '[exchange]\nkind = "allreduce"\n')
    with Launched(tmp_path, "trial.toml") as run:
        run.wait_for("have joined")
        killed = int(run.wait_for(r"rank 1 is process (\d+)", times=3)[0][1])
        assert regions() >= 4  # the agent and its workers
        os.kill(killed, number)
        assert run.end() >= 128, run  # nothing of it is left, says end()
        assert "worker/1" in run.error_text
        assert told in run.error_text


def regions() -> int:
    """How many processes have mapped a region of ours."""
    found = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                found += "/memfd:zmqtrain" in (folder / "maps").read_text()
            except OSError:  # it has ended
                continue
    return found
