"""The asynchronous actor that runs on a node of the Ray cluster, and starts and ends the host's agent there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from zmqtrain.launcher.local import LocalEngine, LocalHandle
from zmqtrain.launcher.ssh.inspection import own_versions
from zmqtrain.topology.schema import Host


class AgentActor:
    """The actor of one host. The agent dies with it."""

    def __init__(self) -> None:
        self._engine = LocalEngine()
        self._handle: LocalHandle | None = None

    async def look(self) -> dict[str, Any]:
        """The node's address, and the facts about it."""
        from ray.util import get_node_ip_address

        return {"address": get_node_ip_address(), "versions": own_versions()}

    async def start(self, python: str | None, command: Sequence[str], environ: Mapping[str, str], folder: str) -> None:
        """Start the agent in a folder, with this node's own Python or another. ``environ`` holds secrets."""
        _go_to(folder)
        self._handle = await self._engine.start(Host(name="here"), [python or sys.executable, *command[1:]], environ)

    async def wait(self) -> int:
        """Wait for the agent's end and return its exit code."""
        assert self._handle is not None
        return await self._handle.wait()

    async def stop(self, grace: float) -> None:
        """End the agent, if it was started."""
        if self._handle is not None:
            await self._engine.stop(self._handle, grace)


def _go_to(folder: str) -> None:
    os.chdir(os.path.expanduser(folder))
