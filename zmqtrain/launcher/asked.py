"""What a command of the user asks of a run's launcher: a file in the run directory, and a signal to look for it.

A request is ``requests/NUMBER.json``. The launcher answers with ``requests/NUMBER.answer``; the command removes both.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zmqtrain.durable import replace_file
from zmqtrain.errors import HostLostError, UsageError, ZmqTrainError

#: Tells a launcher to look for requests.
LOOK = signal.Signals(signal.SIGRTMIN)
_FOLDER = "requests"
#: Seconds between two looks for the answer.
_LOOK_S = 0.1
#: A request is a few words.
_MOST_BYTES = 4096


def ask(path: Path, pid: int, request: Mapping[str, str], *, lives: Callable[[], bool]) -> str:
    """Ask the launcher of the run in ``path`` for something, and wait for its answer. Blocks.

    Args:
        path: the run directory.
        pid: the launcher's.
        request: ``{"what": ...}``, and more.
        lives: whether the launcher still runs.

    Raises `UsageError` if the launcher refuses or cannot be asked, and `HostLostError` if it ends before it answers."""
    if not heeds(pid, LOOK):
        raise UsageError(f"{path.name} cannot be asked for anything: it has not started, or is a simulation")
    folder = path / _FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    file, answer = folder / f"{os.getpid()}.json", folder / f"{os.getpid()}.answer"
    try:
        answer.unlink(missing_ok=True)
        replace_file(file, json.dumps(dict(request)))
        with suppress(ProcessLookupError):
            os.kill(pid, LOOK)
        while not answer.exists():
            if not lives() and not answer.exists():
                raise HostLostError(f"the launcher of {path} has ended before it answered")
            time.sleep(_LOOK_S)
        found = json.loads(answer.read_text(encoding="utf-8"))
    finally:
        file.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
        with suppress(OSError):  # others ask, too
            folder.rmdir()
    if found["refused"]:
        raise UsageError(found["text"])
    return str(found["text"])


class Asked:
    """The launcher's side: requests of other commands, which arrive as files in the run directory."""

    def __init__(self, path: Path) -> None:
        """``path``: the run directory."""
        self._folder = path / _FOLDER
        self._look = asyncio.Event()

    def look(self) -> None:
        """There may be a request. Called by a signal's handler, in the loop."""
        self._look.set()

    async def serve(self, serve: Callable[[Mapping[str, Any]], Awaitable[str]]) -> None:
        """Answer requests, one after another, with what ``serve`` returns for the user, or the `ZmqTrainError` that it raises."""
        while True:
            await self._look.wait()
            self._look.clear()
            for file in sorted(self._folder.glob("*.json")):
                try:
                    request = self._take(file)
                    text, refused = await serve(request), False
                except ZmqTrainError as error:
                    text, refused = str(error), True
                with suppress(OSError):  # who asked is gone
                    replace_file(file.with_suffix(".answer"), json.dumps({"text": text, "refused": refused}))

    @staticmethod
    def _take(file: Path) -> Mapping[str, Any]:
        try:
            with file.open(encoding="utf-8") as opened:
                found = json.loads(opened.read(_MOST_BYTES))
            file.unlink()
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise UsageError(f"{file} is no request")
        return found


def heeds(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal that would otherwise end it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
