"""What a run has recorded comes back to programs as it was, in every version of the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.observe import read
from zmqtrain.observe.run_directory import RunDirectory


def line(kind: str, step: int | None, **values: Any) -> dict[str, Any]:
    return {"time": 7.5, "host": "a", "role": "worker", "rank": 0, "step": step, "kind": kind, "values": values}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = RunDirectory.create("x", exact=tmp_path / "run")
    directory.write("topology.toml", "")
    for event in (line("join", None, host="b", reason="r"), line("step", 0, loss=math.nan), line("step", 1, loss=0.5, lr=0.1)):
        directory.event(event)
    directory.close()
    RunDirectory.go_on(tmp_path / "run").close()
    return tmp_path / "run"


def test_rows_are_what_was_recorded(run: Path) -> None:
    events = read(run)
    assert (events.version, events.broken) == (1, 0)
    assert [row["kind"] for row in events.rows()] == ["join", "step", "step"]
    assert events.rows("step")[1] == line("step", 1, loss=0.5, lr=0.1)
    assert math.isnan(events.rows("step")[0]["values"]["loss"])


def test_a_table_has_a_column_for_each_value(run: Path) -> None:
    first, second = read(run).table("step")
    assert (first["step"], first["lr"], second["lr"], second["loss"]) == (0, None, 0.1, 0.5)
    (join,) = read(run).table("join")
    assert (join["host"], join["value_host"]) == ("a", "b")
    assert read(run).table("eval") == []


def test_the_line_that_is_being_written_is_left_out(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": 9, "kind": "st')
    assert (len(read(run).rows()), read(run).broken) == (3, 1)


def test_files_without_a_version_are_read_and_later_ones_refused(run: Path) -> None:
    path = run / "events.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join(others))
    assert len(read(run).rows()) == 3
    header = json.loads(first)
    assert header["kind"] == "schema"
    header["values"]["version"] = 2
    path.write_text("\n".join([json.dumps(header), *others]))
    with pytest.raises(UsageError, match="has rows of version 2, and this zmqtrain reads version 1: update it"):
        read(run)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_as_a_data_frame(run: Path, library: str) -> None:
    pytest.importorskip(library, reason=f"needs pip install {library}")
    frame = getattr(read(run), library)("step")
    assert list(frame["step"]) == [0, 1]
    assert list(frame["loss"])[1] == 0.5


def test_a_missing_library_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pip install pandas, or use Events\.table"):
        read(run).pandas("step")


def test_its_text_is_short_and_says_what_the_rows_leave_out(run: Path) -> None:
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(line("sums", 9, of="step", count=7)) + '\n{"time": 1')
    assert repr(read(run)) == (
        f"<events in {run / 'events.jsonl'}: 2 step, 1 join, 1 sums; 7 more events are only in the sums; 1 broken line>"
    )
