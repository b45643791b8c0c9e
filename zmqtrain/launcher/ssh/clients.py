"""The choice of the client that logs in: the library if it is installed, otherwise the system's ``ssh``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from zmqtrain.errors import UsageError
from zmqtrain.launcher.ssh.session import Client


def make_client(kind: Literal["auto", "asyncssh", "system"]) -> Client:
    """The client of this kind. Raises `UsageError` if it is not installed."""
    installed = find_spec("asyncssh") is not None
    if kind == "asyncssh" and not installed:
        raise UsageError(
            '[engine] client = "asyncssh", but it is not installed: pip install zmqtrain[ssh], or use the system\'s ssh'
        )
    if kind == "system" or not installed:
        from zmqtrain.launcher.ssh.system_client import SystemClient

        return SystemClient()
    from zmqtrain.launcher.ssh.library_client import LibraryClient

    return LibraryClient()
