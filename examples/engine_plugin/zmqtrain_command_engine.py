"""An engine that starts each host's agent with your own command: a container, a namespace, or a scheduler's own tool.

    [engine]
    kind = "command"
    options.start = "podman run --rm --network=host --env-host {image} {agent}"
    options.image = "registry.example/train"

``{agent}`` is the agent's command; ``{name}`` and ``{address}`` are the host's; anything else is a key of ``options``. The command
runs in a shell, and should end when the agent does. The agent's settings are in the command's environment (``--env-host``
passes it on), never on the command line, because they include the run's token.

It is an example of a `zmqtrain.launcher.engine.RemoteEngine`: `open` gets the run, then `start` is called for each host,
`stop` for each agent, and `close` in any case. See docs/engines.md.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from zmqtrain.errors import UsageError
from zmqtrain.launcher.engine import EngineRun
from zmqtrain.topology.schema import Host

#: Options that it has; others stand for themselves in the command.
START, PYTHON = "start", "python"


class CommandHandle:
    """A command that runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def wait(self) -> int:
        """Its exit code, which is the agent's."""
        return await self.process.wait()


class CommandEngine:
    """Implements `zmqtrain.launcher.engine.RemoteEngine`."""

    def __init__(self) -> None:
        self._run: EngineRun | None = None
        self._options: dict[str, str] = {}

    async def open(self, run: EngineRun) -> None:
        """Read the settings. Raises `UsageError` before anything is started."""
        self._run = run
        self._options = {name: str(value) for name, value in run.topology.engine.options.items()}
        if "{agent}" not in self._options.get(START, ""):
            raise UsageError(
                '[engine] options.start is the command that starts an agent: give one with {agent} in it, like "nice {agent}"'
            )
        for host in run.hosts:
            self._command(host, [])  # a wrong one is told now

    async def start(self, host: Host, command: Sequence[str], environ: Mapping[str, str]) -> CommandHandle:
        """Run the command, with the agent's environment beside this process's own."""
        assert self._run is not None
        words = [host.python or self._options.get(PYTHON) or command[0], *command[1:]]
        process = await asyncio.create_subprocess_shell(
            self._command(host, words),
            env={**os.environ, **host.environment, **environ},
            cwd=host.folder,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches the launcher alone, and `stop` all that the command has started
        )
        self._run.say(f"{host.name}: started")
        return CommandHandle(process)

    async def stop(self, handle: CommandHandle, grace: float) -> None:
        """Ask the command and what it has started to end, and kill what has not after ``grace`` seconds."""
        for number, patience_s in ((signal.SIGTERM, grace), (signal.SIGKILL, None)):
            if number == signal.SIGKILL or grace > 0:
                with suppress(ProcessLookupError):
                    os.killpg(handle.process.pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await handle.process.wait()

    async def close(self) -> None:
        """Nothing is left to be done: `stop` was called for every agent."""

    def _command(self, host: Host, agent: Sequence[str]) -> str:
        values = {**self._options, "agent": shlex.join(agent), "name": shlex.quote(host.name), "address": shlex.quote(host.address)}
        try:
            return self._options[START].format_map(values)
        except (KeyError, ValueError, IndexError) as error:
            known = "{agent}, {name}, {address} and keys of options"
            raise UsageError(f"[engine] options.start: {error} is no option; there are {known}") from error
