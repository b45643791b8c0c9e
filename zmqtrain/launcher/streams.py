"""Standard output and error that a run may lose: the reader of a pipe ends (``| head``), a terminal goes, a disk is full."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)


def survive_closed_streams() -> None:
    """From now on this process does not fail where its output cannot be written: that output is lost, and no other is.

    Standard files that are closed are opened on the null device first, so that no socket takes their numbers. Call it before
    anything else is opened.
    """
    for number, name, mode in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        if not _is_open(number):
            _to_null(number, mode)
        stream = getattr(sys, name)
        if number and (stream is None or stream is getattr(sys, f"__{name}__")):  # not where a test has put something else
            setattr(sys, name, _lasting(number, stream))


def plain_streams() -> None:
    """Take back `survive_closed_streams`, in a fork: what is printed goes to the standard files at once, and fails where it cannot
    be written, as in a new process without buffers (``PYTHONUNBUFFERED``)."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        raw = io.FileIO(number, "w", closefd=False)
        stream = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _lasting(number: int, before: io.TextIOWrapper | None) -> io.TextIOWrapper:
    raw = _LastingFile(number, "w", closefd=False)
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace")
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )


class _LastingFile(io.FileIO):
    def write(self, data: Buffer, /) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _NOBODY_READS:
                _to_null(self.fileno(), os.O_WRONLY)
            return memoryview(data).nbytes


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _to_null(number: int, mode: int) -> None:
    """Let this file be the null device, also in processes that are started later."""
    nothing = os.open(os.devnull, mode)
    if nothing == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(nothing, number)
        os.close(nothing)
