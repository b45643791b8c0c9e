"""The command: what it says, with which exit code, and without starting anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from zmqtrain.cli.main import main
from zmqtrain.cli.overrides import load_with
from zmqtrain.errors import TopologyError, UsageError
from zmqtrain.observe.run_directory import RunDirectory

TOPOLOGY = """
[job]
task = "task.py:task"
epochs = 3

[compute]
batch_size = 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(TOPOLOGY)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of ``zmqtrain ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["zmqtrain", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_help_names_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--help") == 0
    said = capsys.readouterr().out
    for command in ("launch", "simulate", "check", "schema", "status", "stop", "logs", "agent", "version"):
        assert command in said
    assert call(monkeypatch, "launch", "--help") == 0
    assert "--resume" in capsys.readouterr().out


def test_commands_that_are_not_shown_are_not_suggested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "lanch") == 2
    said = capsys.readouterr().err
    assert "'launch'" in said
    assert "'bench'" not in said
    assert call(monkeypatch, "bench") == 2
    assert "python -m benchmarks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "missing.toml"], ["missing.toml", "does not exist"]),
        (["launch", "bad.toml"], ["bad.toml:3", "stepz", "steps"]),
        (["launch", "crowded.toml"], ["slots", "oversubscribe"]),
        (["launch", "job.toml", "script.py"], ["task", "script.py"]),
        (["launch", "job.toml"], ["task.py", "no file"]),
        (["launch", "notask.toml"], ["[job]", "script"]),
        (["launch", "notask.toml", "job.toml"], ["job.toml", "one file at a time"]),
        (["launch", "job.toml", "--set", "nonsense"], ["--set", "section.key=value"]),
        (["launch", "job.toml", "--set", "compute.batch_size=many"], ["batch_size", "many"]),
        (["launch", "job.toml", "--set", "job.task=there.py:tusk"], ["there.py", "did you mean 'task'"]),
        (["launch", "job.toml", "--set", "job.task=there.py", "--resume", "latest"], ["--resume"]),
        (["launch", "--resume", "latest", "notask.toml", "there.py"], ["--resume", "a script writes its own checkpoints"]),
        (["launch", "--set", "job.checkpoint_every=5", "notask.toml", "there.py"], ["checkpoint_every", "a script writes its own"]),
        (
            ["launch", "--set", "job.checkpoint_every=1 h", "notask.toml", "there.py"],
            ["checkpoint_every", "a script writes its own"],
        ),
        (["launch", "--set", "job.steps=5", "notask.toml", "there.py"], ["[job] steps is for tasks"]),
        (["launch", "--set", "job.epochs=2", "notask.toml", "there.py"], ["[job] epochs is for tasks"]),
        (["launch", "--set", "job.eval_every=2", "notask.toml", "there.py"], ["[job] eval_every is for tasks"]),
        (["launch", "--set", "job.weights=there.py", "notask.toml", "there.py"], ["weights", "session.replicate()"]),
        (["bench", "net", "--json"], ["python -m benchmarks NAME"]),
        (["status", "nothing-001"], ["nothing-001"]),
        (["stop", "nothing-001"], ["nothing-001"]),
        (["logs", "nothing-001"], ["nothing-001"]),
        (["agent"], ["ZMQTRAIN_COORDINATOR", "MASTER_ADDR"]),
        (["nonsense"], ["nonsense"]),
        (["launch", "there.py:task"], ["does not exist", 'with task = "there.py:task" in its [job]']),
        (["launch"], ["FILE"]),
    ],
)
def test_what_cannot_be_is_said_in_words(
    arguments: list[str], words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.toml").write_text('[job]\ntask = "task.py:task"\nstepz = 3\n')
    (folder / "crowded.toml").write_text('[job]\ntask = "task.py"\n[[hosts]]\nname = "a"\nslots = 2\n[compute]\ngroups = 3\n')
    (folder / "there.py").write_text("def task(): ...")
    (folder / "notask.toml").write_text("[job]\nepochs = 1\n")
    for name in ("ZMQTRAIN_PEER", "ZMQTRAIN_COORDINATOR", "ZMQTRAIN_TOKEN", "MASTER_ADDR", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    assert call(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    for word in words:
        assert word in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert not (folder / "runs").exists()


def test_version_and_schema(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "version") == 0
    assert capsys.readouterr().out.startswith("zmqtrain ")
    assert call(monkeypatch, "schema") == 0
    assert "properties" in json.loads(capsys.readouterr().out)


def test_values_on_the_command_line_go_before_the_file(folder: Path) -> None:
    settings = ["compute.batch_size=16", "job.name=other", "job.args.lr=0.5", "job.oversubscribe=true", "compute.groups=8"]
    topology = load_with(folder / "job.toml", settings)
    assert topology.compute.batch_size == 16
    assert topology.job.name == "other"
    assert topology.job.args == {"lr": 0.5}
    assert topology.job.epochs == 3
    shorter = load_with(folder / "job.toml", ["job.steps=7"])
    assert (shorter.job.steps, shorter.job.epochs) == (7, None)
    assert load_with(folder / "job.toml", []).job.name == "job"
    with pytest.raises(TopologyError, match="grups"):
        load_with(folder / "job.toml", ["compute.grups=2"])
    with pytest.raises(UsageError, match="not a table"):
        load_with(folder / "job.toml", ["job.task.deeper=2"])


@pytest.mark.parametrize("text", ["123", "true", "2024-01-01", "1e5", "0x10"])
def test_what_looks_like_a_number_is_text_where_a_key_takes_text(folder: Path, text: str) -> None:
    assert (
        load_with(folder / "job.toml", [f"job.name={text}", "job.seed=0x10"]).job
        == load_with(folder / "job.toml", [f'job.name="{text}"', "job.seed=16"]).job
    )
    with pytest.raises(TopologyError, match='"0x2": is not a grid'):
        load_with(folder / "job.toml", [f"job.name={text}", "compute.grid=0x2"])


def test_hosts_on_the_command_line(folder: Path) -> None:
    path = folder / "hosts.toml"
    path.write_text('[job]\n[[hosts]]\nname = "a"\nslots = 1\n[[hosts]]\nname = "b"\nslots = 1\n')
    assert [host.slots for host in load_with(path, ["hosts.1.slots=3"]).hosts] == [1, 3]
    with pytest.raises(TopologyError, match=r"\n  --set hosts.1.slots=-3: hosts\[1\].slots = -3: must be greater"):
        load_with(path, ["hosts.1.slots=-3"])
    with pytest.raises(UsageError, match="not a table"):
        load_with(path, ["hosts.2.slots=3"])


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["compute.device=gpu"], '--set compute.device=gpu: compute.device = "gpu": must be one of auto, cpu, cuda'),
        (["job.steps=3", "compute.grups=2"], "--set compute.grups=2: compute.grups: unknown key"),
        (["nosuch.key=2"], "--set nosuch.key=2: nosuch: unknown key"),
        (["job.steps=0", "job.steps=-1"], "--set job.steps=-1: job.steps = -1: must be"),
        (["job.until={}"], "--set job.until={}: job.until.metric: is missing"),
        (["exchange.kind=gossip"], "sharded.toml:4: exchange.shards = 2: shards is for model servers"),
    ],
)  # fmt: skip
def test_a_fault_quotes_the_setting_that_it_is_about(folder: Path, settings: list[str], fault: str) -> None:
    path = folder / "sharded.toml"
    path.write_text("[job]\n\n[exchange]\nshards = 2\n[compute]\ngroups = 2\n")
    with pytest.raises(TopologyError) as caught:
        load_with(path, settings)
    lines = [line.strip().removeprefix(f"{folder}/") for line in str(caught.value).splitlines()[1:]]
    assert any(line.startswith(fault) for line in lines), lines
    assert ('did you mean "cuda"?' in lines[0]) is ("device" in settings[0])
    if "gossip" in settings[0]:
        assert lines[0].endswith("(with --set exchange.kind=gossip)")


