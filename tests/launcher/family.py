"""Processes that a test has started, and all that these start in turn: none may be left behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil


class Family:
    """Grows whenever it is looked at: who ends between two looks takes the knowledge of its children along."""

    def __init__(self) -> None:
        self._known: set[psutil.Process] = set()

    def add(self, pid: int) -> None:
        """A process of the test's own; none, if it has ended already."""
        with suppress(psutil.NoSuchProcess):
            self._known.add(psutil.Process(pid))

    def seen(self) -> set[psutil.Process]:
        """Every process that was seen so far, after another look."""
        look = list(self._known)
        while look:
            process = look.pop()
            for child in _children(process):
                if child not in self._known:
                    self._known.add(child)
                    look.append(child)
        return self._known

    def kill(self) -> None:
        """End whoever is left."""
        for process in self.seen():
            if process.is_running():
                process.kill()

    def all_gone(self, patience_s: float) -> None:
        """Nothing is left behind."""
        _, alive = psutil.wait_procs(self._known, timeout=patience_s)
        assert not alive, f"left behind: {[process.cmdline() for process in alive]}"


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Its children. The kernel has a list for each thread; psutil would read of every process on the machine."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        if not process.is_running():  # its number may be another one's
            return []
        lists = list(Path(f"/proc/{process.pid}/task").glob("*/children"))
        if not lists:  # or this kernel does not tell
            return process.children()
        for each in lists:
            with suppress(OSError):  # the thread has ended meanwhile
                for pid in each.read_text().split():
                    with suppress(psutil.NoSuchProcess):
                        found.append(psutil.Process(int(pid)))
    return found
