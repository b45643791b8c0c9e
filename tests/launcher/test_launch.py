"""Real launches: what roles get, how every kind of end is told, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.launcher.launched import TOLD, Launched, told

TOPOLOGY = """
[job]
name = "trial"
timeout = "20 s"
oversubscribe = true

[compute]
group_size = 2
batch_size = 4
threads = 1
"""

#: Joins, tells what it was given, and meets the others.
MEETS = """
import json, os, sys, zmqtrain
convert = any(name.endswith(".symbolic_convert") for name in sys.modules)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
with zmqtrain.session() as session:
    import torch
    told = {name: os.environ.get(name) for name in names}
    told |= {"argv": sys.argv, "threads": torch.get_num_threads(), "name": __name__, "data": session.data_path}
    told |= {"convert": convert}
    print(json.dumps(told))
    total = session.all_reduce(torch.tensor([float(session.rank + 1)]))
    print("sum", total.item())
    session.report(loss=0.5)
    session.barrier()
"""

#: Never joins, and stays.
STAYS = """
import os, time
print("ready", os.getpid())
time.sleep(600)
"""

#: The second rank's code is wrong while the first one waits for it.
FAILS = """
import zmqtrain
with zmqtrain.session() as session:
    if session.rank == 1:
        raise ValueError("this model is wrong")
    session.barrier()
"""

#: Joins, and waits for others.
WAITS = """
import os, time, zmqtrain
with zmqtrain.session() as session:
    print("ready", os.getpid())
    while True:
        time.sleep(0.05)
        session.barrier() if session.rank == 0 else time.sleep(600)
