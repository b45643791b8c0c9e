"""Reads the output of a role from a pipe, line by line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

#: A longer line is passed on in pieces: a progress bar may never end its line.
LONGEST_LINE = 8192
_READ = 65536


class OutputReader:
    """Reads a pipe until its last writer has closed it. ``take`` gets whole lines, several at a time."""

    def __init__(self, file: int, take: Callable[[str], None]) -> None:
        """Takes over ``file``, the reading end. Must be made on the loop's thread."""
        self._file, self._take = file, take
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._open = True
        self.ended = asyncio.Event()
        os.set_blocking(file, False)
        self._loop.add_reader(file, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._file, _READ)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > LONGEST_LINE:
            end = len(data)
        self._rest = data[end:]
        if end:
            self._take(data[:end].decode(errors="replace"))

    def close(self) -> None:
        """Stop reading, and pass on what is left. Idempotent."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._file)
            os.close(self._file)
            if self._rest:
                self._take(self._rest.decode(errors="replace") + "\n")
            self.ended.set()
