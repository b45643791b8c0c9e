"""What `zmqtrain top` shows, from a run's directory."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.observe.dashboard.runs import make_run
from zmqtrain.cli.main import app
from zmqtrain.observe.dashboard.follow import Followed, seen
from zmqtrain.observe.dashboard.screen import Screen
from zmqtrain.observe.run_directory import RunDirectory


def more(path: Path, *lines: tuple[str, int, dict[str, Any]]) -> None:
    """Add events of workers to a run."""
    directory = RunDirectory.go_on(path)
    for kind, rank, values in lines:
        at = {"time": 120.0, "host": "b", "role": "worker", "rank": rank, "step": 5, "kind": kind}
        directory.event({**at, "values": values})
    directory.close()


def shown(path: Path, width: int, *, height: int | None = None, status: str = "running", encoding: str = "utf-8") -> list[str]:
    run = Followed(path)
    state = seen(run, lambda _: {"status": status})
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=height, color_system=None)
    options = console.options.update(height=height)
    lines = console.render_lines(Screen(state, run.feed(0)), options, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


@pytest.mark.parametrize("width", [80, 120])
def test_all_figures_fit(tmp_path: Path, width: int) -> None:
    path = make_run(tmp_path)
    slow = {"what": "device", "factor": 3.0, "over": False, "reason": "worker/1 is slow: its device"}
    more(path, ("start", 0, {"steps": 20}), ("slow", 1, slow), ("lost", 1, {"reason": "no heartbeat for 8 s"}))
    lines = shown(path, width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    for part in (
        "digits-001  running",
        "25 %",
        "loss 0.2",
        "eval accuracy 0.75",
        "lr 0.1",
        "exposed communication 20 %",
        "staleness 1.00",
    ):
        assert part in text
    assert "worker/1 is slow: its device" in text
    assert "worker/1 lost: no heartbeat for 8 s" in text
    assert "<b>kept</b> & done" in text
    rows = [line for line in lines if line.startswith("worker/") and "█" in line]
    assert [row.split()[:2] for row in rows] == [["worker/0", "a"], ["worker/1", "a"]]
    assert all("500 ms" in row for row in rows)
    bars = [(row.count("█"), row.count("▒"), row.count("░")) for row in rows]
    unit = sum(bars[0]) / 5  # of which computing takes 1 and 3, exposed communication 1 each
    assert [tuple(round(part / unit) for part in bar) for bar in bars] == [(1, 1, 3), (3, 1, 1)]


def test_it_is_no_higher_than_the_terminal_and_trouble_comes_first(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    step = {"loss": 1.0, "seconds": 0.5, "compute_s": 0.1, "exposed_s": 0.1, "samples": 4}
    more(path, *(("step", rank, step) for rank in range(40)), ("lost", 33, {"reason": "gone"}))
    lines = shown(path, 80, height=24)
    assert len(lines) <= 24
    assert any(line.split()[:2] == ["worker/33", "b"] for line in lines)
    assert any(line.endswith(" more") for line in lines)
    assert sum("worker/" in line and "█" in line for line in shown(path, 80)) == 40


def test_a_run_without_steps_and_a_terminal_without_such_characters(tmp_path: Path) -> None:
    assert any(line.startswith("step 0") for line in shown(make_run(tmp_path, "empty-001", steps=0), 80))
    text = "\n".join(shown(make_run(tmp_path), 80, encoding="ascii"))
    assert text.isascii()
    assert "#" in text


def test_what_a_run_says_is_neither_markup_nor_a_command_to_the_terminal(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    more(path, ("note", 0, {"text": "[red]no[/red]\x1b[2J\nmore"}))
    text = "\n".join(shown(path, 120))
    assert "[red]no[/red] [2J more" in text


def test_without_a_terminal_the_command_prints_one_state(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    result = CliRunner().invoke(app, ["top", str(path)])
    assert result.exit_code == 0, result.output
    assert "digits-001  done" in result.output
    assert "worker/1" in result.output
    assert "\x1b" not in result.output
