"""A run that a benchmark has started, seen from outside: its roles' processes, and what it has written so far."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil


def roles_of(launcher: int) -> dict[str, psutil.Process]:
    """The processes of the run's roles, by name (``worker/0``): they have written it over their command line.

    ``launcher``: the process that they descend from."""
    found: dict[str, psutil.Process] = {}
    with suppress(psutil.Error):
        for child in psutil.Process(launcher).children(recursive=True):
            with suppress(psutil.Error):
                match = re.fullmatch(r"zmqtrain ((worker|server)/\d+)\s*", " ".join(child.cmdline()))
                if match is not None:
                    found[match[1]] = child
    return found


def whole_lines(path: Path) -> list[str]:
    """The whole lines of a file that is being written; none if it is not there yet."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
