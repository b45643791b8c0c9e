"""Real launches in a real Slurm: in an allocation, submitted, preempted and requeued, cancelled, and without their launcher."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.launcher.launched import Launched
from tests.launcher.ready import completed as zmqtrain
from tests.launcher.ready import warm
from tests.launcher.slurm.cluster import Cluster, cluster
from tests.launcher.test_preempted import TASK
from tests.patience import PATIENCE_S
from zmqtrain.launcher.forkserver import ADOPTED
from zmqtrain.run.preemption import PREEMPTED

TOPOLOGY = """
[job]
name = "trial"
task = "task.py"
steps = {steps}
checkpoint_every = 80
timeout = "20 s"

[compute]
groups = 2
batch_size = 8
threads = 1

[exchange]
staleness = "sync"

[engine]
kind = "slurm"
slurm = {{ nodes = 2, cpus = 1 }}

[observe]
events_per_s = "all"
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def warmed() -> Iterator[str]:
    """Where agents find fork servers, in tests in which Slurm need not reach what they have started."""
    with warm() as started:
        yield started.variables[ADOPTED]


@pytest.fixture(autouse=True)
def _finds_slurm(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.configuration))


def prepare(folder: Path, steps: int = 80) -> Path:
    (folder / "task.py").write_text(TASK)
    (folder / "trial.toml").write_text(TOPOLOGY.format(steps=steps))
    return folder


@contextmanager
def allocation(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both nodes, and an environment as in a shell of ``salloc``. Gives the job."""
    said = slurm.command("salloc", "--no-shell", "--nodes=2", "--job-name=held").stderr
    job = said.rpartition(" ")[2].strip()
    assert job.isdecimal(), said
    try:
        for name, value in (("JOB_ID", job), ("JOB_NODELIST", "n[1-2]"), ("JOB_CPUS_PER_NODE", "1(x2)"), ("NTASKS", "2")):
            monkeypatch.setenv(f"SLURM_{name}", value)
        yield job
    finally:
        slurm.command("scancel", job)


def events(run: Path) -> list[dict[str, object]]:
    text = (run / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def until_steps(run: Path, beyond: int = 0) -> None:
    """Wait until a step after so many is done."""
    end = time.monotonic() + PATIENCE_S
    while not any(event["kind"] == "step" and int(str(event["step"])) >= beyond for event in events(run)):
        assert time.monotonic() < end, (run / "slurm.out").read_text() if (run / "slurm.out").exists() else "no step"
        time.sleep(0.1)


def test_the_nodes_of_an_allocation_are_the_hosts(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmed: str
) -> None:
    """And what is submitted, preempted and requeued ends with the same weights."""
    (tmp_path / "straight").mkdir()
    (tmp_path / "submitted").mkdir()
    folder = prepare(tmp_path / "straight")
    monkeypatch.setenv(ADOPTED, warmed)
    with allocation(slurm, monkeypatch), Launched(folder, "trial.toml") as run:
        run.wait_for("^step ")
        there = slurm.processes()
        agents = [process for process in there if "zmqtrain agent" in " ".join(process.cmdline())]
        assert len(agents) == 2
        token = agents[0].environ()["ZMQTRAIN_TOKEN"]
        told = slurm.command("scontrol", "show", "step").stdout + slurm.command("scontrol", "show", "job").stdout
        assert "zmqtrain" in told
        assert token not in told
        assert not any(token in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
        assert run.end() == 0, run
        assert run.json("summary.json")["hosts"] == ["n1", "n2"]
        assert (run.run / "logs" / "worker-1.log").read_text().startswith("ready")
        assert not slurm.left()
        kept = run.run / "checkpoints" / "step-00000080" / "model.safetensors"

    folder = prepare(tmp_path / "submitted")
    for name in (ADOPTED, *(f"SLURM_{each}" for each in ("JOB_ID", "JOB_NODELIST", "JOB_CPUS_PER_NODE", "NTASKS"))):
        monkeypatch.delenv(name)
    submitted = zmqtrain(folder, "launch", "--json", "--submit", "trial.toml")
    assert submitted.returncode == 0, submitted
    answer = json.loads(submitted.stdout)
    job, again = answer["job"], folder / answer["run"]
    until_steps(again)
    slurm.command("scancel", "--signal=USR1", job)  # to the steps: agents, and with this Slurm all that they have started
    slurm.until_job(job, "PENDING", "COMPLETED")
    summary = json.loads((again / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("preempted", PREEMPTED), (again / "slurm.out").read_text()
    assert 0 < summary["steps"] < 80
    assert not slurm.left()
    assert "pending" in zmqtrain(folder, "status", str(again)).stdout
    slurm.command(
        "scontrol", "update", f"JobId={job}", "StartTime=now+2"
    )  # by itself after minutes; its old credentials are void from the next second
    ended = slurm.until_job(job, "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), (ended, (again / "slurm.out").read_text())
    assert json.loads((again / "summary.json").read_text())["status"] == "done"
    assert (again / "checkpoints" / "step-00000080" / "model.safetensors").read_bytes() == kept.read_bytes()


def test_a_run_that_is_stopped_keeps_a_checkpoint_and_is_not_requeued(slurm: Cluster, tmp_path: Path) -> None:
    """``zmqtrain stop`` cancels the job: Slurm sends SIGTERM to all, and some seconds later kills."""
    folder = prepare(tmp_path, steps=100_000)
    submitted = zmqtrain(folder, "launch", "--json", "--submit", "--run-dir=run", "trial.toml")
    job, run = json.loads(submitted.stdout)["job"], folder / "run"
    until_steps(run)
    stopped = zmqtrain(folder, "stop", "run")
    assert stopped.returncode == 0, stopped
    assert slurm.job(job)["JobState"] == "CANCELLED"
    assert not slurm.left()
    assert json.loads((run / "summary.json").read_text())["status"] == "preempted", (run / "slurm.out").read_text()
    assert len(list((run / "checkpoints").iterdir())) >= 1


def test_nothing_outlives_a_launcher_that_was_killed(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmed: str
) -> None:
    folder = prepare(tmp_path, steps=100_000)
    monkeypatch.setenv(ADOPTED, warmed)
    with allocation(slurm, monkeypatch), Launched(folder, "trial.toml") as run:
        run.wait_for("^step ")
        assert slurm.processes()
        os.kill(run.pid, signal.SIGKILL)
        assert run.end() == -signal.SIGKILL
        assert not slurm.left()


def test_a_node_without_python_starts_nothing(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that are named otherwise than nodes are those in order."""
    prepare(tmp_path)
    hosts = '[[hosts]]\nname = "alpha"\n[[hosts]]\nname = "beta"\npython = "/nowhere/python"\n'
    with (tmp_path / "trial.toml").open("a") as file:
        file.write(hosts)
    with allocation(slurm, monkeypatch):
        refused = zmqtrain(tmp_path, "launch", "trial.toml")
    assert refused.returncode == 2, refused
    assert "alpha is n1, beta is n2" in refused.stdout
    assert "1 of 2 hosts cannot take part" in refused.stderr
    assert "beta  there is no Python at /nowhere/python" in refused.stderr
    assert not slurm.left()
