"""What a forked process does: run the role that the environment names, and leave an error report if it fails."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy.random  # noqa: F401 - all workers use it: once, for all of them
import torch
from setproctitle import setproctitle

from zmqtrain.errors import ConnectivityError, HostLostError, TooLateError, UsageError
from zmqtrain.heap import keep_memory
from zmqtrain.launcher.signals import wanted_on_sigterm
from zmqtrain.membership.actions import TOLD_TO_END
from zmqtrain.membership.context import RoleContext
from zmqtrain.membership.environment import RoleEnvironment
from zmqtrain.net.loop import run
from zmqtrain.run.enter import enter_run
from zmqtrain.run.report import report_of
from zmqtrain.run.role import run_role
from zmqtrain.train.random_state import seed_everything

with suppress(ImportError):
    import uvloop  # noqa: F401 - the same

#: A script of the user's own and its arguments, as JSON, for workers that run one.
SCRIPT = "ZMQTRAIN_SCRIPT"
#: The seed of the job, for these.
SEED = "ZMQTRAIN_SEED"
THREADS = "OMP_NUM_THREADS"
#: Folders to import from, separated like PYTHONPATH.
PYTHON_PATH = "ZMQTRAIN_PYTHON_PATH"


def main(report_file: int) -> int:
    """Called in a fresh fork. Writes the error report, if any, as JSON to ``report_file``; returns the exit code."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    environment = RoleEnvironment.from_environ()
    peer = environment.peer if environment else "a role without a name"
    setproctitle(f"zmqtrain {peer}")  # what ps and top show
    try:
        if environment is None:
            raise UsageError("a role was started without the environment variables of its run")
        torch.set_num_threads(int(os.environ.get(THREADS, "1")))
        sys.path[:0] = [folder for folder in os.environ.get(PYTHON_PATH, "").split(os.pathsep) if folder]
        script = os.environ.get(SCRIPT)
        if script and peer.startswith("worker/"):
            _run_script(json.loads(script))
        else:
            return run(_stoppable(environment))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the last place that can say what happened; the exit code tells the agent
        report = report_of(error, peer)
        with os.fdopen(report_file, "w", encoding="utf-8") as file:
            json.dump(report, file)
        return int(report["exit_code"])
    return 0


async def _stoppable(environment: RoleEnvironment) -> int:
    """Run the role until it returns, or SIGTERM tells it to end. Returns the exit code."""
    told = asyncio.Event()
    role = asyncio.ensure_future(_run_role(environment, told))

    def end() -> None:
        told.set()
        role.cancel()

    if not wanted_on_sigterm():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    try:
        await role
    except TooLateError as error:  # it was refused at the door: the others need it no more
        sys.stderr.write(f"{error.peer}: {error.reason}\n")
    except asyncio.CancelledError:
        if not told.is_set():
            raise
        return TOLD_TO_END
    return 0


async def _run_role(environment: RoleEnvironment, told: asyncio.Event) -> None:
    """``told``: set before this is cancelled because the process was told to end."""
    async with enter_run(environment) as (context, _):
        if context.role.device == "modelled" and context.topology.compute.keep_memory:
            keep_memory()  # as on a real CPU: it receives messages of the same sizes in each step
        try:
            await run_role(context)
        except asyncio.CancelledError:
            if told.is_set() and not context.membership.halted.is_set():
                await _say_why(context)
            raise


async def _say_why(context: RoleContext) -> None:
    """Tell the coordinator why this role ends, before the others see that its connections do."""
    peer = context.role.peer
    error = HostLostError(f"{peer} on {context.role.host} was told to end (SIGTERM)")
    with suppress(ConnectivityError, TimeoutError):  # its end says so, too
        async with asyncio.timeout(context.timeouts.flush_s):
            await context.membership.fail({**report_of(error, peer), "exit_code": TOLD_TO_END})


def _run_script(command: list[str]) -> None:
    """Run the user's script as if by ``python SCRIPT ARGS``.

    What it draws before its session begins (a split of the data, say) is the same on all workers. Without a seed, Python's
    generator would be another in each process, and numpy's the same in those of one host, and another on the next host."""
    seed_everything(int(os.environ[SEED]))
    path = Path(command[0])
    sys.argv = command
    sys.path.insert(0, str(path.parent.resolve()))
    runpy.run_path(str(path), run_name="__main__")
