"""The program on the other side of a step: like ssh's, but the agent is its child and ends with it.

It is sent over ``srun``'s standard input, with `remote` and `supervisor`, and needs only Python (3.7 or later). The launcher is in
the same cluster, and Slurm ends what is left of a job; so nothing needs to outlive the channel, and nothing is on the node's disk
but a folder that is copied there.

When a job is preempted, Slurm sends SIGTERM, SIGUSR1 or both, to this program or to all processes of the step. They are passed on
to the agent as SIGUSR1, which asks for a checkpoint; the roles ignore them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

from zmqtrain.launcher.ssh.remote import LOG_BYTES, Channel, HostSide, serve
from zmqtrain.launcher.ssh.supervisor import KILLED_S, LOOK_S, PARENT, end_session

#: As `zmqtrain.launcher.signals.ON_TERM`, which may not be here.
ON_TERM = "ZMQTRAIN_ON_TERM"


class StepHost(HostSide):
    """This node's part of one run."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._agent: Any = None
        self._output = -1

    def begin(self, run: str, host: str, environment: dict[str, str]) -> dict[str, Any]:
        """Request: say which run this is."""
        os.environ.update(environment)
        sys.path[:0] = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
        self._environment = environment
        return {"agent": "none"}

    def unpack(self, size: int) -> dict[str, Any]:
        """Request: receive a folder, as a tar file that follows. Answers with its path."""
        self._folder = tempfile.mkdtemp(prefix="zmqtrain-")
        return super().unpack(size)

    def start(self, command: list[str], environ: dict[str, str], folder: str) -> dict[str, Any]:
        """Start the agent. ``environ`` holds secrets: it goes into the agent's environment and nowhere else."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        folder = os.path.expanduser(folder)
        variables = {**os.environ, **self._environment, **environ, ON_TERM: "checkpoint", PARENT: str(os.getpid())}
        self._output, write = os.pipe()
        os.set_blocking(self._output, False)
        try:
            self._agent = subprocess.Popen(
                [os.path.expanduser(command[0]), *command[1:]],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(f"cannot start {command[0]} in {folder}: {error.strerror}") from None
        finally:
            os.close(write)
        return {"pid": self._agent.pid}

    def follow(self, offset: int) -> dict[str, Any] | None:
        """Request: send the agent's output until it ends, or until the next request."""
        while True:
            # Test for the end first, and read the output then: so the last output is complete.
            code = self._agent.poll()
            offset = self._tell(offset)
            if code is not None:
                return {"exit": code, "at": offset}
            if self._channel.pending(LOOK_S, None if self._output < 0 else self._output):
                return None

    def stop(self, grace_s: float, offset: int) -> dict[str, Any]:
        """Request: end the agent and all that it started: ask it, and kill it after the grace time. Answers with the exit code."""
        agent = self._agent
        if agent is None:
            return {"stopped": None, "at": offset}
        if grace_s > 0 and agent.poll() is None:
            agent.send_signal(signal.SIGINT)  # SIGTERM means preemption here
            with suppress(subprocess.TimeoutExpired):
                agent.wait(grace_s)
        end_session(agent.pid)
        with suppress(subprocess.TimeoutExpired):
            agent.wait(KILLED_S)
        return {"stopped": agent.poll(), "at": self._tell(offset)}

    def remove(self) -> dict[str, Any]:
        """Request: remove the copied folder."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        return {}

    def preempt(self) -> None:
        """Pass on Slurm's signal that the node is about to be taken away."""
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(signal.SIGUSR1)

    def _tell(self, offset: int) -> int:
        while self._output >= 0:
            try:
                data = os.read(self._output, LOG_BYTES)
            except BlockingIOError:
                break
            if not data:
                os.close(self._output)
                self._output = -1
                break
            offset += len(data)
            self._channel.answer({"log": data.decode(errors="replace"), "at": offset})
        return offset


def main() -> None:
    """Answer requests until the other side is gone; then end what was started."""
    channel = Channel()
    host = StepHost(channel)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: host.preempt())
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        serve(channel, host)
    finally:
        with suppress(OSError):  # the agent's last output cannot be sent any more
            host.stop(0, 0)
        host.remove()
