"""Processes of this machine that another process has started: found again, followed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import psutil

from zmqtrain.death import open_pidfd
from zmqtrain.launcher.engine import UNKNOWN_EXIT
from zmqtrain.wire.payload import Value


def trace_of(pid: int) -> Value:
    """A process's number and start time, since numbers are used again."""
    return [pid, psutil.Process(pid).create_time()]


def process_of(trace: Any) -> psutil.Process | None:
    """The process with this trace, if it still runs."""
    if not isinstance(trace, list):
        return None
    number, created = trace
    try:
        process = psutil.Process(int(number))
        alive = abs(process.create_time() - float(created)) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if alive else None


class AdoptedHandle:
    """An agent on this machine that is not a child of this process."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._file = open_pidfd(process.pid)
        except ProcessLookupError:
            self._file = None
            self._ended.set_result(None)
        else:
            if self._file is None:
                raise OSError(f"this system cannot tell when process {process.pid} ends")
            asyncio.get_running_loop().add_reader(self._file, self._end)

    def _end(self) -> None:
        if self._file is not None:
            asyncio.get_running_loop().remove_reader(self._file)
            os.close(self._file)
            self._file = None
        if not self._ended.done():
            self._ended.set_result(None)

    async def wait(self) -> int:
        await asyncio.shield(self._ended)
        return UNKNOWN_EXIT

    async def stop(self, grace_s: float) -> None:
        """End it: ask it, and kill it after ``grace_s`` seconds."""
        if grace_s > 0 and not self._ended.done():
            self._signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.wait()
        self._signal(signal.SIGKILL)
        await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._file is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, number)
