"""A real launch for tests: the command in a process, what it prints, and every process that it starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.launcher.family import Family
from tests.launcher.ready import Forked, ready_process
from tests.patience import PATIENCE_S

#: How often somebody who waits for a line looks whether the launcher has ended.
_LOOK_S = 0.5


#: The beginning of a script that leaves what `told` reads.
TOLD = """
import os, pathlib
own = pathlib.Path(f"told.{os.getpid()}")
own.write_text(os.environ["ZMQTRAIN_COORDINATOR"] + " " + os.environ["ZMQTRAIN_TOKEN"])
own.replace("told")
"""


def waiting_loss(waits: Mapping[int, str], loss: str) -> str:
    """What comes before a task: ``loss`` of that name, which sometimes takes until the test has made a file.

    Args:
        waits: the names of the files, by the calls of a process that wait for them, the first of which is 1.
        loss: what it returns, as the task names it.
    """
    return f"""
import time
from pathlib import Path

calls = 0

def loss(output, target):
    global calls
    calls += 1
    file = {dict(waits)!r}.get(calls)
    end = time.monotonic() + 60
    while file and not Path(file).exists() and time.monotonic() < end:
        time.sleep(0.01)
    return {loss}(output, target)
"""


def prepare(folder: Path, task: str, topology: str) -> Path:
    """The folder, made if there is none, with ``task.py`` and ``trial.toml``."""
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(task)
    (folder / "trial.toml").write_text(topology)
    return folder


class Launched:
    """``zmqtrain launch`` in ``folder``. Use it in a ``with`` block: whatever is left at its end is killed.

    It and its roles are forked by a process that has imported torch for all launches of these tests, but ``from_nothing``."""

    def __init__(self, folder: Path, *arguments: str, from_nothing: bool = False) -> None:
        self.folder, self.run = folder, folder / "run"
        self.lines: list[str] = []
        self.errors: list[str] = []
        (folder / "tmp").mkdir(exist_ok=True)
        environ = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
        words = ("launch", "--run-dir", str(self.run), *arguments)
        output_read, output_write = os.pipe()
        errors_read, errors_write = os.pipe()
        self._family = Family()
        self._process: subprocess.Popen[bytes] | Forked
        with open(output_write, "wb") as output, open(errors_write, "wb") as errors:
            if from_nothing or not ready_process().serves(environ):
                command = (sys.executable, "-m", "zmqtrain", *words)
                self._process = subprocess.Popen(
                    command, cwd=folder, env=environ, stdout=output, stderr=errors, start_new_session=True
                )
            else:
                zygote, channel = ready_process().zygote(folder, environ, errors_write)
                self._zygote = zygote.pid
                self._family.add(zygote.pid)
                with channel:
                    self._process = ready_process().command(words, folder, environ, output_write, errors_write, channel.fileno())
            self._family.add(self._process.pid)
        self._stdout = open(output_read, encoding="utf-8")  # noqa: SIM115 - the readers', until `_finish_reading`
        self._stderr = open(errors_read, encoding="utf-8")  # noqa: SIM115
        self._said = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(self._stdout, self.lines)),
            threading.Thread(target=self._read, args=(self._stderr, self.errors)),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._family.kill()
        self._process.wait(PATIENCE_S)
        self._finish_reading()

    def __repr__(self) -> str:
        return "\n".join([*self.lines, *self.errors])

    def wait_for(self, pattern: str, times: int = 1) -> list[re.Match[str]]:
        """Wait until so many lines of standard output match."""
        found: list[re.Match[str]] = []

        def enough() -> bool:
            found[:] = [match for line in self.lines if (match := re.search(pattern, line))]
            return len(found) >= times or self._process.poll() is not None

        end = time.monotonic() + PATIENCE_S
        with self._said:
            while not self._said.wait_for(enough, _LOOK_S):  # that it has ended is told to nobody who waits
                assert time.monotonic() < end, f"nothing like {pattern} in:\n{self!r}"
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

    @property
    def zygote(self) -> psutil.Process:
        """What fork servers are forked from; not of a launch that started it itself."""
        return psutil.Process(self._zygote)

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
        self._stdout.close()
        self._stderr.close()


def told(run: Launched) -> tuple[str, str]:
    """The coordinator's address and the run's token, of a launch whose script begins with `TOLD` and has got further."""
    address, token = (run.folder / "told").read_text().split()
    return address, token
