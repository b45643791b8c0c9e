"""``zmqtrain agent`` started by a scheduler: find the launcher, wait for it, and become the agent of one host."""

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
from zmqtrain.launcher.environment.place import DEFAULT_PORT, NodePlace
from zmqtrain.membership.environment import COORDINATOR_ADDRESS, TOKEN, RoleEnvironment
from zmqtrain.membership.secret import read_token, run_token
from zmqtrain.net.loop import run

#: The variable that says how long a node waits for its launcher, in seconds.
WAIT = "ZMQTRAIN_WAIT"
DEFAULT_WAIT_S = 600.0


def say(text: str) -> None:
    """Print a line for the scheduler's log."""
    print(f"zmqtrain agent: {text}", file=sys.stderr, flush=True)


def needed_token(environ: Mapping[str, str]) -> str:
    """The token. Raises `UsageError` if there is none."""
    token = read_token(environ)
    if token is None:
        raise UsageError(
            "the run's token is missing: set ZMQTRAIN_TOKEN, or set ZMQTRAIN_TOKEN_FILE to a file that only you can read. It "
            "must be the same on all nodes, and hard to guess, like the output of `openssl rand -hex 32`"
        )
    return token


def wait_of(environ: Mapping[str, str], default_s: float = DEFAULT_WAIT_S) -> float:
    """Seconds to wait for the launcher. Raises `UsageError` if the variable has a wrong value."""
    text = environ.get(WAIT, "")
    try:
        wait_s = float(text) if text else default_s
    except ValueError as error:
        raise UsageError(f"{WAIT} is {text!r}; it must be a number of seconds") from error
    return wait_s


async def run_node(
    place: NodePlace, environ: Mapping[str, str], *, port: int = DEFAULT_PORT, wait_s: float = DEFAULT_WAIT_S
) -> int:
    """Run a node: join the launcher, run the agent of the host that it assigns, and report the end. Returns the exit code.

    Raises like `wait_for_start`, and `UsageError` if the environment does not say where the launcher is.
    """
    if place.launcher is None:
        raise UsageError(
            f"the launcher's address is missing: set {COORDINATOR_ADDRESS}=HOST:PORT (or MASTER_ADDR and MASTER_PORT; the "
            f"variables of Slurm, Kubeflow, SkyPilot and a JobSet like launch/jobset.yaml are understood, too)"
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
    """Handles SIGTERM and SIGINT, which end this node in an orderly way, until the agent itself handles them."""

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
    """Set the host's variables and change to its folder. Returns the agent's own environment."""
    variables = {**start["variables"], TOKEN: run_token(token, start["run"])}
    os.environ.update(start["environment"])
    if start["folder"] is not None:
        os.chdir(os.path.expanduser(start["folder"]))
    environment = RoleEnvironment.from_environ(variables)
    assert environment is not None
    return _listening(environment)


def _listening(environment: RoleEnvironment) -> RoleEnvironment:
    """The same environment, but listening on all addresses if the given one is not this machine's own."""
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
    """Run the agent, and stop it when the launcher says so."""
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
    """A message to stop is turned into a signal to this process, which the agent already handles."""
    while (said := await join.hear()) is not None:
        if said.get("stop") == 0:
            os._exit(128 + signal.SIGKILL)  # at once: the roles end with their parent process
        if "stop" in said:
            signal.raise_signal(signal.SIGINT)  # not SIGTERM, which may mean that the machine is about to be taken away


def main(place: NodePlace, *, port: int = DEFAULT_PORT, wait_s: float = DEFAULT_WAIT_S) -> int:
    """Run this node until it ends. Returns the exit code. Raises `ZmqTrainError`."""
    return run(run_node(place, os.environ, port=port, wait_s=wait_s))
