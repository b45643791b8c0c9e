"""The facts about a machine that a run needs: versions, free space on disks and in memory, and how names resolve there."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zmqtrain.arena import shared_memory_missing
from zmqtrain.arena.region import available_bytes
from zmqtrain.processors import gpus, processors

#: The most addresses that are reported for a name.
_MOST_ADDRESSES = 8
_SHARED = Path("/dev/shm")


def facts_here(names: Sequence[str], packages: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    """This machine's facts, as plain values. ``names``: host names to resolve; ``packages``: packages whose versions to report;
    ``paths``: paths whose existence to report."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "processors": processors(),
        "gpus": gpus(),
        "run_folder": _room(_state_folder()),
        "scratch_folder": _room(Path(tempfile.gettempdir())),
        "shm_bytes": _total(_SHARED),
        "shared_memory_missing": shared_memory_missing(),
        "memory_bytes": available_bytes(),
        "names": {name: _addresses(name) for name in names},
        "paths": {path: Path(path).exists() for path in paths},
        "system": sys.platform,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _state_folder() -> Path:
    """The parent of runs' folders on hosts (as `zmqtrain.launcher.ssh.remote` has it)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "zmqtrain" / "runs"


def _room(path: Path) -> list[Any]:
    """A folder and the bytes that are free there, taken from the nearest parent that exists."""
    there = next(folder for folder in (path, *path.parents) if folder.is_dir())
    return [str(path), shutil.disk_usage(there).free]


def _total(path: Path) -> int | None:
    return shutil.disk_usage(path).total if path.is_dir() else None


def _addresses(name: str) -> list[str]:
    """The addresses to which a name, or an address, resolves here; empty if it is unknown."""
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(target[0]) for *_, target in found))[:_MOST_ADDRESSES]
