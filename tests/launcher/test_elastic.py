"""Real processes that train on without a worker that was killed, and with the one that comes in its place."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launched import Launched
from zmqtrain.cli.drain import run_drain
from zmqtrain.errors import UsageError

TASK = """
import os, torch
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task():
    print("ready", os.getpid())
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, 8, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return Task(
        model=lambda: torch.nn.Linear(8, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02),
        train_data=data,
        eval_data=data,
    )
"""
#: What `waiting` puts before the task. The loss of a process that comes after `kill` says that it trains.
LOSS = """
import time
from pathlib import Path

late = Path("started-test").exists()
Path(f"started-{{os.getpid()}}").touch()
calls = 0

def loss(output, target):
    global calls
    calls += 1
    if late:
        Path("trains").touch()
    end = time.monotonic() + 60
    while calls == 20 and len(list(Path().glob("started-*"))) <= {processes} and time.monotonic() < end:
        time.sleep(0.01)
    if {successor} and calls > 20 and not Path("trains").exists():
        time.sleep(0.1)
    return torch.nn.functional.mse_loss(output, target)

def task"""
STEPS = 80
TOPOLOGY = """
[job]
task = "task.py"
steps = {steps}
timeout = "60 s"
oversubscribe = true
elastic = true
restarts = {restarts}
[compute]
groups = 3
batch_size = 8
[exchange]
kind = "{kind}"
[observe]
events_per_s = "all"
"""


def waiting(processes: int, *, successor: bool = True) -> str:
    """The task, of which step 20 takes until `kill` is done, and so many processes have imported it. One that comes in place of
    another (``successor``) can join in the 60 steps that are left, which idle until it trains: six seconds, and little work."""
    loss = LOSS.format(processes=processes, successor=successor)
    return TASK.replace("torch.nn.functional.mse_loss", "loss").replace("\ndef task", loss, 1).replace("lr=0.02", "lr=0.1")


def kill(folder: Path, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    (folder / "started-test").touch()


def ends_without(run: Launched, folder: Path, peer: str, *, of: int) -> list[dict[str, Any]]:
    """One of so many workers is killed while they train, and nobody else is lost. Returns the run's events."""
    roles = run.wait_for(r"(worker/\d) \| ready (\d+)", of)
    run.wait_for(r"^step ")
    kill(folder, next(int(match[2]) for match in roles if match[1] == peer))
    assert run.end() == 0, run
    events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
    assert [event["values"]["peer"] for event in events if event["kind"] == "lost"] == [peer]
    return events


@pytest.mark.parametrize(("kind", "restarts"), [("gossip", 0), ("averaging", 1), ("allreduce", 1)])
def test_a_worker_is_killed(tmp_path: Path, kind: str, restarts: int) -> None:
    (tmp_path / "task.py").write_text(waiting(3 + restarts, successor=restarts > 0))
    topology = TOPOLOGY.format(kind=kind, restarts=restarts, steps=STEPS)
    if kind == "allreduce":
        topology = topology.replace("groups = 3", 'groups = 1\ngroup_size = 3\ngrid = "1x3"')
    (tmp_path / "trial.toml").write_text(topology)
    with Launched(tmp_path, "trial.toml") as run:
        events = ends_without(run, tmp_path, "worker/1", of=3)
        members = {event["rank"]: event["values"]["members"] for event in events if event["kind"] == "view"}
        assert members[0] == members[2] == ["worker/0", *(["worker/1"] if restarts else []), "worker/2"]
        for rank in (0, 2):
            assert [event["step"] for event in events if event["kind"] == "step" and event["rank"] == rank] == list(range(STEPS))
        assert run.json("summary.json")["eval"]["eval_loss"] < 1e-3
        assert any("worker/1" in line and "killed by SIGKILL" in line for line in run.lines), "the end says who was lost"


