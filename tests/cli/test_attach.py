"""Following a run that had begun before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zmqtrain.cli.attach import Follower, run_attach
from zmqtrain.observe.live import make_view
from zmqtrain.observe.run_directory import RunDirectory


def test_what_was_before_counts_but_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create("digits", exact=tmp_path / "run")
    for rank, exposed in ((0, 0.05), (1, 0.05), (2, 0.0)):
        run.event(_event("step", rank, 99, seconds=0.1, exposed_s=exposed, loss=0.5, samples=1))
    run.event(_event("lost", 2, None, reason="it was killed"))
    run.flush()
    run.log("worker/0", "before\n")
    view = make_view({f"worker/{rank}": rank for rank in range(3)}, json_lines=False)
    follower = Follower(run.path, view)
    follower.look()
    assert capsys.readouterr().out == ""
    run.event(_event("step", 0, 100, seconds=0.1, exposed_s=0.05, loss=0.3, samples=1))
    run.flush()
    run.log("worker/0", "after\n")
    follower.look()
    run.close()
    assert capsys.readouterr().out.splitlines() == ["step 100..101  loss 0.4000  exposed communication 50 %", "worker/0 | after"]


def test_a_run_that_has_ended_is_no_line_among_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create("digits", exact=tmp_path / "run")
    run.write("topology.toml", "")
    run.write_json("summary.json", {"status": "halted", "seconds": 3.0, "steps": 7, "exit_code": 72})
    run.close()
    for json_lines in (True, False):
        assert run_attach(str(run.path), json_lines=json_lines) == 72
        said = capsys.readouterr()
        assert "halted after 3" in (said.err if json_lines else said.out)
        assert not (said.out if json_lines else said.err)


def _event(kind: str, rank: int, step: int | None, **values: Any) -> dict[str, Any]:
    return {"time": 1.0, "host": "a", "role": "worker", "rank": rank, "step": step, "kind": kind, "values": values}
