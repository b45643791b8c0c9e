"""``runs/NAME-NNN/``: what a run leaves behind.

A full disk or a removed directory does not end the run: what cannot be written is reported once
(`RunDirectory.on_failure`) and listed at the end (`RunDirectory.unwritten`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zmqtrain.durable import replace_file
from zmqtrain.errors import RunDirectoryError, UsageError
from zmqtrain.observe.append_file import AppendFile
from zmqtrain.observe.trace import Trace
from zmqtrain.strict_json import dumps

#: The kind of the first line of ``events.jsonl``, and the version of those after it. It grows when the meaning of a line changes,
#: but not when kinds or values are added.
SCHEMA, VERSION = "schema", 1
#: A run's number has at least three digits, so that a listing is in order.
_DIGITS = 3
#: In the directory of a launch that tunes itself: a link to the run that is training, or that trained last.
TRAINING = "training"


class RunDirectory:
    """The files of one run. Make it by `create`; `close` writes the trace and closes the event file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace = Trace()
        self.on_failure: Callable[[str], None] = lambda _text: None
        """Called with a line for the user when something cannot be written, once for each file."""
        self.on_flush: Callable[[], None] = lambda: None
        """Called after `flush`."""
        self._unwritten: dict[str, str] = {}  # what could not be written, and why
        self._gone = False
        self._events = AppendFile(path / "events.jsonl")
        self._new = not (path / "events.jsonl").stat().st_size
        self._logs: dict[str, AppendFile] = {}
        self._closed = False
        self._made = False  # by `create`

    @classmethod
    def create(cls, name: str, *, parent: Path = Path("runs"), exact: Path | None = None) -> RunDirectory:
        """Make a new directory: with the next free number under ``parent``, or ``exact``, which must be empty or not exist.

        Raises `UsageError` if it cannot be made.
        """
        try:
            path = exact if exact is not None else next_folder(parent, name)
            if exact is not None:
                exact.mkdir(parents=True, exist_ok=True)
                if any(exact.iterdir()):
                    raise UsageError(f"the run directory {exact} is not empty: choose another with --run-dir")
            (path / "logs").mkdir()
            (path / "checkpoints").mkdir()
        except OSError as error:
            raise UsageError(f"cannot make a run directory: {error}. Choose a writable folder with --run-dir") from error
        directory = cls(path)
        directory._made = True
        return directory

    @classmethod
    def go_on(cls, path: Path) -> RunDirectory:
        """Open the directory of a run that continues: its events and logs stay, the files from its end are removed.

        Raises `UsageError` if it cannot be written.
        """
        try:
            for name in ("summary.json", "error.json"):
                (path / name).unlink(missing_ok=True)
            for name in ("logs", "checkpoints"):
                (path / name).mkdir(exist_ok=True)
            return cls(path)
        except OSError as error:
            raise UsageError(f"cannot continue in the run directory {path}: {error}") from error

    @classmethod
    def take_over(cls, path: Path, sizes: Mapping[str, int]) -> tuple[RunDirectory, list[str]]:
        """Open the directory of a run whose launcher was ended, for another one. ``sizes``: how far each file had come; what is
        beyond has never been acknowledged, and comes again.

        Returns also the names of the files that are shorter, since their machine was ended, too. Raises `UsageError`."""
        shorter = []
        try:
            for file in [path / "events.jsonl", *(path / "logs").glob("*.log")]:
                name = str(file.relative_to(path))
                size, found = sizes.get(name, 0), file.stat().st_size
                if found > size:
                    os.truncate(file, size)
                elif found < size:
                    shorter.append(name)
                    _whole_lines(file)
            return cls(path), shorter
        except OSError as error:
            raise UsageError(f"cannot continue in the run directory {path}: {error}") from error

    def sizes(self) -> dict[str, int]:
        """How far each file has come that this process has written to."""
        logs = {f"logs/{log_name(peer)}.log": log.size for peer, log in self._logs.items()}
        return {"events.jsonl": self._events.size, **logs}

    @property
    def checkpoints(self) -> Path:
        """The folder with the checkpoints."""
        return self.path / "checkpoints"

    @property
    def unwritten(self) -> list[str]:
        """What could not be written, or has been removed, with the reasons; empty if everything is there."""
        if self._gone:
            return [f"{self.path}: it was removed while the run was using it"]
        return [f"{name}: {reason}" for name, reason in self._unwritten.items()]

    @property
    def gone(self) -> bool:
        """Whether the directory has been removed."""
        return self._gone

    def failed(self, name: str, reason: str) -> None:
        """Note that something of the run could not be written."""
        if name not in self._unwritten:
            self._unwritten[name] = reason
            if not self._gone:
                self.on_failure(f"warning: {self.path / name} cannot be written: {reason}. Training continues")

    def write(self, name: str, text: str) -> None:
        """Write a file atomically: readers never see an incomplete file. Raises `RunDirectoryError`."""
        try:
            replace_file(self.path / name, text)
        except OSError as error:
            raise RunDirectoryError(self.path / name, error.strerror or str(error)) from error

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically. Raises `RunDirectoryError`."""
        self.write(name, dumps(value, indent=2) + "\n")

    def leave(self, name: str, value: Any) -> None:
        """`write_json` at the run's end; if that is not possible, it is noted."""
        self._look()
        try:
            self.write_json(name, value)
        except RunDirectoryError as error:
            self.failed(name, error.reason)

    def event(self, event: dict[str, Any]) -> None:
        """Append a line to ``events.jsonl``."""
        if self._closed:
            return
        if self._new:
            self._new = False
            values = {"version": VERSION, "reason": f"the lines have version {VERSION} (docs/events.md)"}
            about = {"host": "", "role": "coordinator", "rank": None, "step": None, "kind": SCHEMA, "values": values}
            self._events.write(dumps({"time": event.get("time"), **about}) + "\n")
        self._events.write(dumps(event) + "\n")

    def log(self, peer: str, text: str) -> None:
        """Append to the log of a role."""
        name = f"logs/{log_name(peer)}.log"
        file = self._logs.get(peer)
        if file is None:
            try:
                file = self._logs[peer] = AppendFile(self.path / name)
            except OSError as error:
                self.failed(name, error.strerror or str(error))
                return
        file.write(text)
        self._check(name, file.flush())

    def flush(self) -> None:
        """Make the written events visible to readers of the file."""
        self._look()
        self._check("events.jsonl", self._events.flush())
        self.on_flush()

    def close(self) -> None:
        """Close the event file and the logs, and write the trace. Idempotent."""
        if self._closed:
            return
        self._look()
        self._closed = True
        logs = {f"logs/{log_name(peer)}.log": log for peer, log in self._logs.items()}
        for name, file in {"events.jsonl": self._events, **logs}.items():
            self._check(name, file.close())
            if not file.lost_bytes:
                self._unwritten.pop(name, None)  # it failed for a while only
        try:
            self.write("trace.json", self.trace.to_json())
        except RunDirectoryError as error:
            self.failed("trace.json", error.reason)

    def discard(self) -> None:
        """Remove everything, if `create` has made it: the run has been refused. A directory that had a run before stays."""
        self._closed = True
        for file in (self._events, *self._logs.values()):
            file.close()
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)

    def _check(self, name: str, reason: str) -> None:
        if reason:
            self.failed(name, reason)

    def _look(self) -> None:
        """Notice that the directory has been removed."""
        if not self._gone and not self._closed and self._events.removed and not (self.path / "topology.toml").exists():
            self._gone = True
            self.on_failure(f"warning: {self.path} has been removed: nothing about this run is kept. Training continues")