@pytest.mark.parametrize("method", ["outer", "gossip"])
def test_a_worker_of_a_pair_is_killed_where_each_pair_has_its_own_model(tmp_path: Path, method: str) -> None:
    """Other methods in simulated time: tests/simulate/test_elastic_averages.py."""
    (tmp_path / "task.py").write_text(waiting(5))
    kind = "gossip" if method == "gossip" else "averaging"
    topology = TOPOLOGY.format(kind=kind, restarts=1, steps=STEPS).replace("groups = 3", "groups = 2\ngroup_size = 2")
    if kind == "averaging":
        topology = topology.replace("[observe]", f'every = 4\naveraging = {{ method = "{method}" }}\n[observe]')
    (tmp_path / "trial.toml").write_text(topology)
    with Launched(tmp_path, "trial.toml") as run:
        events = ends_without(run, tmp_path, "worker/0", of=4)
        members = {event["rank"]: event["values"]["members"] for event in events if event["kind"] == "view"}
        assert all(members[rank] == [f"worker/{rank}" for rank in range(4)] for rank in (1, 2, 3))
        steps = [event for event in events if event["kind"] == "step"]
        samples = [event["values"]["samples"] for event in steps if event["rank"] == 1]
        assert (samples[0], samples[-1]) == (4, 4)
        assert 8 in samples, "alone it trains the whole batch"
        assert {event["values"]["samples"] for event in steps if event["rank"] in (2, 3)} == {4}
        for rank in (1, 2, 3):
            assert [event["step"] for event in steps if event["rank"] == rank] == list(range(STEPS))
        assert run.json("summary.json")["eval"]["eval_loss"] < 1e-3


def test_a_pair_is_killed_and_the_others_train_what_it_has_left(tmp_path: Path) -> None:
    """Each sample of the epoch counts once. More of it in simulated time: tests/simulate/test_turns_of_groups.py."""
    (tmp_path / "task.py").write_text(waiting(4, successor=False))
    topology = TOPOLOGY.format(kind="gossip", restarts=0, steps=STEPS).replace("groups = 3", "groups = 2\ngroup_size = 2")
    (tmp_path / "trial.toml").write_text(topology.replace(f"steps = {STEPS}", "epochs = 1"))
    with Launched(tmp_path, "trial.toml") as run:
        roles = run.wait_for(r"(worker/\d) \| ready (\d+)", 4)
        run.wait_for(r"^step ")
        for match in roles:
            if match[1] in ("worker/2", "worker/3"):
                kill(tmp_path, int(match[2]))
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        assert {event["values"]["peer"] for event in events if event["kind"] == "lost"} == {"worker/2", "worker/3"}
        for rank in (0, 1):
            steps = [event["step"] for event in events if event["kind"] == "step" and event["rank"] == rank]
            assert steps == list(range(len(steps)))
            assert len(steps) > 512 // 16, "more than there would have been"
        assert run.json("summary.json")["account"] == {"due": 512, "counted": 512, "repeated": 0, "lost": 0, "why": None}


KINDS = [("averaging", 'every = 4\naveraging = { method = "outer" }\n'), ("gossip", ""), ("model_server", 'staleness = "async"\n')]


@pytest.mark.parametrize(("kind", "more"), KINDS, ids=[kind for kind, _ in KINDS])
def test_a_group_on_a_grid_is_lost_and_comes_back_as_a_whole(kind: str, more: str, tmp_path: Path) -> None:
    """Each row with the state of that row; and each sample counts once. More of it in simulated time:
    tests/simulate/test_elastic_whole_groups.py, and with servers tests/simulate/test_elastic_served_grids.py."""
    (tmp_path / "task.py").write_text(
        waiting(6)
        .replace("torch.nn.Linear(8, 1)", "torch.nn.Linear(8, 2)")
        .replace("inputs.sum(1, keepdim=True)", "torch.stack([inputs.sum(1), inputs[:, 0]], 1)")
    )
    topology = TOPOLOGY.format(kind=kind, restarts=1, steps=STEPS)
    topology = topology.replace(f"steps = {STEPS}", "epochs = 3")
    topology = topology.replace("groups = 3", 'groups = 2\ngroup_size = 2\ngrid = "2x1"')
    topology = topology.replace("[observe]", f"{more}[parallel]\nverify = false\n[observe]")
    (tmp_path / "trial.toml").write_text(topology)
    with Launched(tmp_path, "trial.toml") as run:
        roles = run.wait_for(r"(worker/\d) \| ready (\d+)", 4)
        run.wait_for(r"^step ")
        kill(tmp_path, next(int(match[2]) for match in roles if match[1] == "worker/3"))
        assert run.end() == 0, run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        assert {event["values"]["peer"] for event in events if event["kind"] == "lost"} == {"worker/2", "worker/3"}
        members = {event["rank"]: event["values"]["members"] for event in events if event["kind"] == "view"}
        assert all(members[rank] == [f"worker/{rank}" for rank in range(4)] for rank in range(4))
        steps = [event for event in events if event["kind"] == "step"]
        last = max(event["step"] for event in steps)
        for rank in (0, 1):
            assert [event["step"] for event in steps if event["rank"] == rank][:last] == list(range(last))
        for rank in (2, 3):
            assert max(event["step"] for event in steps if event["rank"] == rank) >= last - 1
        assert run.json("summary.json")["account"] == {"due": 1536, "counted": 1536, "repeated": 0, "lost": 0, "why": None}
        assert run.json("summary.json")["eval"]["eval_loss"] < 1e-2
        assert any("worker/3" in line and "killed by SIGKILL" in line for line in run.lines), "the end says who was lost"


