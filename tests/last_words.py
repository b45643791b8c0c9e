"""What a worker of xdist has printed in the test in which it dies: pytest keeps that in a file, which goes with the process.

An abort in C++ says why on standard error, and nowhere else. Each worker says where the file is; the process that started the
workers opens it, and shows it when the worker is gone.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import pytest

#: Of what it has printed, the last bytes.
_MOST_BYTES = 20_000


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        _tell(config, worker)
    else:
        config.pluginmanager.register(LastWords())


def _place(run: str, worker: str) -> Path:
    return Path(tempfile.gettempdir(), f"zmqtrain-tests-{run}-{worker}")


def _tell(config: pytest.Config, worker: dict[str, Any]) -> None:
    """Make a link to the file in which standard error is kept, if it is."""
    capture = getattr(config.pluginmanager.getplugin("capturemanager"), "_global_capturing", None)
    file = getattr(getattr(capture, "err", None), "tmpfile", None)
    if file is not None and Path("/proc/self/fd").exists():
        _place(worker["testrunuid"], worker["workerid"]).symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")


class LastWords:
    """In the process that has started the workers."""

    def __init__(self) -> None:
        self._files: dict[str, IO[bytes]] = {}
        self._stack = ExitStack()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any) -> None:
        place = _place(node.workerinput["testrunuid"], node.gateway.id)
        if place.is_symlink():
            self._files[node.gateway.id] = self._stack.enter_context(place.open("rb"))
            place.unlink()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        file = self._files.get(node.gateway.id)
        if error and file is not None:
            size = os.fstat(file.fileno()).st_size
            said = os.pread(file.fileno(), _MOST_BYTES, max(0, size - _MOST_BYTES)).decode(errors="replace")
            print(f"\n{node.gateway.id} ({error}) has printed last:\n{said}", flush=True)

    def pytest_unconfigure(self) -> None:
        self._stack.close()
