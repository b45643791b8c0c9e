"""What the page and the terminal need to know of processes, and ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Control(Protocol):
    """A run's processes. May block: it is called in other threads."""

    def state(self, path: Path) -> dict[str, Any]:
        """The run's state: ``status``, and whatever else ``zmqtrain status --json`` has."""
        ...

    def stop(self, path: Path) -> str:
        """Ask the run to stop with a checkpoint. Returns what happens next. Raises `ZmqTrainError` with why it cannot."""
        ...

    def checkpoint(self, path: Path) -> str:
        """Ask the run to keep a checkpoint, and to continue. Returns and raises as `stop`."""
        ...

    def drain(self, path: Path, host: str) -> str:
        """Have a host leave the run, which continues; returns when it has left. Raises as `stop`."""
        ...