def log_name(peer: str) -> str:
    """``worker/3`` as a file name."""
    return peer.replace("/", "-")


def _whole_lines(file: Path) -> None:
    """Cut off a last line that is not whole."""
    data = file.read_bytes()
    os.truncate(file, data.rfind(b"\n") + 1)


def latest_run(parent: Path = Path("runs")) -> Path | None:
    """The run that was started last."""
    return max(runs_of(parent), key=began, default=None)


def began(path: Path) -> float:
    """When the run of a directory has begun, or was taken up again. The directory's own time tells less: reports of old runs, and
    whatever else is put into it, change it."""
    return (path / "topology.toml").stat().st_mtime


def runs_of(parent: Path = Path("runs")) -> list[Path]:
    """The run directories of a folder, by name: those that are named ``NAME-NNN``, and others in which a run has begun."""
    found = [path for path in parent.glob("*") if (path / "topology.toml").exists()]
    return sorted(path for path in found if "-" in path.name or (path / "events.jsonl").exists())


def find_run(name: str, *, parent: Path = Path("runs")) -> Path:
    """The directory of a run given as a path, as ``NAME-NNN``, or as ``latest``. Raises `UsageError`."""
    if name == "latest":
        found = latest_run(parent)
        if found is None:
            raise UsageError(f"there is no run in {parent.absolute()}")
        return found
    for path in (Path(name), parent / name):
        if (path / "topology.toml").exists():
            return path
    known = ", ".join([path.name for path in runs_of(parent)][-5:])
    there = f"the latest runs in {parent.absolute()} are {known}" if known else f"{parent.absolute()} contains no runs"
    raise UsageError(f"there is no run {name} (a folder with topology.toml): {there}")


def training_of(path: Path) -> Path:
    """The run that trains, for a run that tunes itself; any other run is returned as it is."""
    training = path / TRAINING
    return training.resolve() if training.is_dir() else path


def next_folder(parent: Path, name: str) -> Path:
    """Make the next free ``parent/NAME-NNN``. Raises ``OSError``."""
    parent.mkdir(parents=True, exist_ok=True)
    numbers = [path.name[len(name) + 1 :] for path in parent.glob(f"{name}-*")]
    number = max((int(text) for text in numbers if text.isdigit()), default=0)
    while True:  # mkdir decides between two simultaneous launches
        number += 1
        path = parent / f"{name}-{number:0{_DIGITS}}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
