"""Which releases this process runs with."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

#: What roles need in equal versions; written into the summary, and beside models.
PACKAGES = ("zmqtrain", "torch", "pyzmq", "msgpack", "numpy")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """``python`` and those of the packages that are installed."""
    return dict(_versions(tuple(packages)))


@cache
def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
