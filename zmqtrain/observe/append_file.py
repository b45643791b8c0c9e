"""A file of text to which whole lines are appended, and which may fail (a full disk) without ending anything."""

from __future__ import annotations

import os
from pathlib import Path

#: Lines that could not be written yet are kept up to this many bytes: the disk may have room again.
MOST_KEPT_BYTES = 1 << 20


class AppendFile:
    """Lines are written by `flush`; until then they are kept. The file never holds a part of a line that could not be written."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` if the file cannot be opened."""
        self.path = path
        self.lost_bytes = 0
        """What was given up because it could not be written."""
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.size = os.fstat(self._file).st_size
        """The file's size in bytes."""
        self._kept: list[bytes] = []
        self._kept_bytes = 0

    def write(self, text: str) -> None:
        """Append lines. Without effect after `close`."""
        if self._file is not None:
            data = text.encode(errors="replace")
            self._kept.append(data)
            self._kept_bytes += len(data)

    def flush(self) -> str:
        """Write what is kept. Returns why that failed, empty if it did not; what was not written is kept up to a limit."""
        if self._file is None or not self._kept:
            return ""
        data, self._kept, self._kept_bytes = b"".join(self._kept), [], 0
        written, reason = 0, ""
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            reason = error.strerror or str(error)
            whole = data.rfind(b"\n", 0, written) + 1
            if whole < written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - (written - whole))
            left = data[whole:]
            if len(left) <= MOST_KEPT_BYTES:
                self._kept, self._kept_bytes = [left], len(left)
            else:
                self.lost_bytes += len(left)
        self.size += written if not reason else whole
        return reason

    @property
    def removed(self) -> bool:
        """Whether the file has been removed."""
        return self._file is not None and os.fstat(self._file).st_nlink == 0

    def close(self) -> str:
        """`flush`, and close the file. Idempotent."""
        reason = self.flush()
        self.lost_bytes += self._kept_bytes
        self._kept, self._kept_bytes = [], 0
        if self._file is not None:
            os.close(self._file)
            self._file = None
        return reason
