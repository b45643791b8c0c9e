"""What a person, or a stranger on the network, gets wrong: the message, the exit code, and that nobody else suffers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.launched import TOLD, Launched, told
from tests.patience import PATIENCE_S
from zmqtrain.net.address import split_address

TASKS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

def make(x, model=lambda: nn.Linear(4, 2)):
    return Task(model=model, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                train_data=TensorDataset(x, torch.zeros(len(x), dtype=torch.long)))

def raises():
    raise RuntimeError("a bug of my own")

def raises_later():
    def model():
        raise KeyError("layer7")
    return make(torch.zeros(64, 4), model)

def empty():
    return make(torch.zeros(64, 4), nn.ReLU)

def small():
    return make(torch.zeros(3, 4))

def bad_loss():
    x = torch.zeros(64, 4)
    x[40] = float("nan")
    return make(x)
"""

BAD_LOSS = """
[job]
task = "tasks.py:bad_loss"
oversubscribe = true
[data]
shuffle = "none"
[compute]
groups = 2
batch_size = 8
[exchange]
kind = "model_server"
staleness = "sync"
shards = 2
"""

HOLDS = """
import pathlib, time, zmqtrain
with zmqtrain.session() as session:
    print("ready")
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
        session.barrier()
"""


@pytest.mark.parametrize(
    ("task", "code", "words"),
    [
        ("raises", 3, ["RuntimeError: a bug of my own", "tasks.py", 'raise RuntimeError("a bug of my own")']),
        ("raises_later", 3, ["KeyError: 'layer7'", "in model"]),
        ("empty", 3, ["the model ReLU has no parameters"]),
        ("small", 2, ["3 samples", "more data"]),
        ("nothing", 3, ["nothing"]),
    ],
)
def test_a_task_that_is_wrong(task: str, code: int, words: list[str], tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "bad.toml").write_text(f'[job]\ntask = "tasks.py:{task}"\n[compute]\nbatch_size = 8\n')
    with Launched(tmp_path, "bad.toml") as run:
        found = run.end()
        if task == "nothing":  # seen before anything is started
            assert (found, (tmp_path / "run").exists()) == (2, False), run
        else:
            assert found == code, run
            error = run.json("error.json")
            assert (error["peer"], error["exit_code"]) == ("worker/0", code)
            assert run.json("summary.json")["status"] == "failed"
        for word in words:
            assert word in run.error_text
        assert "zmqtrain/launcher" not in run.error_text  # our own frames say nothing to a person


def test_a_loss_that_is_no_number_leaves_the_last_good_step(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "bad.toml").write_text(BAD_LOSS)
    with Launched(tmp_path, "bad.toml") as run:
        assert run.end() == 3, run
        assert "the loss is nan on rank 1 at step 2" in run.error_text
        assert "A checkpoint of step 2 was kept. Lower the learning rate" in run.error_text
        (kept,) = (run.run / "checkpoints").iterdir()
        assert kept.name == "step-00000002"
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "tasks.py").write_text(TASKS)
    (tmp_path / "again" / "bad.toml").write_text(BAD_LOSS)
    arguments = ("--resume", str(kept), "--set", "job.on_nan=continue", "bad.toml")
    with Launched(tmp_path / "again", *arguments) as run:
        assert run.end() == 0, run
        assert run.json("summary.json")["steps"] == 4


def test_strangers_on_the_ports_of_a_run(tmp_path: Path) -> None:
    """Garbage, other protocols and a wrong token, at the coordinator, the agent and the workers; the run does not notice."""
    chance = random.Random(3)
    (tmp_path / "hold.toml").write_text("[job]\noversubscribe = true\n[compute]\ngroup_size = 2\nbatch_size = 4\n")
    (tmp_path / "script.py").write_text(TOLD + HOLDS)
    with Launched(tmp_path, "hold.toml", "script.py") as run:
        run.wait_for("ready", times=2)
        coordinator, _ = told(run)
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        addresses = [coordinator, *(event["values"]["address"] for event in events if event["kind"] == "join")]
        assert len(addresses) == 4
        for address in addresses:
            for one in split_address(address):
                for junk in (chance.randbytes(3000), b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f"):
                    port = int(one.rpartition(":")[2])
                    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 5) as connection:
                        connection.sendall(junk)
        stranger = {"ZMQTRAIN_PEER": "agent/localhost", "ZMQTRAIN_COORDINATOR": coordinator, "ZMQTRAIN_TOKEN": "guessed"}
        command = [sys.executable, "-m", "zmqtrain", "agent"]
        refused = subprocess.run(
            command, env={**os.environ, **stranger}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert refused.returncode == 65, refused.stderr
        assert "coordinator has another run token" in refused.stderr
        assert "ZMQTRAIN_TOKEN" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert "guessed" not in refused.stderr
        (tmp_path / "go").touch()
        assert run.end() == 0, run
        assert run.json("summary.json")["status"] == "done"
