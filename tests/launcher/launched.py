"""A real launch for tests: the command in a process, what it prints, and every process that it starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from tests.launcher.family import Family
from tests.launcher.ready import ready_process
from tests.patience import PATIENCE_S
from zmqtrain.launcher.zygote import RUNNING


def prepare(folder: Path, task: str, topology: str) -> Path:
    """The folder, made if there is none, with ``task.py`` and ``trial.toml``."""
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(task)
    (folder / "trial.toml").write_text(topology)
    return folder


class Launched:
    """``zmqtrain launch`` in ``folder``. Use it in a ``with`` block: whatever is left at its end is killed.

    Roles are forked by a process that has imported torch for all launches of these tests, but ``from_nothing``."""

    def __init__(self, folder: Path, *arguments: str, from_nothing: bool = False) -> None:
        self.folder, self.run = folder, folder / "run"
        self.lines: list[str] = []
        self.errors: list[str] = []
        (folder / "tmp").mkdir(exist_ok=True)
        environ = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
        command = (sys.executable, "-m", "zmqtrain", "launch", "--run-dir", str(self.run), *arguments)
        errors_read, errors_write = os.pipe()
        with open(errors_write, "wb") as errors, ExitStack() as stack:
            zygote = None if from_nothing else ready_process().zygote(folder, environ, errors_write)
            inherited: tuple[int, ...] = ()
            if zygote is not None:
                inherited = (stack.enter_context(zygote[1]).fileno(),)
                environ[RUNNING] = str(inherited[0])
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                pass_fds=inherited,
            )
        self._stderr = open(errors_read, encoding="utf-8")  # noqa: SIM115 - the reader's, until `_finish_reading`
        self._said = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, self.lines)),
            threading.Thread(target=self._read, args=(self._stderr, self.errors)),
        ]
        for reader in self._readers:
            reader.start()
        self._family = Family()
        self._family.add(self._process.pid)
        if zygote is not None:
            self._family.add(zygote[0])

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._family.kill()
        self._process.wait()
        self._finish_reading()

    def __repr__(self) -> str:
        return "\n".join([*self.lines, *self.errors])

    def wait_for(self, pattern: str, times: int = 1) -> list[re.Match[str]]:
        """Wait until so many lines of standard output match."""
        found: list[re.Match[str]] = []

        def enough() -> bool:
            found[:] = [match for line in self.lines if (match := re.search(pattern, line))]
            return len(found) >= times or self._process.poll() is not None

        with self._said:
            assert self._said.wait_for(enough, PATIENCE_S), f"nothing like {pattern} in:\n{self!r}"
        assert len(found) >= times, f"it ended without {pattern}:\n{self!r}"
        self.processes()
        return found

    def processes(self) -> set[psutil.Process]:
        """Every process of the launch that was seen so far."""
        return self._family.seen()

    @property
    def pid(self) -> int:
        """The launcher's process."""
        return self._process.pid

    def find(self, words: str) -> psutil.Process:
        """The first process, from the top, with these words on its command line."""
        found = [process for process in self.processes() if process.is_running() and words in " ".join(process.cmdline())]
        return min(found, key=lambda process: process.create_time())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the launcher alone."""
        self._process.send_signal(number)

    def end(self, *, killed: bool = False) -> int:
        """Wait until the launcher and everything below it have ended; the exit code.

        ``killed``: a process that loads data was killed, or its worker, and could not clear Python's own folder away."""
        self.processes()
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            alive = [process.cmdline() for process in self.processes() if process.is_running()]
            raise AssertionError(f"it does not end; {alive} are still there\n{self!r}") from None
        self._family.all_gone(PATIENCE_S)
        self._finish_reading()
        may_stay = ("torchinductor", "pymp-") if killed else ("torchinductor",)
        left = [path.name for path in (self.folder / "tmp").iterdir() if not path.name.startswith(may_stay)]
        assert not left, "files left behind"  # but for torch's own cache, which is empty and stays
        return code

    def json(self, name: str) -> dict[str, Any]:
        """A file of the run directory."""
        value: dict[str, Any] = json.loads((self.run / name).read_text())
        return value

    @property
    def error_text(self) -> str:
        return "\n".join(self.errors)

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            with self._said:
                lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def _finish_reading(self) -> None:
        for reader in self._readers:
            reader.join(PATIENCE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()
