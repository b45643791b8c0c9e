"""The parts of Slurm launches that need no Slurm: allocations, hosts on nodes, batch scripts."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from zmqtrain.cli.launch import run_launch
from zmqtrain.cli.launch_options import LaunchOptions
from zmqtrain.errors import TopologyError, UsageError
from zmqtrain.launcher.slurm.allocation import Allocation, Node, addresses_in, counts, slots_of
from zmqtrain.launcher.slurm.client import StepTarget, step_words
from zmqtrain.launcher.slurm.engine import in_allocation
from zmqtrain.launcher.slurm.submit import Submission, job_command, read_template, render
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Host, Topology

NODES = Allocation("7", tuple(Node(f"n{number}", f"10.0.0.{number}", 4) for number in (1, 2, 3)))
PACKAGE = Path(__file__).parents[3]


def topology(text: str) -> Topology:
    return parse_topology('[job]\ntask = "task.py"\n' + text, name="trial")


# The allocation ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nodes", "expected"),
    [("4", 1, [4]), ("4(x2),2", 3, [4, 4, 2]), ("1(x3)", 3, [1, 1, 1]), ("2", 2, [2, 2])],
)
def test_numbers_for_each_node(text: str, nodes: int, expected: list[int]) -> None:
    assert counts(text, nodes) == expected


def test_numbers_that_are_none() -> None:
    with pytest.raises(UsageError, match="many"):
        counts("many", 2)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "8,4"}, [8, 4]),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2)", "SLURM_TASKS_PER_NODE": "3,1"}, [8, 8]),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2)", "SLURM_TASKS_PER_NODE": "3,1", "SLURM_CPUS_PER_TASK": "2"}, [6, 2]),
        ({}, [1, 1]),
    ],
)
def test_slots_are_processors_that_tasks_are_to_have(variables: Mapping[str, str], expected: list[int]) -> None:
    assert slots_of(variables, 2) == expected


def test_addresses_of_nodes() -> None:
    lines = (
        "NodeName=n1 Arch=x86_64 CPUTot=2 NodeAddr=10.0.0.1 NodeHostName=a Version=22.05",
        "NodeName=n2 NodeAddr=n2.lab OS=Linux 6",
    )
    assert addresses_in("\n".join([*lines, ""])) == {"n1": "10.0.0.1", "n2": "n2.lab"}


def test_outside_of_a_job_there_is_none() -> None:
    assert Allocation.here({}) is None
    assert Allocation.here({"SLURM_JOB_ID": "7"}) is None


# Hosts on nodes ---------------------------------------------------------------------------------------------------------------


def test_a_file_without_hosts_takes_all_nodes() -> None:
    found = in_allocation(topology('[engine]\nkind = "slurm"\n'), NODES)
    assert [(host.name, host.address, host.slots) for host in found.hosts] == [(f"n{i}", f"10.0.0.{i}", 4) for i in (1, 2, 3)]
    assert found.encrypted()
    # Nothing is said of groups: each node has a worker, with all that the job has there.
    assert (found.compute.groups, found.compute.group_size) == (1, 3)
    assert [(role.host, role.threads) for role in place(found).workers] == [("n1", 4), ("n2", 4), ("n3", 4)]
    gpus = in_allocation(topology('[engine]\nkind = "slurm"\nslurm = { gpus = 2 }\n'), NODES)
    assert gpus.compute.group_size == 6
    assert [(role.host, role.device) for role in place(gpus).workers][:3] == [("n1", "cuda:0"), ("n1", "cuda:1"), ("n2", "cuda:0")]
    assert in_allocation(topology('[compute]\ngroups = 2\n[engine]\nkind = "slurm"\n'), NODES).compute.workers == 2


def test_hosts_that_are_named_as_nodes_are_those() -> None:
    text = '[[hosts]]\nname = "n3"\n[[hosts]]\nname = "n1"\naddress = "192.168.0.1"\nslots = 2\n[engine]\nkind = "slurm"\n'
    found = in_allocation(topology(text), NODES)
    assert [(host.name, host.address, host.slots) for host in found.hosts] == [("n3", "10.0.0.3", 4), ("n1", "192.168.0.1", 2)]
    assert {name: node.name for name, node in NODES.assigned(found.hosts).items()} == {"n3": "n3", "n1": "n1"}


def test_others_are_nodes_in_order() -> None:
    text = '[[hosts]]\nname = "n[3-4]"\naddress = "192.168.0.[1-2]"\nslots = 9\n[engine]\nkind = "slurm"\n'
    found = in_allocation(topology(text), NODES)
    assert [(host.name, host.address, host.slots) for host in found.hosts] == [("n3", "10.0.0.1", 9), ("n4", "10.0.0.2", 9)]
    assert {name: node.name for name, node in NODES.assigned(found.hosts).items()} == {"n3": "n1", "n4": "n2"}


def test_too_many_hosts() -> None:
    with pytest.raises(UsageError, match=r"4 hosts.*job 7 has 3 nodes"):
        NODES.assigned([Host(name=f"h{number}") for number in range(4)])


def test_without_an_allocation_hosts_stand_for_nodes() -> None:
    found = topology('[compute]\ngroups = 5\nthreads = 2\n[engine]\nkind = "slurm"\nslurm = { nodes = 2 }\n')
    assert [(host.name, host.slots) for host in found.hosts] == [("node1", 6), ("node2", 6)]
    assert len(in_allocation(found, NODES).hosts) == 3


def test_a_launch_outside_of_a_job_says_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "trial.toml").write_text('[job]\ntask = "task.py"\n')
    with pytest.raises(UsageError, match=r"salloc.*--submit"):
        run_launch(tmp_path / "trial.toml", options=LaunchOptions(engine="slurm"))
    with pytest.raises(UsageError, match="add --submit"):
        run_launch(tmp_path / "trial.toml", options=LaunchOptions(engine="slurm", dry_run=True))
    with pytest.raises(UsageError, match="--engine slurm"):
        run_launch(tmp_path / "trial.toml", options=LaunchOptions(submit=True))


def test_what_srun_is_told_holds_no_secret_and_no_shell() -> None:
    target = StepTarget.on("n1", Host(name="alpha"), "/opt/my python")
    assert (target.name, target.host, target.python) == ("alpha", "n1", "/opt/my python")
    assert "--overlap" in step_words(target)
    assert "--nodelist=n1" in step_words(target)
    assert b"class StepHost" in target.program
    assert target.by_hand.startswith("srun ")


# Batch scripts ----------------------------------------------------------------------------------------------------------------

ASKS = """
[compute]
groups = 4
[engine]
kind = "slurm"
[engine.slurm]
nodes = 2
gpus = 1
memory = "8 GiB"
time = "90 min"
partition = "short"
account = "lab"
options = { constraint = "ib&a", exclusive = "" }
"""


def submission(folder: Path, text: str = ASKS, command: tuple[str, ...] = ("zmqtrain", "launch")) -> Submission:
    return Submission(topology(text), folder, folder / "run", command)


def test_the_script_asks_for_what_the_file_says(tmp_path: Path) -> None:
    script = render(read_template(None), submission(tmp_path))
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        "--job-name=trial",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=2",
        "--gpus-per-node=1",
        "--mem=8192M",
        "--time=1:30:00",
        "--partition=short",
        "--account=lab",
        "--constraint=ib&a",
        "--exclusive",
        f"--output={tmp_path}/run/slurm.out",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@90",
    ]
    assert "{{" not in script


def test_hosts_of_the_file_say_how_many_nodes(tmp_path: Path) -> None:
    text = '[[hosts]]\nname = "n[1-3]"\naddress = "10.0.0.[1-3]"\nslots = 8\n[engine]\nkind = "slurm"\n'
    words = submission(tmp_path, text).words()
    assert (words["nodes"], words["cpus"]) == ("3", "8")


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.sbatch"
    mine.write_text("#!/bin/sh\nmodule load python\n{{command}}\n")
    command = job_command(
        Path("a file.toml"),
        ("script.py", "--lr=1"),
        python="/opt/python",
        directory=Path("/runs/x"),
        settings=["job.steps=5"],
        data=None,
        resume="old-001",
        json_lines=False,
    )
    line = render(read_template(mine), submission(tmp_path, command=command)).splitlines()[2]
    assert line.startswith("/opt/python -m zmqtrain launch --engine=slurm --run-dir=/runs/x --continue --set=job.steps=5 ")
    assert line.endswith(f"--resume=old-001 '{Path('a file.toml').absolute()}' script.py --lr=1")
    mine.write_text("{{command}} {{hosts}}\n")
    with pytest.raises(UsageError, match=r"line 1 .*\{\{hosts\}\}.*command"):
        render(read_template(mine), submission(tmp_path))
    with pytest.raises(UsageError, match=r"no \{\{command\}\}"):
        render("#!/bin/sh\n", submission(tmp_path))
    with pytest.raises(UsageError, match="cannot be read"):
        read_template(tmp_path / "none")


def test_the_template_lies_where_people_look() -> None:
    assert (PACKAGE / "launch" / "slurm.sbatch").read_text() == read_template(None)


def test_the_shipped_file_is_rendered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGE)
    assert run_launch(Path("launch/slurm.toml"), options=LaunchOptions(submit=True, dry_run=True)) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in script
    assert f"cd {PACKAGE} " in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "text",
    ['options = { "mail type" = "END" }', 'options = { nodes = "3" }', 'partition = "a b"', 'time = "1 s"', "nodes = 0"],
)
def test_what_slurm_cannot_be_asked_for(text: str) -> None:
    with pytest.raises(TopologyError):
        topology(f'[engine]\nkind = "slurm"\n[engine.slurm]\n{text}\n')


class Batch:
    """The batch script, run by bash, with commands that stand for Slurm's own."""

    def __init__(self, folder: Path, launch: str, *, state: str = "RUNNING", **environ: str) -> None:
        self.folder = folder
        tools = folder / "bin"
        tools.mkdir()
        for name, does in (("squeue", f"echo {state}"), ("scontrol", f'echo "$@" >> {folder}/asked')):
            (tools / name).write_text(f"#!/bin/sh\n{does}\n")
            (tools / name).chmod(stat.S_IRWXU)
        script = render(read_template(None), submission(folder, command=("sh", "-c", launch)))
        variables = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **environ}
        self.process = subprocess.Popen(["bash", "-c", script], env=variables, stdin=subprocess.DEVNULL)

    def end(self) -> tuple[int, str]:
        """Exit code, and what was asked of Slurm."""
        code = self.process.wait(PATIENCE_S)
        asked = self.folder / "asked"
        return code, asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize(
    ("code", "more", "requeued"),
    [
        (0, {}, False),
        (3, {}, False),
        (129, {}, True),
        (129, {"SLURM_RESTART_COUNT": "3"}, False),
        (130, {}, False),
        (138, {"SLURM_RESTART_COUNT": "30"}, True),
        (138, {"state": "COMPLETING"}, False),
    ],
)
def test_what_is_requeued(code: int, more: dict[str, Any], requeued: bool, tmp_path: Path) -> None:
    batch = Batch(tmp_path, f"exit {code}", **more)
    assert batch.end() == (code, "requeue 7\n" if requeued else "")


def test_a_signal_to_the_script_reaches_the_launcher(tmp_path: Path) -> None:
    launch = f"trap 'echo checkpoint > {tmp_path}/kept; exit 138' USR1; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    batch = Batch(tmp_path, launch)
    while not (tmp_path / "ready").exists():
        assert batch.process.poll() is None
        time.sleep(0.02)
    batch.process.send_signal(signal.SIGTERM)
    assert batch.end() == (138, "requeue 7\n")
    assert (tmp_path / "kept").exists()
