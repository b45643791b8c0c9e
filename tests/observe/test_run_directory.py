"""What a run leaves behind: numbers that nobody shares, files that are whole, runs that can be found again."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.observe.append_file import AppendFile
from zmqtrain.observe.run_directory import RunDirectory, find_run, runs_of


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
    assert json.loads((directory.path / "events.jsonl").read_text().splitlines()[-1])["kind"] == "step"
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

    event = json.loads((directory.path / "events.jsonl").read_text().splitlines()[-1], parse_constant=refuse)
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


def test_what_is_put_into_an_old_run_does_not_make_it_the_latest(tmp_path: Path) -> None:
    for name, time in (("job-001", 2_000), ("job-002", 3_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "topology.toml").write_text("")
        os.utime(tmp_path / name / "topology.toml", (time, time))
    (tmp_path / "job-001" / "report.html").write_text("")
    os.utime(tmp_path / "job-002", (1_000, 1_000))
    assert find_run("latest", parent=tmp_path).name == "job-002"


def test_runs_have_any_name_but_a_folder_with_a_file_of_ones_own_is_none(tmp_path: Path) -> None:
    for name in ("job-001", "mine"):
        RunDirectory.create("job", exact=tmp_path / name).close()
    for name in ("job-001", "mine", "files"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "topology.toml").write_text("")
    assert [path.name for path in runs_of(tmp_path)] == ["job-001", "mine"]


def test_what_cannot_be_written_is_said_once_and_listed(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").symlink_to("/dev/full")
    directory = RunDirectory.go_on(tmp_path / "run")
    directory.on_failure = said.append
    for _ in range(2):
        directory.event({"kind": "step"})
        directory.flush()
    directory.log("worker/0", "a line\n")
    directory.leave("summary.json", {"status": "done"})
    directory.close()
    assert said == [f"warning: {tmp_path}/run/events.jsonl cannot be written: No space left on device. Training continues"]
    assert directory.unwritten == ["events.jsonl: No space left on device"]
    assert (tmp_path / "run" / "logs" / "worker-0.log").read_text() == "a line\n"
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_directory_that_somebody_removes(tmp_path: Path) -> None:
    said: list[str] = []
    directory = RunDirectory.create("job", parent=tmp_path)
    directory.on_failure = said.append
    shutil.rmtree(directory.path)
    directory.event({"kind": "step"})
    directory.flush()
    directory.log("worker/0", "a line\n")
    directory.leave("summary.json", {"status": "done"})
    directory.close()
    assert said == [f"warning: {directory.path} has been removed: nothing about this run is kept. Training continues"]
    assert directory.gone
    assert directory.unwritten == [f"{directory.path}: it was removed while the run was using it"]


def test_lines_that_had_no_room_come_later_and_whole(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "file")
    file.write("one\n")
    assert file.flush() == ""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        file.write("two\nthree\n")
        assert file.flush() == "File too large"
        assert (tmp_path / "file").read_text() == "one\ntwo\n"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    file.write("four\n")
    assert file.close() == ""
    assert (file.lost_bytes, (tmp_path / "file").read_text()) == (0, "one\ntwo\nthree\nfour\n")
