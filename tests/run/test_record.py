"""What the launcher makes of what roles tell, and what is said of a run at its end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.membership.description import RunDescription
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.run.ending import Ending
from zmqtrain.run.record import RunRecord
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology


@pytest.mark.parametrize(
    ("complete", "resumed", "said"),
    [
        ((100, 358), None, r"after step 358 \(9.0 s\): --resume .*run continues$"),
        ((100,), None, r"no checkpoint of that step was kept; --resume .*run continues from step 100$"),
        ((), None, "no checkpoint was kept$"),
        ((), "before/run", "nothing was trained; --resume before/run continues$"),
    ],
)
def test_a_preempted_run_says_from_where_it_goes_on(
    complete: tuple[int, ...], resumed: str | None, said: str, tmp_path: Path
) -> None:
    topology, view = Topology.from_dict({"job": {"name": "x"}}), View()
    directory = RunDirectory.create("x", exact=tmp_path / "run")
    description = RunDescription(topology, place(topology), str(tmp_path), None, resumed)
    record = RunRecord(description, directory, view, world="simulated", clock=lambda: 0.0)
    for step in complete:
        record.checkpoint_event("checkpoint complete", {"step": step, "seconds": 0.1, "folder": "f"})
    record.checkpoint_event("checkpoint failed", {"step": 200, "reason": "checkpoint 200 is given up"})
    record.event("worker/0", {"kind": "stopped", "step": 358, "values": {"kept": False}})
    summary = record.write_up(Ending("preempted", 138), 9.0)
    assert "warning: checkpoint 200 is given up" in view.notes
    assert re.search(said, view.notes[-1])
    assert summary["checkpoints"]["failed"] == [{"step": 200, "reason": "checkpoint 200 is given up"}]
    assert "checkpoint failed" in (tmp_path / "run" / "events.jsonl").read_text()


class View:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.group_of: Mapping[str, int] = {}

    def begin(self, title: str) -> None: ...
    def event(self, event: Mapping[str, Any], now: float) -> None: ...
    def log(self, peer: str, text: str) -> None: ...
    def end(self) -> None: ...

    def regroup(self, group_of: Mapping[str, int]) -> None:
        self.group_of = group_of

    def note(self, text: str) -> None:
        self.notes.append(text)


def record_of(folder: Path, text: str) -> tuple[RunRecord, View]:
    topology = parse_topology("[job]\n" + text)
    view = View()
    directory = RunDirectory.create("trial", parent=folder)
    return RunRecord(RunDescription(topology, place(topology), folder="."), directory, view, world="real", clock=lambda: 0.0), view


def test_a_peer_that_is_left_alone_has_nobody_to_gossip_with(tmp_path: Path) -> None:
    record, view = record_of(tmp_path, '[[hosts]]\nname = "h[1-3]"\nslots = 1\n[exchange]\nkind = "gossip"\n')
    for members in (["worker/0", "worker/2"], ["worker/2"]):
        for peer in members:
            record.report(peer, [{"kind": "view", "time": 1.0, "step": 7, "values": {"members": members, "reason": "lost"}}])
    record._directory.close()
    assert view.notes == ["warning: worker/2 is alone from step 7 on: it has no other worker to gossip with"]


def test_hosts_that_come_bring_their_workers(tmp_path: Path) -> None:
    """Where the file leaves it open who they are, the title says so, and the groups are those that are settled then."""
    record, view = record_of(tmp_path, '[engine]\nkind = "environment"\n')
    assert ": one worker for each device or host, allreduce on the hosts that join;" in record.title()
    hosts = parse_topology('[job]\n[[hosts]]\nname = "n[1-3]"\nslots = 4\n').hosts
    topology = parse_topology('[job]\n[engine]\nkind = "environment"\n').with_hosts(hosts)
    record.settle(RunDescription(topology, place(topology), folder="."))
    assert view.group_of == {"worker/0": 0, "worker/1": 0, "worker/2": 0}
    assert ": 1 group of 3 workers, allreduce on 3 hosts;" in record.title()
    record.event("worker/2", {"kind": "eval", "time": 1.0, "step": 1, "values": {}})
    (run,) = tmp_path.iterdir()
    record._directory.close()
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["host"] == "n3"


def test_the_trace_is_of_a_role_s_first_process_however_many_follow(tmp_path: Path) -> None:
    record, _ = record_of(tmp_path, "")
    for process in range(20):
        if process:
            record.membership_event("join", {"peer": "worker/0", "late": True, "reason": "worker/0 joined"})
        for step in range(3):
            span = {"time": float(process), "seconds": 1.0, "name": "forward", "category": "compute", "values": {}}
            record.report("worker/0", [{"kind": "span", "step": 100 * process + step, **span}])
    steps = [event["args"]["step"] for event in record._directory.trace.events() if event["ph"] == "X"]
    record._directory.close()
    assert steps == [0, 1, 2]


def test_a_warning_of_a_role_is_shown(tmp_path: Path) -> None:
    record, view = record_of(tmp_path, "")
    record.report("worker/0", [{"kind": "warning", "time": 1.0, "step": 0, "values": {"text": "mind this"}}])
    record._directory.close()
    assert view.notes == ["warning: worker/0: mind this"]


def test_a_run_that_could_not_keep_everything_says_what_and_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    record, view = record_of(tmp_path, "")
    for step in (100, 200):
        reason = f"checkpoint {step} cannot be written: No space left on device"
        record.checkpoint_event("checkpoint failed", {"step": step, "reason": reason})
    record.write_up(Ending("done", 0), 9.0)
    assert [note for note in view.notes if "cannot be written" in note] == [
        "warning: checkpoint 100 cannot be written: No space left on device"
    ]
    assert view.notes[-1] == "not kept: 2 checkpoints from step 100 to 200"
    assert (record.exit_code(Ending("done", 0)), record.exit_code(Ending("failed", 3))) == (72, 3)


async def test_a_loss_is_shown_unless_it_turns_out_to_be_the_run_s_end(tmp_path: Path) -> None:
    """A worker with an error in its task closes its endpoint before its agent reports the error."""
    text = '[compute]\ngroups = 2\n[exchange]\nkind = "model_server"\n'
    lost = {"peer": "worker/0", "reason": "lost worker/0: it has closed its endpoint"}
    record, view = record_of(tmp_path, text)
    record.membership_event("lost", lost)
    record.membership_event("no workers", {"reason": "no worker is left; waiting"})
    record.membership_event("exit", {"peer": "worker/0", "reason": "worker/0 exited with code 3"})
    record.membership_event("failed", {"peer": "worker/0", "reason": "ValueError"})
    assert view.notes == ["stopping: worker/0 failed"]
    view.notes.clear()
    record.membership_event("lost", lost)
    record.membership_event("join", {"peer": "worker/0", "late": True, "reason": "worker/0 joined"})
    assert view.notes == ["continuing without worker/0: lost worker/0: it has closed its endpoint", "worker/0 is back"]
    view.notes.clear()
    record.membership_event("lost", lost)
    record.write_up(Ending("done", 0), 9.0)
    assert view.notes[0].startswith("continuing without worker/0")
