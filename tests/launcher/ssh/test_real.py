"""Real launches over ssh, on machines that are network namespaces of this one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.launched import Launched
from tests.launcher.ready import completed, warm
from tests.launcher.ssh.machines import Machines, command, machines
from tests.patience import PATIENCE_S
from zmqtrain.processors import processors

HEAD = """
[job]
name = "trial"
timeout = "20 s"

[compute]
group_size = 2
batch_size = 4
threads = 1

[engine]
kind = "ssh"
client = "{client}"
sync = true
"""

#: Goes on until somebody makes the file ``go``; all notice it in the same round.
SCRIPT = """
import os, sys, time, zmqtrain
from words import READY
with zmqtrain.session() as session:
    import torch
    print(READY, os.getcwd(), os.environ["WHO"])
    while not session.all_reduce(torch.tensor([float(os.path.exists(sys.argv[1]))])).item():
        time.sleep(0.02)
    print("sum", session.all_reduce(torch.tensor([session.rank + 1.0])).item())
"""


@pytest.fixture(scope="module")
def warmed() -> Iterator[dict[str, str]]:
    """What ``[[hosts]]`` have besides, where a test is not about how agents start processes."""
    with warm() as started:
        yield {"python": json.dumps(started.python)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(2, tmp_path_factory.mktemp("machines")) as made:
        yield made


def prepare(folder: Path, hosts: str, client: str) -> None:
    (folder / "trial.toml").write_text(HEAD.format(client=client) + hosts)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "words.py").write_text('READY = "ready"\n')  # copied along with it
    (folder / "runs").mkdir()
    (folder / "runs" / "large").write_bytes(bytes(1000))


def until(what: str, happens: object) -> None:
    assert callable(happens)
    end = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < end, f"{what} does not happen"
        time.sleep(0.05)


def test_a_run_survives_its_ssh_connections(tmp_path: Path, two: Machines, warmed: dict[str, str]) -> None:
    prepare(tmp_path, two.hosts(environment={"WHO": "machine"}, **warmed), "asyncssh")
    with Launched(tmp_path, "trial.toml", "script.py", str(tmp_path / "go")) as run:
        told = run.wait_for(r"worker/(\d) \| ready (\S+) (\S+)", 2)
        assert {match[2] for match in told} == {str(path) for path in two.state.glob("zmqtrain/runs/run-*/m?/task")}
        assert {match[3] for match in told} == {"machine"}
        assert not [path for path in two.state.rglob("*") if path.name == "large"]  # runs are left out
        token = next(process for process in two.processes("m1") if "agent" in process.cmdline()).environ()["ZMQTRAIN_TOKEN"]
        assert not any(token in " ".join(process.cmdline()) for name in two.names for process in two.processes(name))
        # What has logged in dies, and the server with it for a while.
        assert two.break_connections("m1") > 0
        run.wait_for("m1: the ssh connection is lost. The run continues")
        run.wait_for("m1: the ssh connection is back")
        # And the terminal is gone, or the connection that it was.
        run.signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert run.end() == 0, run
        assert all("sum 3.0" in (run.run / "logs" / f"worker-{rank}.log").read_text() for rank in range(2))
        assert any('"note"' in line for line in (run.run / "events.jsonl").read_text().splitlines())
        assert run.json("summary.json")["hosts"] == ["m1", "m2"]
        assert not any(token in path.read_text(errors="replace") for path in run.run.rglob("*") if path.is_file())
    assert two.left() == []


def test_hosts_of_which_nothing_is_said_but_where_they_are(tmp_path: Path, two: Machines, warmed: dict[str, str]) -> None:
    """Neither slots nor groups: each has one worker, with all its processors, and they are one group."""
    prepare(tmp_path, two.hosts(environment={"WHO": "machine"}, **warmed).replace("slots = 1\n", ""), "asyncssh")
    text = (tmp_path / "trial.toml").read_text().replace("group_size = 2\n", "").replace("threads = 1\n", "")
    (tmp_path / "trial.toml").write_text(text)
    (tmp_path / "go").touch()
    with Launched(tmp_path, "trial.toml", "script.py", str(tmp_path / "go")) as run:
        assert run.end() == 0, run
    summary = run.json("summary.json")
    assert (summary["groups"], summary["group_size"], summary["hosts"]) == (1, 2, ["m1", "m2"])
    assert f"slots = {processors()}" in (run.run / "topology.toml").read_text()
    assert not [line for line in run.lines if "warning" in line]


def test_a_detached_run_is_found_and_stopped(tmp_path: Path, two: Machines, warmed: dict[str, str]) -> None:
    """By the system's ssh, over IPv6."""
    addresses = {name: f"fd77::{number}" for number, name in enumerate(two.names, 2)}
    two.add_addresses("fd77::1", addresses)
    hosts = "".join(
        two.hosts(name, environment={"WHO": name}, address=f'"{address}"', **warmed) for name, address in addresses.items()
    )
    prepare(tmp_path, hosts, "system")
    detached = zmqtrain(tmp_path, "launch", "--detach", "--run-dir", "run", "trial.toml", "script.py", str(tmp_path / "go"))
    assert detached.returncode == 0, detached
    assert "detached. zmqtrain attach run shows it" in detached.stdout
    attached = subprocess.Popen(command("attach", "run"), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert attached.stdout is not None
        assert "  running  " in attached.stdout.readline()
        assert "attached to run" in attached.stdout.readline()
        stopped = zmqtrain(tmp_path, "stop", "run")
        assert stopped.returncode == 0, stopped
        assert attached.wait(PATIENCE_S) == 130
        assert "interrupted after" in attached.stdout.read()
    finally:
        attached.kill()
        attached.wait()
        attached.stdout.close()  # type: ignore[union-attr]
    log = (tmp_path / "run" / "launcher.log").read_text()
    assert "worker/0 | ready" in log
    assert "tcp://[fd77::" in (tmp_path / "run" / "events.jsonl").read_text()
    assert two.left() == []


def test_a_killed_launcher_leaves_nothing_that_runs(tmp_path: Path, two: Machines, warmed: dict[str, str]) -> None:
    """Agents end by themselves when no other one has come for `[job] alone`; then what they leave is cleared."""
    prepare(tmp_path, two.hosts("m1", environment={"WHO": "machine"}, **warmed), "asyncssh")
    with Launched(
        tmp_path,
        "--set=job.timeout=12",
        "--set=job.alone=1 s",
        "--set=compute.group_size=1",
        "trial.toml",
        "script.py",
        str(tmp_path / "go"),
    ) as run:
        run.wait_for(r"\| ready")
        assert len(two.processes("m1")) >= 4  # supervisor, agent, fork server, worker
        run.signal(signal.SIGKILL)
        assert run.end() == -signal.SIGKILL
        gone = zmqtrain(tmp_path, "attach", "run")
        assert gone.returncode == 129
        assert "the launcher of run has ended without finishing" in gone.stderr
        assert "m1: its agent" in gone.stderr
        until("the end of the agent", lambda: not two.processes("m1"))
        assert two.left()  # the folder, with its log
        assert zmqtrain(tmp_path, "status", "run").stdout.split()[1] == "lost"
        stopped = zmqtrain(tmp_path, "stop", "run")
        assert (stopped.returncode, stopped.stdout) == (0, "m1: stopped; nothing is left running there\n"), stopped
        assert zmqtrain(tmp_path, "stop", "run").returncode == 2
    assert two.left() == []


def test_a_launcher_that_is_gone_is_stopped_at_once(tmp_path: Path, two: Machines) -> None:
    """Everything that the host runs for it, whatever the time-outs, and also what a role has started itself."""
    prepare(tmp_path, two.hosts("m2", environment={"WHO": "machine"}), "system")
    script = "import subprocess\nsubprocess.Popen(['sleep', '600'])\n" + SCRIPT
    (tmp_path / "script.py").write_text(script)
    with Launched(
        tmp_path, "--set=job.timeout=300", "--set=compute.group_size=1", "trial.toml", "script.py", str(tmp_path / "go")
    ) as run:
        run.wait_for(r"\| ready")
        run.signal(signal.SIGKILL)
        assert run.end() == -signal.SIGKILL
        assert len(two.processes("m2")) >= 5
        stopped = zmqtrain(tmp_path, "stop", "run")
        assert stopped.returncode == 0, stopped
        until("the end of what had logged in to stop it", lambda: not two.processes("m2"))
    assert two.left() == []


def test_another_launcher_takes_over_the_machines(tmp_path: Path, two: Machines, warmed: dict[str, str]) -> None:
    """Encrypted: the new launcher has the keys of the one before."""
    prepare(tmp_path, two.hosts(environment={"WHO": "machine"}, **warmed), "asyncssh")
    with Launched(tmp_path, "trial.toml", "script.py", str(tmp_path / "go")) as run:
        run.wait_for(r"\| ready", 2)
        run.signal(signal.SIGKILL)
        assert run.end() == -signal.SIGKILL
        continued = subprocess.Popen(
            command("launch", "--continue", "run"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert continued.stdout is not None
            events = run.run / "events.jsonl"
            until("the other launcher takes over", lambda: '"continued"' in events.read_text() or continued.poll() is not None)
            (tmp_path / "go").touch()
            said = continued.communicate(timeout=PATIENCE_S)[0]
            assert continued.returncode == 0, said
        finally:
            continued.kill()
            continued.wait()
    assert run.json("summary.json")["status"] == "done"
    assert [(run.run / "logs" / f"worker-{rank}.log").read_text().count("sum 3.0") for rank in range(2)] == [1, 1]
    assert [(run.run / "logs" / f"worker-{rank}.log").read_text().count("ready") for rank in range(2)] == [1, 1]
    assert two.left() == []


def test_a_killed_agent_takes_its_host_with_it(tmp_path: Path, two: Machines, warmed: dict[str, str]) -> None:
    """Its roles end with it, the run ends since it is not elastic, and nothing is left on any host."""
    prepare(tmp_path, two.hosts(environment={"WHO": "machine"}, **warmed), "system")
    with Launched(tmp_path, "trial.toml", "script.py", str(tmp_path / "go")) as run:
        run.wait_for(r"\| ready", 2)
        agent = next(process for process in two.processes("m2") if "agent" in process.cmdline())
        agent.kill()
        assert run.end() == 129, run
        assert run.json("error.json")["verdict"] == "host lost"
        assert "lost the host m2: its agent ended with exit code -9" in repr(run)
    assert two.left() == []


def test_a_host_that_vanishes_is_cleared_up_when_it_is_back(tmp_path: Path, two: Machines, warmed: dict[str, str]) -> None:
    """It is lost when its heartbeats have been missing for half of the time-out; what it still runs ends by itself."""
    prepare(tmp_path, two.hosts(environment={"WHO": "machine"}, **warmed), "asyncssh")
    with Launched(tmp_path, "--set=job.timeout=14", "--set=job.alone=1 s", "trial.toml", "script.py", str(tmp_path / "go")) as run:
        run.wait_for(r"\| ready", 2)
        with two.unplugged("m2"):
            assert run.end() == 129, run
            assert "lost the host m2" in repr(run)
            assert "`zmqtrain stop` tries again" in repr(run)
            assert two.processes("m1") == []
            until("the end of the agent", lambda: not [process for process in two.processes("m2") if "agent" in process.cmdline()])
        stopped = zmqtrain(tmp_path, "stop", "run")
        assert (stopped.returncode, stopped.stdout) == (0, "m2: stopped; nothing is left running there\n"), stopped
    assert two.left() == []


def test_a_host_that_cannot_take_part_ends_the_launch(tmp_path: Path, two: Machines) -> None:
    prepare(tmp_path, two.hosts("m1", python='"/nowhere/python"') + two.hosts("m2"), "asyncssh")
    refused = zmqtrain(tmp_path, "launch", "trial.toml", "script.py")
    assert refused.returncode == 2, refused
    assert "1 of 2 hosts cannot take part" in refused.stderr
    assert "there is no Python at /nowhere/python" in refused.stderr
    assert "Traceback" not in refused.stderr
    (tmp_path / "data.bin").write_bytes(bytes(100_000))
    large = zmqtrain(tmp_path, "launch", "--set=engine.sync_limit=64 KiB", "trial.toml", "script.py")
    assert large.returncode == 2, large
    assert "The largest: data.bin (97.7 KiB)" in large.stderr
    assert two.left() == []


def test_machines_are_looked_at_before_a_launch(tmp_path: Path, two: Machines) -> None:
    """Hosts that cannot take part are named with what to do, and the others looked at nevertheless: also one behind a translation
    of addresses, and all behind a firewall that lets a few ports through."""
    bad = two.hosts("m1", name='"m3"', address='"no-such-host.invalid"')
    outer = two.hosts("m2", address='"203.0.113.2"', bind='"0.0.0.0"', ssh=two.login(two.address("m2")))
    prepare(tmp_path, two.hosts("m1") + outer + bad, "asyncssh")
    file = tmp_path / "trial.toml"
    file.write_text(file.read_text().replace("[job]", '[job]\nports = "29400-29415"'))
    with two.outer_address("m2", "203.0.113.2"):
        checked = zmqtrain(tmp_path, "check", "--json", "trial.toml")
    assert checked.returncode == 2, checked
    assert "not admitted" not in checked.stderr  # those who tried the ways are no strangers
    rows = [json.loads(line) for line in checked.stdout.splitlines()]
    (fault,) = (row for row in rows if row["row"] == "check" and not row["ok"])
    assert (fault["host"], fault["remedy"]) == ("m3", "correct it in [[hosts]]")
    machines_seen = [row for row in rows if row["row"] == "machine"]
    assert [row["host"] for row in machines_seen] == ["m1", "m2"]
    found = [re.fullmatch(r"tcp://([0-9.]+):(\d+),(\d+)", row["endpoint"]) for row in machines_seen]
    assert [match[1] for match in found if match] == [two.address("m1"), "203.0.113.2"]
    assert {int(port) in range(29400, 29416) for match in found if match for port in match.groups()[1:]} == {True}
    assert all(abs(row["clock_offset_s"]) < 1 for row in machines_seen)  # it is one machine's clock
    ways = {(row["source"], row["target"]): row for row in rows if row["row"] == "way"}
    assert set(ways) == {("m1", "m2"), ("m2", "m1")}
    assert all(row["ok"] and row["bandwidth"] > 1e6 and row["round_trip_s"] > 0 for row in ways.values())
    assert "keys were exchanged" in next(row["detail"] for row in rows if row["row"] == "check" and row["name"] == "ways")
    assert two.left() == []


def zmqtrain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    if words[0] != "launch":
        return completed(folder, *words)
    return subprocess.run(command(*words), cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
