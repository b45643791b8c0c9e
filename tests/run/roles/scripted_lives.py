"""Roles that do nothing but begin and end as a test has written down: as coroutines, and as what forked processes call.

A fork server imports this by its name alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from zmqtrain.errors import PeerLostError, TaskError
from zmqtrain.run.report import report_of


def marks_of(script: Path, peer: str) -> Path:
    """Where a role notes what has happened to it, a line each, over all its processes."""
    return script.with_name(peer.replace("/", "-"))


def note(script: Path, peer: str, text: str) -> None:
    """Write a mark."""
    with marks_of(script, peer).open("a") as file:
        file.write(text + "\n")


def marks(script: Path, peer: str) -> list[str]:
    """The marks so far."""
    file = marks_of(script, peer)
    return file.read_text().splitlines() if file.exists() else []


def _next_life(script: Path, peer: str) -> str:
    lives: list[str] = json.loads(script.read_text())[peer]
    return lives[marks(script, peer).count("began")]


async def live(script: Path, peer: str, die: Callable[[], None]) -> None:
    """The next life that the script has for this role: each process takes one."""
    life = _next_life(script, peer)
    note(script, peer, "began")
    if life == "ends well":
        return
    if life == "fails":
        raise TaskError("the task is wrong")
    if life == "loses another":
        raise PeerLostError("server/0", "it has closed its endpoint")
    if life == "dies":
        die()
    if life == "ignores SIGTERM":
        try:
            await asyncio.sleep(100_000)
        except asyncio.CancelledError:
            note(script, peer, "ignored")
    await asyncio.sleep(100_000)


def main(report: int) -> int:
    """A forked process: SIGTERM cancels, an error leaves a report, as in `zmqtrain.launcher.child`."""
    script, peer = Path(os.environ["ZMQTRAIN_DATA"]), os.environ["ZMQTRAIN_PEER"]

    async def role() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await live(script, peer, lambda: os.kill(os.getpid(), signal.SIGKILL))

    try:
        asyncio.run(role())
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except (TaskError, PeerLostError) as error:
        value = report_of(error, peer)
        os.write(report, json.dumps(value).encode())
        return int(value["exit_code"])
    return 0
