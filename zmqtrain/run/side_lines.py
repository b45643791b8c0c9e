"""Lines of text between the processes of an emulated run, which are all on this machine: FIFOs in its folder.

Faults are told this way, and not over the run's network, because that is what faults cut. A FIFO takes a short line as a whole,
whoever else writes there, and its path may be of any length, unlike a socket's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zmqtrain.net.endpoint import PeerId


def begins_at(shaping: Path, peer: PeerId) -> Path:
    """Where a worker says which steps it begins, if a fault waits for one. ``shaping``: the file with the run's network."""
    return shaping.with_name(f"begins-{peer.replace('/', '-')}")


def orders_for(shaping: Path, host: str) -> Path:
    """Where a host's agent gets orders."""
    return shaping.with_name(f"orders-{host}")


class LineReader:
    """The reading end: calls ``take`` with each line, on the loop's thread, until it is closed. Use it in ``with``."""

    def __init__(self, path: Path, take: Callable[[str], None]) -> None:
        """``path``: a FIFO that exists (`os.mkfifo`). What was written before is lost, as nobody may write without a reader."""
        self._take, self._rest = take, b""
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # as its own writer it never sees an end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._read)

    def __enter__(self) -> LineReader:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Read no more."""
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            self._rest += os.read(self._file, 65536)
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._take(line.decode())


class LineWriter:
    """The writing end. Use it in ``with``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def say(self, text: str) -> bool:
        """Write a line. Returns whether it was: not if nobody reads, or if nobody has for long."""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(self._file, text.encode() + b"\n")
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
