"""What a run leaves behind: numbers that nobody shares, files that are whole, runs that can be found again."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.observe.run_directory import RunDirectory, find_run


def test_numbers_go_up_and_names_do_not_mix(tmp_path: Path) -> None:
    names = []
    for name in ("mnist", "mnist", "mnist-2", "mnist"):
        directory = RunDirectory.create(name, parent=tmp_path)
        names.append(directory.path.name)
        directory.close()
    assert names == ["mnist-001", "mnist-002", "mnist-2-001", "mnist-003"]


def test_the_number_after_999(tmp_path: Path) -> None:
    (tmp_path / "job-999").mkdir()
    directory = RunDirectory.create("job", parent=tmp_path)
    directory.close()
    assert directory.path.name == "job-1000"


def test_launches_at_the_same_moment_get_directories_of_their_own(tmp_path: Path) -> None:
    paths: list[Path] = []

    def create() -> None:
        directory = RunDirectory.create("job", parent=tmp_path)
        paths.append(directory.path)
        directory.close()

    threads = [threading.Thread(target=create) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 16


def test_a_directory_of_ones_own_must_be_empty(tmp_path: Path) -> None:
    directory = RunDirectory.create("job", exact=tmp_path / "a" / "b")
    directory.close()
    assert directory.path == tmp_path / "a" / "b"
    with pytest.raises(UsageError, match="--run-dir"):
        RunDirectory.create("job", exact=tmp_path / "a" / "b")


def test_a_directory_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--run-dir"):
        RunDirectory.create("job", parent=tmp_path / "file" / "runs")


def test_files(tmp_path: Path) -> None:
    directory = RunDirectory.create("job", parent=tmp_path)
    directory.event({"kind": "step", "values": {"loss": 0.5}})
    directory.flush()
    assert json.loads((directory.path / "events.jsonl").read_text())["kind"] == "step"
    directory.log("worker/3", "first\nsecond\n")
    directory.log("worker/3", "third\n")
    directory.write_json("summary.json", {"status": "done"})
    directory.close()
    directory.close()
    assert (directory.path / "logs" / "worker-3.log").read_text() == "first\nsecond\nthird\n"
    assert json.loads((directory.path / "summary.json").read_text()) == {"status": "done"}
    assert "traceEvents" in json.loads((directory.path / "trace.json").read_text())
    assert not [path for path in directory.path.iterdir() if path.name.startswith(".")]


def test_what_is_no_number_in_json_does_not_break_readers(tmp_path: Path) -> None:
    """JSON knows neither NaN nor infinity, and a diverging loss is just that."""
    directory = RunDirectory.create("job", parent=tmp_path)
    directory.event({"kind": "step", "values": {"loss": float("nan"), "all": [float("inf"), 1.0]}})
    directory.write_json("summary.json", {"loss": float("-inf")})
    directory.close()

    def refuse(text: str) -> float:
        raise AssertionError(text)

    event = json.loads((directory.path / "events.jsonl").read_text(), parse_constant=refuse)
    assert event["values"] == {"loss": "NaN", "all": ["Infinity", 1.0]}
    assert json.loads((directory.path / "summary.json").read_text(), parse_constant=refuse) == {"loss": "-Infinity"}


def test_runs_are_found_by_path_by_name_and_as_the_latest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        find_run("latest", parent=tmp_path)
    for _ in range(2):
        directory = RunDirectory.create("job", parent=tmp_path)
        directory.write("topology.toml", "")
        directory.close()
    assert find_run("job-001", parent=tmp_path).name == "job-001"
    assert find_run(str(tmp_path / "job-001")).name == "job-001"
    assert find_run("latest", parent=tmp_path).name in ("job-001", "job-002")
    with pytest.raises(UsageError, match="job-002"):
        find_run("job-003", parent=tmp_path)