def test_servers_go_on_without_the_first_worker_and_with_its_successor(tmp_path: Path) -> None:
    """In step. The other kinds of servers are below, and in simulated time (tests/simulate/test_elastic_servers.py)."""
    (tmp_path / "task.py").write_text(waiting(4))
    topology = TOPOLOGY.format(restarts=1, steps=STEPS, kind="model_server")
    topology = topology.replace("restarts = 1", "restarts = 1\neval_every = 40")
    topology = topology.replace("[observe]", 'staleness = "sync"\n[observe]')
    (tmp_path / "trial.toml").write_text(topology)
    with Launched(tmp_path, "trial.toml") as run:
        events = ends_without(run, tmp_path, "worker/0", of=3)
        members = [event["values"]["members"] for event in events if event["kind"] == "view" and event["rank"] == 2]
        assert members[0] == ["worker/1", "worker/2"]
        assert members[-1] == ["worker/0", "worker/1", "worker/2"]
        for rank in (1, 2):
            trained = [event["step"] for event in events if event["kind"] == "step" and event["rank"] == rank]
            assert trained[:STEPS] == list(range(STEPS))
        summary = run.json("summary.json")
        assert summary["eval"]["eval_loss"] < 1e-3
        assert (run.run / "model.safetensors").exists()
        assert summary["checkpoints"]["newest"] in (STEPS, STEPS + 1)


def test_a_group_goes_on_without_one_of_its_workers_and_with_its_successor(tmp_path: Path) -> None:
    """Every sample of all epochs counts once. In step: tests/simulate/test_elastic_teams.py."""
    (tmp_path / "task.py").write_text(waiting(5))
    topology = TOPOLOGY.format(restarts=1, steps=STEPS, kind="model_server")
    topology = topology.replace(f"steps = {STEPS}", "epochs = 3\neval_every = 40")
    topology = topology.replace("groups = 3", "groups = 2\ngroup_size = 2")
    topology = topology.replace("[observe]", 'staleness = "async"\n[observe]')
    (tmp_path / "trial.toml").write_text(topology)
    with Launched(tmp_path, "trial.toml") as run:
        events = ends_without(run, tmp_path, "worker/0", of=4)
        views = [event["values"]["members"] for event in events if event["kind"] == "view" and event["rank"] == 1]
        assert views[0] == ["worker/1", "worker/2", "worker/3"]
        assert views[-1] == ["worker/0", "worker/1", "worker/2", "worker/3"]
        summary = run.json("summary.json")
        assert summary["eval"]["eval_loss"] < 1e-3
        account = summary["account"]
        assert (account["due"], account["counted"]) == (1536, 1536)
        assert (run.run / "model.safetensors").exists()


