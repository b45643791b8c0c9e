"""Run directories for the dashboard's tests, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zmqtrain.observe.run_directory import RunDirectory


def make_run(parent: Path, name: str = "digits-001", *, steps: int = 5, ended: bool = True) -> Path:
    """A run of two workers that has a log, some steps and an evaluation."""
    directory = RunDirectory.create("digits", exact=parent / name)
    directory.write("topology.toml", '[job]\nname = "digits"\ntask = "task.py"\n[compute]\ngroups = 2\ngroup_size = 1\n')
    add = directory.event
    for rank in range(2):
        add(_event("join", rank, None, 100.0, reason=f"worker/{rank} joined"))
    for step in range(steps):
        for rank in range(2):
            values = {"loss": 1.0 / (1 + step), "seconds": 0.5, "compute_s": 0.1 + 0.2 * rank, "exposed_s": 0.1, "samples": 4}
            add(_event("step", rank, step, 101.0 + step, lr=0.1, staleness=1.0, **values))
    reason = "worker/1 is slow: its device computes 3.0 times as long as the others', since step 0"
    add(_event("slow", 1, steps, 101.0 + steps, what="device", factor=3.0, over=False, reason=reason))
    add(_event("eval", 0, steps, 101.0 + steps, eval_accuracy=0.75, seconds=0.1))
    add({**_event("note", 0, None, 102.0 + steps, text="<b>kept</b> & done"), "role": "coordinator", "rank": None})
    load = {"seconds": 2.0, "messages": 10, "bytes": 4000, "busy": 0.25, "waiting": 0.5, "waiting_most": 3}
    add({**_event("load", 0, None, 102.5 + steps, **load), "role": "server"})
    add(_event("traffic", 0, None, 103.0 + steps, sent={"worker/1": 2000}))
    add({**_event("ended", 0, None, 103.0 + steps, reason="all roles have finished"), "role": "coordinator", "rank": None})
    directory.log("worker/0", "hello\nfrom worker 0\n")
    directory.close()
    if ended:
        directory.write_json("summary.json", {"status": "done", "steps": steps, "samples": 8, "seconds": 9.0, "eval": {}})
    return directory.path


def add_events(path: Path, *lines: tuple[str, int, int | None, dict[str, Any]]) -> None:
    """Add events of workers, (kind, rank, step, values), to a run."""
    directory = RunDirectory.go_on(path)
    for kind, rank, step, values in lines:
        directory.event(_event(kind, rank, step, 120.0, **values))
    directory.close()


def _event(kind: str, rank: int, step: int | None, time: float, **values: Any) -> dict[str, Any]:
    return {"time": time, "host": "a", "role": "worker", "rank": rank, "step": step, "kind": kind, "values": values}
