"""Processes that a test has started, and all that these start in turn: none may be left behind."""

from __future__ import annotations

from contextlib import suppress

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
        for process in list(self._known):
            try:
                self._known.update(process.children(recursive=True))
            except psutil.NoSuchProcess:
                continue
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
