"""``zmqtrain agent`` where a scheduler has started it: find the launcher, wait for it, and become the agent of one host."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from zmqtrain.errors import ConnectivityError, UsageError
from zmqtrain.launcher.addresses import listening_address
from zmqtrain.launcher.agent import run_agent
from zmqtrain.launcher.environment.join import Join, wait_for_start
from zmqtrain.launcher.environment.place import DEFAULT_PORT, Place
from zmqtrain.launcher.environment.secret import read_token, run_token
from zmqtrain.membership.environment import COORDINATOR_ADDRESS, TOKEN, RoleEnvironment
from zmqtrain.net.loop import run

#: How long a node waits for its launcher, in seconds.
WAIT = "ZMQTRAIN_WAIT"
DEFAULT_WAIT_S = 600.0


def say(text: str) -> None:
    """Tell whoever reads the scheduler's log."""
    print(f"zmqtrain agent: {text}", file=sys.stderr, flush=True)


def needed_token(environ: Mapping[str, str]) -> str:
    """The token. Raises `UsageError` where there is none."""
    token = read_token(environ)
    if token is None:
        raise UsageError(
            "the run's token is missing: set ZMQTRAIN_TOKEN, or ZMQTRAIN_TOKEN_FILE to a file that nobody else may read; the same "
            "for all nodes, and hard to guess, like what `openssl rand -hex 32` prints"
        )
    return token


def wait_of(environ: Mapping[str, str], default_s: float = DEFAULT_WAIT_S) -> float:
    """How long to wait for the launcher. Raises `UsageError`."""
    text = environ.get(WAIT, "")
    try:
        wait_s = float(text) if text else default_s
    except ValueError as error:
        raise UsageError(f"{WAIT} is {text!r}; it must be a number of seconds") from error
    return wait_s


async def run_node(place: Place, environ: Mapping[str, str], *, port: int = DEFAULT_PORT, wait_s: float = DEFAULT_WAIT_S) -> int:
    """A node's life: come to the launcher, be the agent of the host that it says, and tell it the end. Returns the exit code.

    Raises as `wait_for_start`, and `UsageError` where the environment does not say where the launcher is.
    """
    if place.launcher is None:
        raise UsageError(
            f"where is the launcher? Set {COORDINATOR_ADDRESS}=HOST:PORT (MASTER_ADDR and MASTER_PORT do, and what Slurm, "
            "Kubeflow, SkyPilot and a JobSet as in launch/jobset.yaml set)"
        )
    token = needed_token(environ)
    join: Join | None = None
    with _Signals() as signals:
        try:
            join, start = await wait_for_start(place, token, port=port, wait_s=wait_of(environ, wait_s), say=say)
            if start is None:
                say(f"{join.host} has nothing to do in this run")
                return 0
            say(f"this is {join.host}")
            code = await _until_ended(join, _become(start, token))
        except asyncio.CancelledError:
            if signals.number is None:
                raise
            code = 128 + signals.number
        finally:
            if join is not None:
                join.close()
    return code


class _Signals:
    """Until the agent itself takes them: SIGTERM and SIGINT end this node in good order."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._task = asyncio.current_task()

    def __enter__(self) -> _Signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        return self

    def __exit__(self, *_error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        self.number = number
        if self._task is not None:
            self._task.cancel()


def _become(start: Mapping[str, Any], token: str) -> RoleEnvironment:
    """Put the host's variables and folder in place. Returns the agent's own environment."""
    variables = {**start["variables"], TOKEN: run_token(token, start["run"])}
    os.environ.update(start["environment"])
    if start["folder"] is not None:
        os.chdir(os.path.expanduser(start["folder"]))
    environment = RoleEnvironment.from_environ(variables)
    assert environment is not None
    return _listening(environment)


def _listening(environment: RoleEnvironment) -> RoleEnvironment:
    """The same, listening at all addresses where the one to listen at is not this machine's own."""
    bind = environment.bind or environment.host
    return environment if _is_own(bind) else replace(environment, bind=listening_address([bind]))


def _is_own(address: str) -> bool:
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.bind(found[0][4])
    except OSError:
        return False
    return True


async def _until_ended(join: Join, environment: RoleEnvironment) -> int:
    """Run the agent, and heed the launcher's word to stop."""
    listening = asyncio.create_task(_listen(join), name="listen to the launcher")
    try:
        code = await run_agent(environment)
    except ConnectivityError as error:
        say(f"{environment.peer}: {error}")
        code = error.exit_code
    finally:
        listening.cancel()
        await asyncio.wait([listening])
    await join.ended(code)
    return code


async def _listen(join: Join) -> None:
    """To stop is as if this process had been told by a signal: the agent has its way of ending by that."""
    while (said := await join.hear()) is not None:
        if said.get("stop") == 0:
            os._exit(128 + signal.SIGKILL)  # at once: the roles end with their parent
        if "stop" in said:
            signal.raise_signal(signal.SIGINT)  # SIGTERM may mean that the machine is taken away


def main(place: Place, *, port: int = DEFAULT_PORT, wait_s: float = DEFAULT_WAIT_S) -> int:
    """Run this node to its end. Raises `ZmqTrainError`."""
    return run(run_node(place, os.environ, port=port, wait_s=wait_s))
