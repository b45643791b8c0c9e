"""What a machine is like, as far as a run needs to know: versions, room on disks and in memory, and what names mean there."""

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

#: Of one name, so many addresses are told.
_MOST_ADDRESSES = 8
_SHARED = Path("/dev/shm")


def facts_here(names: Sequence[str], packages: Sequence[str], paths: Sequence[str]) -> dict[str, Any]:
    """This machine's facts, as plain values. ``names``: what to look up; ``packages``: whose versions to tell;
    ``paths``: whose existence."""
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
    """Where runs have their folders on hosts (as `zmqtrain.launcher.ssh.remote` has it)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "zmqtrain" / "runs"


def _room(path: Path) -> list[Any]:
    """A folder, and how many bytes are free there: in the nearest one that exists, where it will be made."""
    there = next(folder for folder in (path, *path.parents) if folder.is_dir())
    return [str(path), shutil.disk_usage(there).free]


def _total(path: Path) -> int | None:
    return shutil.disk_usage(path).total if path.is_dir() else None


def _addresses(name: str) -> list[str]:
    """What a name, or an address, means here; nothing where it is unknown."""
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(target[0]) for *_, target in found))[:_MOST_ADDRESSES]