def make_run(folder: Path, *, pid: str | None = None) -> RunDirectory:
    run = RunDirectory.create("job", parent=folder / "runs")
    run.write("topology.toml", TOPOLOGY)
    run.event({"kind": "step", "step": 4, "values": {"loss": 0.25}})
    run.log("worker/0", "hello\n")
    run.log("server/1", "world\n")
    if pid is not None:
        run.write("pid", pid)
    run.flush()
    return run


def test_a_run_that_is_done(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(folder)
    done = {"status": "done", "steps": 5, "samples": 40, "seconds": 1.5, "eval": {"eval_accuracy": 0.9}}
    run.write_json("summary.json", done)
    run.close()
    assert call(monkeypatch, "status", "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert {key: status[key] for key in done} == done
    assert call(monkeypatch, "status", "job-001") == 0
    assert capsys.readouterr().out == "runs/job-001  done  5 steps  40 samples  1.5 s  eval_accuracy 0.9\n"
    assert call(monkeypatch, "logs", "job-001") == 0
    assert capsys.readouterr().out.splitlines() == ["server-1 | world", "worker-0 | hello"]
    assert call(monkeypatch, "logs", "job-001", "worker/0") == 0
    assert capsys.readouterr().out == "hello\n"
    assert call(monkeypatch, "logs", "job-001", "worker/7") == 2
    assert call(monkeypatch, "stop", "job-001") == 2
    assert "is not running" in capsys.readouterr().err
    assert call(monkeypatch, "drain", "job-001", "alpha") == 2
    assert "job-001 has ended (done)" in capsys.readouterr().err


def test_a_folder_that_was_deleted_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert call(monkeypatch, "runs") == 2
    assert "the current folder does not exist any more" in capsys.readouterr().err


def test_a_run_whose_launcher_was_killed_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number may be another process's by now: this one's, here."""
    make_run(folder, pid=f"{os.getpid()} 12345.0\n").close()
    assert call(monkeypatch, "status", "latest", "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["status"], status["steps"], status["loss"]) == ("lost", 5, 0.25)


def test_a_run_is_stopped_as_by_ctrl_c(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Its own handler, as a launcher has: these tests themselves may run where SIGINT is ignored (in a script's background).
    code = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        make_run(folder, pid=f"{other.pid} {psutil.Process(other.pid).create_time()}\n").close()
        assert call(monkeypatch, "status", "--json") == 0
        assert json.loads(capsys.readouterr().out)["status"] == "running"
        assert call(monkeypatch, "stop", "latest") == 0
        assert other.poll() is not None  # its code went to whoever waited first


def test_the_runs_of_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "runs") == 2
    assert "there is no folder" in capsys.readouterr().err
    first = make_run(folder)
    first.write_json("summary.json", {"status": "done", "steps": 5, "samples": 40, "seconds": 1.5, "eval": {"eval_accuracy": 0.9}})
    first.close()
    make_run(folder).close()
    os.utime(first.path / "topology.toml", (1, 1))
    assert call(monkeypatch, "runs") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["run", "job-001", "job-002"]
    assert "eval_accuracy 0.9" in said[1]
    assert "lost" in said[2]
    assert call(monkeypatch, "runs", "--json", str(folder / "runs")) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["status"] for row in rows] == ["done", "lost"]


def test_logs_are_followed_until_the_run_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(folder)
    alive = iter([True, True, False])

    def lives(_process: object) -> bool:
        """Each time that it is asked for, a role has printed more; the last line is not complete."""
        run.log("worker/0", "more\nand " if (here := next(alive)) else "more")
        return here

    monkeypatch.setattr("zmqtrain.cli.runs.launcher_of", lambda _path: object())
    monkeypatch.setattr("zmqtrain.cli.runs.lives", lives)
    monkeypatch.setattr("zmqtrain.cli.runs.LOOK_S", 0)
    assert call(monkeypatch, "logs", "-f", "latest", "worker/0") == 0
    run.close()
    assert capsys.readouterr().out == "hello\nmore\nand more\nand more\n"


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("zmqtrain 0.")


def test_options_after_the_script_are_said_to_be_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trial.toml").write_text("[job]\n")
    Path("script.py").write_text("")
    before = ["launch", "trial.toml", "--engine", "slurm", "--submit", "--dry-run"]
    for arguments, said in (
        (["script.py", "--set", "compute.groups=2", "--run-dir=here"], True),
        (["--set", "compute.groups=2", "script.py", "--resume", "mine"], False),
    ):
        assert call(monkeypatch, *before, *arguments) == 0
        note = "note: --set, --run-dir comes after script.py, so it goes to the script"
        assert (note in capsys.readouterr().err) is said