"""


def launch(folder: Path, script: str, *arguments: str, from_nothing: bool = False) -> Launched:
    (folder / "trial.toml").write_text(TOPOLOGY)
    (folder / "script.py").write_text(script)
    return Launched(folder, "trial.toml", *arguments[:1], "script.py", *arguments[1:], from_nothing=from_nothing)


def test_a_script_without_a_session_is_said_to_have_run_alone(tmp_path: Path) -> None:
    with launch(tmp_path, "") as run:
        assert run.end() == 0, run
        assert any("warning: script.py made no session" in line for line in run.lines), run


def test_what_roles_get_and_what_a_run_leaves(tmp_path: Path) -> None:
    with launch(tmp_path, MEETS, "--data=elsewhere", "--json", "5", from_nothing=True) as run:
        assert run.end() == 0, run
        logs = {path.name: path.read_text().splitlines() for path in (run.run / "logs").iterdir()}
        assert sorted(logs) == ["worker-0.log", "worker-1.log"]
        told = [json.loads(logs[f"worker-{rank}.log"][0]) for rank in range(2)]
        for rank, values in enumerate(told):
            assert values["RANK"] == values["LOCAL_RANK"] == str(rank)
            assert values["WORLD_SIZE"] == values["LOCAL_WORLD_SIZE"] == "2"
            assert values["GROUP_RANK"] == "0"
            assert values["MASTER_ADDR"] == "127.0.0.1"
            assert 1024 < int(values["MASTER_PORT"]) < 65536
            assert values["OMP_NUM_THREADS"] == "1"
            assert values["threads"] == 1
            assert not values["convert"]  # a part of torch's compiler, which the script does without
            assert values["argv"] == ["script.py", "--json", "5"]
            assert values["name"] == "__main__"
            assert values["data"] == str(tmp_path / "elsewhere")
            assert logs[f"worker-{rank}.log"][1] == "sum 3.0"
        # What a person sees: lines, since this is no terminal.
        assert run.lines[0].startswith("trial: ")
        assert any(line.startswith("worker/1 | sum 3.0") for line in run.lines)
        assert run.error_text == ""
        summary = run.json("summary.json")
        assert summary["status"] == "done"
        assert summary["world"] == "real"
        for key in (
            "steps",
            "samples",
            "samples_per_s",
            "step_s",
            "exposed_communication_s",
            "eval",
            "staleness",
            "replica_spread",
        ):
            assert key in summary
        assert summary["seconds"] > 0
        assert summary["bytes_sent"] > 0
        assert summary["versions"]["zmqtrain"]
        assert "traceEvents" in run.json("trace.json")
        events = [json.loads(line) for line in (run.run / "events.jsonl").read_text().splitlines()]
        assert {"time", "host", "role", "rank", "step", "kind", "values"} <= set(events[0])
        assert {"join", "running", "leave", "exit", "ended"} <= {event["kind"] for event in events}
        assert (run.run / "topology.toml").exists()
        assert (run.run / "checkpoints").is_dir()
        assert not (run.run / "error.json").exists()
        assert not (run.run / "pid").exists()


def test_the_first_failing_rank_is_shown(tmp_path: Path) -> None:
    with launch(tmp_path, FAILS) as run:
        assert run.end() == 3, run
        assert "worker/1" in run.error_text
        assert 'raise ValueError("this model is wrong")' in run.error_text
        error = run.json("error.json")
        assert (error["peer"], error["verdict"], error["exit_code"]) == ("worker/1", "user code", 3)
        assert "this model is wrong" in error["message"]
        assert "script.py" in error["traceback"]
        assert run.json("summary.json")["status"] == "failed"


@pytest.mark.parametrize("joined", [False, True])
def test_a_role_that_is_killed(tmp_path: Path, joined: bool) -> None:
    with launch(tmp_path, WAITS if joined else STAYS) as run:
        roles = run.wait_for(r"(worker/\d) \| ready (\d+)", 2)
        victim = next(match for match in roles if match[1] == "worker/1")
        os.kill(int(victim[2]), signal.SIGKILL)
        assert run.end() >= 128, run
        error = run.json("error.json")
        assert (error["peer"], error["verdict"]) == ("worker/1", "host lost")
        assert error["pid"] == int(victim[2])
        assert "SIGKILL" in error["message"]
        assert "SIGKILL" in run.error_text


@pytest.mark.parametrize("what", ["the agent", "the fork server"])
def test_a_host_that_dies(tmp_path: Path, what: str) -> None:
    with launch(tmp_path, STAYS) as run:
        run.wait_for(r"\| ready", 2)
        if what == "the agent":
            run.find("zmqtrain agent").kill()
        else:
            (server,) = run.zygote.children()
            server.kill()
        assert run.end() >= 128, run
        assert run.json("error.json")["verdict"] == "host lost"
        assert run.json("summary.json")["status"] == "failed"


def test_nothing_survives_the_launcher(tmp_path: Path) -> None:
    there = "import sys\nprint('compiler', 'torch._dynamo.symbolic_convert' in sys.modules)  # as torch.compile needs it\n"
    with launch(tmp_path, TOLD + there + STAYS, from_nothing=True) as run:
        run.wait_for(r"\| ready", 2)
        run.wait_for(r"\| compiler True", 2)  # imported once, for both
        assert len(run.processes()) >= 6  # launcher, agent, zygote, fork server, two workers
        _, token = told(run)
        assert not any(token in word for process in run.processes() for word in process.cmdline())
        run.signal(signal.SIGKILL)
        assert run.end() == -signal.SIGKILL


@pytest.mark.parametrize(("script", "joined"), [(STAYS, False), (WAITS, True)])
def test_interrupted_once_it_stops_in_good_order(tmp_path: Path, script: str, joined: bool) -> None:
    with launch(tmp_path, script) as run:
        run.wait_for(r"\| ready", 2)
        run.signal(signal.SIGINT)
        assert run.end() == 130, run
        assert run.json("summary.json")["status"] == "interrupted"
        assert not (run.run / "pid").exists()


def test_interrupted_twice_it_stops_at_once(tmp_path: Path) -> None:
    """Roles that do not heed SIGTERM do not hold it up."""
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAYS
    with launch(tmp_path, stubborn) as run:
        run.wait_for(r"\| ready", 2)
        run.signal(signal.SIGINT)
        run.wait_for("again")
        run.signal(signal.SIGINT)
        assert run.end() == 130, run
        assert run.json("summary.json")["status"] == "interrupted"


def test_a_script_that_cannot_be_run_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "trial.toml").write_text(TOPOLOGY)
    with Launched(tmp_path, "trial.toml", "missing.py") as run:
        assert run.end() == 2
        assert "missing.py" in run.error_text
        assert "Traceback" not in run.error_text
        assert not run.run.exists()


def test_a_port_in_use(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launch(tmp_path, MEETS, f"--set=job.port={port}") as run:
            assert run.end() == 67
            assert str(port) in run.error_text
            assert "Traceback" not in run.error_text