def test_merged_layers_are_trained_on_without_one_of_a_pair_and_with_its_successor(tmp_path: Path) -> None:
    """Every sample of all epochs counts once. The loss is computed by the FC server, which therefore waits at `waiting`'s step.

    Asynchronous ones: tests/simulate/test_elastic_merged.py."""
    task = waiting(6, successor=False).replace(
        "torch.nn.Linear(8, 1)", "torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))"
    )
    (tmp_path / "task.py").write_text(task)
    topology = TOPOLOGY.format(restarts=1, steps=STEPS, kind="model_server")
    topology = topology.replace(f"steps = {STEPS}", "epochs = 3\neval_every = 40\ncheckpoint_every = 40")
    topology = topology.replace("groups = 3", "groups = 2\ngroup_size = 2")
    topology = topology.replace("[observe]", 'staleness = "sync"\nmerged_fc = true\nsplit = "1"\n[observe]')
    (tmp_path / "trial.toml").write_text(topology)
    with Launched(tmp_path, "trial.toml") as run:
        events = ends_without(run, tmp_path, "worker/0", of=4)
        views = [event["values"]["members"] for event in events if event["kind"] == "view" and event["rank"] == 1]
        assert views[0] == ["worker/1", "worker/2", "worker/3"]
        account = run.json("summary.json")["account"]
        assert (account["due"], account["counted"]) == (1536, 1536)
        assert run.json("summary.json")["eval"]["eval_loss"] < 1e-2
        assert (run.run / "model.safetensors").exists()


#: What comes before the task: the first steps of all are quick. Then those who stay wait until the other has left, and that
#: one until it is asked to, and a while in each step that it makes nevertheless.
LEAVES = """
import time
from pathlib import Path

calls = 0

def loss(output, target):
    global calls
    calls += 1
    leaves = os.environ["ZMQTRAIN_PEER"] == "worker/1"
    end = time.monotonic() + 60
    while calls == 20 and not Path("run/requests" if leaves else "left").exists() and time.monotonic() < end:
        time.sleep(0.01)
    if leaves and calls > 20:
        time.sleep(0.2)
    return torch.nn.functional.mse_loss(output, target)

def task"""


def test_a_host_leaves_while_the_others_train_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = 80
    task = TASK.replace("torch.nn.functional.mse_loss", "loss").replace("\ndef task", LEAVES, 1)
    (tmp_path / "task.py").write_text(task.replace("lr=0.02", "lr=0.1"))
    hosts = '[[hosts]]\nname = "h[1-3]"\nslots = 1\n[exchange]'
    topology = TOPOLOGY.format(kind="gossip", restarts=1, steps=steps).replace("[exchange]", hosts)
    (tmp_path / "trial.toml").write_text(topology)
    with Launched(tmp_path, "trial.toml") as run:
        run.wait_for(r"^step ")
        with pytest.raises(UsageError, match="no host h4: it has h1, h2, h3"):
            run_drain(str(run.run), "h4")
        assert run_drain(str(run.run), "h2") == 0
        assert "h2 has left the run" in capsys.readouterr().out
        with pytest.raises(UsageError, match="h2 is not in the run"):
            run_drain(str(run.run), "h2")
        (tmp_path / "left").touch()
        assert run.end() == 0, run
        assert any("h2 is asked to leave: its worker ends" in line for line in run.lines), run
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        assert [event["values"]["peer"] for event in events if event["kind"] == "lost"] == ["worker/1"]
        for rank in (0, 2):
            assert [event["step"] for event in events if event["kind"] == "step" and event["rank"] == rank] == list(range(steps))
        assert run.json("summary.json")["eval"]["eval_loss"] < 1e-3
        assert not (run.run / "requests").exists()
        with pytest.raises(UsageError, match=r"has ended \(done\)"):
            run_drain(str(run.run), "h3")


def test_a_worker_that_fails_by_itself_is_heard_before_it_is_ended(tmp_path: Path) -> None:
    """Its connections end before its process does; the run is then as failed as without gossip, and says why."""
    failing = TASK.replace("torch.nn.functional.mse_loss", "loss") + (
        "\ncalls = 0\n\n"
        "def loss(output, target):\n"
        "    global calls\n"
        "    calls += 1\n"
        '    if calls == 5 and os.environ["ZMQTRAIN_PEER"] == "worker/1":\n'
        '        raise IndexError("it breaks here")\n'
        "    return torch.nn.functional.mse_loss(output, target)\n"
    )
    (tmp_path / "task.py").write_text(failing)
    (tmp_path / "trial.toml").write_text(TOPOLOGY.format(kind="gossip", restarts=0, steps=2000))
    with Launched(tmp_path, "trial.toml") as run:
        assert run.end() == 3, run
        error = run.json("error.json")
        assert error["peer"] == "worker/1"
        assert "it breaks here" in error["message"]
        assert error["verdict"] == "user code"
