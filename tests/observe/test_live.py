"""What a person sees, and what a machine reads."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from zmqtrain.observe.live import JsonView, PlainView, TableView, make_view

GROUPS = {"worker/0": 0, "worker/1": 0, "worker/2": 1, "server/0": -1}


def event(rank: int, step: int, **values: Any) -> dict[str, Any]:
    """A line of ``events.jsonl`` about a step, as the training loop records it."""
    told = {"loss": 0.5, "samples": 32, "seconds": 0.1, "exposed_s": 0.02, "staleness": 1.5, "staleness_max": 2, **values}
    return {"time": 0.0, "host": "a", "role": "worker", "rank": rank, "step": step, "kind": "step", "values": told}


def evaluation(step: int, **values: Any) -> dict[str, Any]:
    return {**event(0, step), "kind": "eval", "values": {"seconds": 0.1, **values}}


def test_plain_lines_about_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(GROUPS)
    view.begin("a run")
    for step in range(40):
        for rank in range(3):
            view.event(event(rank, step), step / 10)
    view.event(evaluation(40, eval_accuracy=0.987), 4.0)
    view.log("worker/1", "hello\nworld\n")
    view.end()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "a run"
    assert out[-2:] == ["worker/1 | hello", "worker/1 | world"]
    assert "0.9870" in out[-3]
    progress = [line for line in out if line.startswith("step ")]
    assert 4 <= len(progress) <= 5
    assert "loss 0.5000" in progress[-1]
    assert "samples/s" in progress[-1]
    assert "exposed communication" in progress[-1]
    assert "staleness 1.50" in progress[-1]


@pytest.mark.parametrize("staleness", [None, 0.0, [], [1, 2]])
def test_staleness_of_every_kind_of_exchange_can_be_shown(staleness: Any, capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(GROUPS)
    view.event(event(0, 0, staleness=staleness), 1.0)
    assert ("staleness" in capsys.readouterr().out) is bool(staleness == 0.0 or staleness)


def test_a_group_without_workers_no_longer_counts(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView({"worker/0": 0, "worker/1": 1}, every_steps=1)
    view.event({**event(1, 0), "kind": "lost", "values": {"reason": "gone"}}, 0.0)
    view.event(event(1, 2), 0.0)  # comes late
    view.event(event(0, 4), 0.0)
    view.event({**event(1, 0), "kind": "join", "values": {"late": True}}, 0.0)
    view.event(event(0, 5), 0.0)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["0", "5", "3..6"]


def test_a_resumed_run_begins_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView({"worker/0": 0, "worker/1": 1})
    for rank in (0, 1):
        view.event({**event(rank, 970), "kind": "start", "values": {"restored": True, "steps": 2000}}, 0.0)
    view.event(event(0, 970), 0.0)
    assert capsys.readouterr().out.startswith("step 970..971  ")


def test_who_has_not_said_where_it_begins_is_not_at_step_0(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView({"worker/0": 0, "worker/1": 1})
    view.event({**event(0, 970), "kind": "start", "values": {"restored": True, "steps": 2000}}, 0.0)
    view.event(event(0, 970), 0.0)
    assert capsys.readouterr().out.startswith("step 971  ")


def test_progress_every_so_many_steps(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView(GROUPS, every_steps=10)
    for step in range(30):
        view.event(event(0, step), 0.0)
    assert len(capsys.readouterr().out.splitlines()) in (2, 3)


def test_a_table_with_a_row_a_group() -> None:
    text = io.StringIO()
    view = TableView(GROUPS, Console(file=text, force_terminal=True, width=100, color_system=None))
    view.begin("a run")
    for step in range(12):
        for rank in range(3):
            view.event(event(rank, step), step / 4)
    view.event(evaluation(12, eval_accuracy=0.9), 3.0)
    view.log("worker/0", "[bold]not markup[/bold]\n")
    view.end()
    shown = text.getvalue()
    assert "[bold]not markup[/bold]" in shown
    assert "eval_accuracy 0.9000" in shown
    rows = [line.split() for line in shown.splitlines() if line.split()[:2] in (["0", "12"], ["1", "12"])]
    assert len(rows) >= 2


def test_a_bar_with_the_steps_of_all_and_the_time_left() -> None:
    text = io.StringIO()
    view = TableView({"worker/0": 0}, Console(file=text, force_terminal=True, width=80, color_system=None))
    view.begin("a run")
    view.event({**event(0, 0), "kind": "start", "values": {"steps": 40}}, 0.0)
    for step in range(10):
        view.event(event(0, step), float(step))
    view.end()
    assert re.search(r"step 10 of 40 .*25 %  30 s left", text.getvalue())


def test_json_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    view = make_view(GROUPS, json_lines=True)
    assert isinstance(view, JsonView)
    view.begin("a run")
    view.note("a note")
    view.event(event(0, 0, loss=float("nan")), 0.0)
    view.log("worker/0", "hello\n")
    view.end()
    out = capsys.readouterr()

    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in out.out.splitlines()]
    assert [line["kind"] for line in lines] == ["step"]
    assert "worker/0 | hello" in out.err


def test_without_a_terminal_there_are_plain_lines() -> None:
    assert isinstance(make_view(GROUPS, json_lines=False), PlainView)
