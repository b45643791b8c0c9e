"""``zmqtrain check`` and ``zmqtrain schema``."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.cli.check import run_check
from zmqtrain.cli.schema import run_schema

GOOD = """\
[job]
task = "job.py:task"
[[hosts]]
name = "alpha"
slots = 4
[[hosts]]
name = "beta"
slots = 4
[compute]
groups = 2
group_size = 2
[exchange]
shards = 2
"""
TASK = """\
import torch
from zmqtrain import Task
print("the task speaks")
def task(lr=0.1, data=None):
    return Task(
        model=lambda: torch.nn.Linear(2, 1), loss=torch.nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr), train_data=[(torch.zeros(2), torch.zeros(1))] * 2560,
    )
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZMQTRAIN_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "job.py").write_text(TASK)
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    return path


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def fault_of(file: Path, capsys: pytest.CaptureFixture[str], *, file_only: bool = False, load: bool | None = None) -> str:
    """The one fault's name and detail."""
    assert run_check(file, True, file_only=file_only, load=load) == 2
    faults = [f"{row['name']}: {row['detail']}" for row in rows_of(capsys) if row["row"] == "check" and not row["ok"]]
    assert len(faults) == 1
    return faults[0]


def test_a_good_file_for_people(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(file) == 0
    text = capsys.readouterr().out
    for part in (
        "alpha",
        "worker",
        "server",
        "heartbeat",
        "torch",
        "task in job.py",
        "4 workers in 2 groups on 8 slots",
        "is ready to launch",
    ):
        assert part in text


def test_a_good_file_for_machines(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(file, json=True) == 0
    rows = rows_of(capsys)
    assert {row["row"] for row in rows} == {"host", "role", "timeout", "version", "check", "result"}
    assert [row["peer"] for row in rows if row["row"] == "role"] == [*(f"worker/{n}" for n in range(4)), "server/0", "server/1"]
    assert rows[-1] == {"row": "result", "file": str(file), "ok": True, "faults": 0}


def test_faults_of_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(GOOD.replace("shards", "shardz").replace("slots = 4", "slots = -1", 1))
    assert run_check(file) == 2
    text = capsys.readouterr().err
    assert "run.toml:5: hosts[0].slots = -1: must be greater" in text
    assert 'did you mean "shards"?' in text
    assert run_check(file, json=True) == 2
    assert [row["row"] for row in rows_of(capsys)] == ["fault", "fault", "result"]


def test_too_few_slots(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(GOOD.replace("groups = 2", "groups = 20"))
    assert "do not fit into 8 slots" in fault_of(file, capsys)


def test_a_task_that_is_missing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(GOOD.replace("job.py:task", "job.py:tusk"))
    assert "did you mean 'task'" in fault_of(file, capsys)


@pytest.mark.parametrize(
    ("code", "args", "fault"),
    [
        (TASK, "rl = 3", "the task's function job.py:task takes no argument 'rl'; it takes lr, data"),
        (TASK.replace("lr=0.1", "lr"), "", "the task's function job.py:task needs the argument 'lr': set it in [job] args"),
        ("def task(): return 3", "", "function job.py:task returned an object of type int; it must return a zmqtrain.Task"),
        ("task = 3", "", "task is of type int, not a function that returns a Task"),
        ("import missing_module\ntask = 3", "", "ModuleNotFoundError: No module named 'missing_module'"),
        ("def task():\n    return {}['x']\n", "", "raised KeyError: 'x' ("),
        ("def task():\n    raise SystemExit(4)\n", "", "job.py:task ended the process: it called sys.exit(4)"),
        (TASK.replace("zeros(1))] * 2560", "zeros(1))] * 0"), "", "Task.train_data is empty"),
        (TASK.replace("zeros(1))] * 2560", "zeros(1))] * 127"), "",
         "the training data has 127 samples, but one step of 2 groups with batch_size = 64 takes 128. Lower"),
        (TASK.replace("train_data=[(torch.zeros(2), torch.zeros(1))] * 2560", "train_data=torch.utils.data.DataLoader([1], 7)"), "",
         "Task.train_data is a DataLoader with batch_size = 7, but a group takes"),
    ],
)  # fmt: skip
def test_a_task_that_is_none(file: Path, capsys: pytest.CaptureFixture[str], code: str, args: str, fault: str) -> None:
    (file.parent / "job.py").write_text(code)
    file.write_text(GOOD.replace("[[hosts]]", f"args = {{ {args} }}\n[[hosts]]", 1))
    said = fault_of(file, capsys)
    assert said.startswith("load: ")
    assert fault in said
    assert run_check(file, True, load=False) == 0
    assert run_check(file, True, file_only=True) == 0


def test_what_a_task_prints_is_no_row(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(file, True) == 0
    said = capsys.readouterr()
    details = {row["name"]: row["detail"] for row in map(json.loads, said.out.splitlines()) if row["row"] == "check"}
    assert details["load"] == "job.py:task returns a task, 2,560 samples to train on"
    assert "the task speaks" in said.err


def test_a_task_is_loaded_here_only_where_hosts_are_this_machine(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file.parent / "job.py").write_text("def task(): return 3\n")
    file.write_text("[job]\ntask = 'job.py'\n[engine]\nkind = 'environment'\n")
    assert run_check(file, True) == 0
    capsys.readouterr()
    assert "returned an object of type int" in fault_of(file, capsys, load=True)


@pytest.mark.parametrize(
    ("compute", "devices", "there", "fault"),
    [
        ('device = "cuda"', "", 0, 'device: device = "cuda", but torch finds no CUDA device'),
        ('device = "cuda"', "", 1, None),
        ("", 'devices = ["cuda:0", "cuda:1"]', 0, 'device: devices = ["cuda:1"], but torch finds no CUDA device'),
        ("", 'devices = ["cuda:0", "cuda:1"]', 1, 'device: devices name "cuda:1", but torch finds 1 here, numbered from cuda:0'),
        ("", 'devices = ["cuda:0", "cuda:1"]', 2, None),
        ('device = "cpu"', 'devices = ["cuda:0"]', 0, None),
        ("", "", 0, None),
    ],
)  # fmt: skip
def test_cuda_where_there_is_none(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    compute: str,
    devices: str,
    there: int,
    fault: str | None,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: there)
    monkeypatch.setattr("torch.version.cuda", "12.4")
    file.write_text(f'[job]\ntask = "job.py:task"\n[[hosts]]\nname = "a"\nslots = 2\n{devices}\n[compute]\n{compute}\n')
    if fault is None:
        assert run_check(file, True) == 0
    else:
        assert fault_of(file, capsys).startswith(fault)


def test_a_host_without_work_is_a_warning(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = '[[hosts]]\nname = "h[1-2]"\nslots = 4\n'
    file.write_text(f'[job]\ntask = "job.py:task"\n{hosts}[compute]\ngroups = 1\n')
    assert run_check(file) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "warning" in text
    assert "h2 would be idle: 1 worker on 1 of 2 hosts" in text
    assert "is ready to launch, with 1 warning" in text


def test_weights_that_are_missing(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('[job]\ntask = "job.py:task"\nweights = "nowhere"\n')
    assert fault_of(file, capsys).startswith("weights: [job] weights: nowhere does not exist; give the path of a run")


def test_data_that_is_missing(file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(GOOD + '[data]\npath = "nowhere"\n')
    assert fault_of(file, capsys).startswith("data: nowhere does not exist here: correct [data] path")
    monkeypatch.setenv("ZMQTRAIN_DATA", str(file.parent))  # goes before the file's
    assert run_check(file, True) == 0
    assert run_check(file, True, data="not/there") == 2


def test_other_machines_are_left_alone_when_only_the_file_is_asked_for(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = GOOD.replace('"alpha"', '"alpha"\naddress = "alpha.invalid"').replace('"beta"', '"beta"\naddress = "beta.invalid"')
    file.write_text(hosts + '[engine]\nkind = "ssh"\nsync = true\n[data]\npath = "/on/each/host"\n')
    assert run_check(file, True, file_only=True) == 0
    checks = {row["name"]: row["detail"] for row in rows_of(capsys) if row["row"] == "check"}
    assert "would be copied to every host" in checks["sync"]
    assert checks["data"] == "/on/each/host ([data] path), on each host"
    file.write_text(file.read_text().replace("sync = true", "sync = true\nsync_limit = 64"))
    assert "more than sync_limit" in fault_of(file, capsys, file_only=True)


def test_a_port_in_use(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file.write_text(GOOD.replace("[job]", f"[job]\nport = {port}"))
        assert f"{port} cannot be used" in fault_of(file, capsys)
    assert run_check(file, True) == 0


def test_a_range_of_ports_that_is_too_short(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(GOOD.replace("[job]", '[job]\nports = "29400-29409"'))
    assert "10 ports from 29400 to 29409, but the processes of one machine need up to 18" in fault_of(file, capsys)
    file.write_text(GOOD.replace("[job]", '[job]\nports = "29400-29450"'))
    assert run_check(file, True) == 0
    file.write_text(GOOD.replace("[job]", '[job]\nports = "29450-29400"'))
    assert run_check(file) == 2
    assert 'is not a range of ports: write it like "29400-29500"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("profile", "reason"), [("p.json", "No such file or directory"), ("resnet5", "Did you mean 'resnet50'?"), ("resnet50", None)]
)
def test_a_profile_that_is_missing(profile: str, reason: str | None, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(GOOD.replace("[compute]", f'[compute]\ndevice = "modelled"\nprofile = "{profile}"'))
    if reason is None:
        assert run_check(file, True) == 0
    else:
        assert reason in fault_of(file, capsys)


WORLD = """\
[job]
steps = 20
[[hosts]]
name = "node[01-64]"
slots = 1
[compute]
device = "modelled"
profile = "resnet50"
groups = 64
[network]
bandwidth = "10 Gbit/s"
latency = "20 us"
[[network.racks]]
name = "A"
hosts = ["node[01-32]"]
uplink = "40 Gbit/s"
[[network.hosts]]
name = "node[63-64]"
slowdown = 2.0
[[faults]]
step = 3
kind = "slow"
target = "worker/1"
factor = 4.0
[[faults]]
step = 20
kind = "partition"
sides = [["node01"], ["node[02-64]"]]
"""


def test_a_simulated_world_for_people(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(WORLD)
    assert run_check(file) == 0
    text = capsys.readouterr().out
    for part in (
        "and 24 more (all with --json)",
        "Faults in simulated and emulated runs",
        "factor = 4.0",
        'sides = [["node01"], ["node[02-64]"]]',
        "10 Gbit/s per host, 20 us one way, 1 rack with uplinks of 40 Gbit/s, 2 hosts with settings of their own",
        "phantom payloads; stopped after 24 h of virtual time",
        "2 in simulated and emulated runs; too late, since there are only 20 steps: partition at step 20",
    ):
        assert part in text


def test_what_only_a_simulation_can_do(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(WORLD.replace('kind = "slow"\n', 'kind = "corrupt"\n').replace("factor = 4.0\n", ""))
    for emulate in (False, True):
        assert run_check(file, emulate=emulate, json=True) == (2 if emulate else 0)
        found = [row for row in rows_of(capsys) if row["row"] == "check" and row["name"] == "faults"]
        refused = [row["detail"] for row in found if not row["ok"]]
        assert ["only zmqtrain simulate carries it out" in what for what in refused] == [True] * emulate


def test_a_simulated_world_for_machines(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(WORLD)
    assert run_check(file, json=True) == 0
    rows = rows_of(capsys)
    assert sum(row["row"] == "host" for row in rows) == 64
    first, second = (row for row in rows if row["row"] == "planned")
    assert (first["kind"], first["at"], first["step"], first["target"]) == ("slow", None, 3, "worker/1")
    assert (second["kind"], second["target"]) == ("partition", None)


def test_the_schema_is_json_and_documents_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_schema() == 0
    schema = json.loads(capsys.readouterr().out)
    assert "job" in schema["required"]
    assert schema["additionalProperties"] is False
    definitions = schema["$defs"]
    assert set(definitions["LinkRule"]["required"]) == {"from", "to"}
    assert definitions["Network"]["properties"]["racks"]["items"] == {"$ref": "#/$defs/Rack"}
    assert definitions["Fault"]["properties"]["sides"]["items"]["items"]["type"] == "string"
    assert schema["properties"]["faults"]["items"] == {"$ref": "#/$defs/Fault"}


def test_neither_imports_torch() -> None:
    code = "import sys, zmqtrain.cli.check, zmqtrain.cli.schema, zmqtrain.membership.context; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hosts_that_come_when_the_run_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that leaves it open which machines there are has no fault by that."""
    file = tmp_path / "open.toml"
    file.write_text("[job]\nsteps = 1\n[compute]\ngroups = 64\n[engine]\nkind = 'environment'\n")
    assert run_check(file, True) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    details = {row["name"]: row["detail"] for row in rows if row["row"] == "check"}
    assert "64 workers in 64 groups on the slots of the hosts that join" in details["slots"]
    assert "another machine" in details["encryption"]
    assert "at launch" in details["hosts"]
    file.write_text(file.read_text().replace("environment", "kubernets"))
    assert run_check(file, True) == 2
    assert "did you mean 'kubernetes'" in capsys.readouterr().out


def test_settings_and_an_engine_on_the_command_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(file, True, file_only=True, settings=["engine.kind=slrum"]) == 2
    assert "there is no such engine; did you mean 'slurm'" in capsys.readouterr().out
    assert run_check(file, True, file_only=True, settings=["compute.groups=2000"]) == 2
    assert "2,000 groups" in capsys.readouterr().out
