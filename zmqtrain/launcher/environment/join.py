"""A node joins the launcher: the node's side of `zmqtrain.launcher.environment.rendezvous`. It waits for a launcher that is
late."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zmqtrain.errors import HostLostError, PeerTimeoutError, ProtocolError, RunTokenError, UsageError
from zmqtrain.launcher.environment.node_description import own_description
from zmqtrain.launcher.environment.place import NodePlace
from zmqtrain.launcher.environment.rendezvous import HANDSHAKE_S
from zmqtrain.launcher.environment.sealed import MOST_BYTES, Seal
from zmqtrain.world import random_bits

#: Pauses between attempts in seconds: the first, and the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
#: Seconds by which a node waits longer than the launcher itself for the others to join.
MARGIN_S = 30.0


class _NotYetError(Exception):
    """The launcher does not answer, or has no place at the moment; a later attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Join:
    """A connection to the launcher that has admitted this node."""

    host: str
    """Which host of the run this node is."""
    wait_s: float
    """Seconds that the launcher itself waits for all nodes."""
    seal: Seal
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def hear(self) -> dict[str, Any] | None:
        """The launcher's next message; ``None``: it has disconnected. Raises `ProtocolError` for a message that is not the
        launcher's."""
        try:
            line = await self.reader.readline()
        except (OSError, ValueError):
            return None
        return self.seal.read(line, "the launcher") if line else None

    async def ended(self, code: int) -> None:
        """Report the agent's exit code, if the launcher still listens."""
        with suppress(OSError):
            self.writer.write(self.seal.write(ended=code))
            await self.writer.drain()

    def close(self) -> None:
        self.writer.close()


async def wait_for_start(place: NodePlace, token: str, *, port: int, wait_s: float, say: Callable[[str], None]) -> tuple[Join, Any]:
    """Join the launcher, even if it starts late, and wait until all nodes have joined. ``port``: used if the place names none.

    Returns the open connection, and what to start (``None``: this host has nothing to do).
    Raises `PeerTimeoutError` after ``wait_s`` seconds without a launcher, `UsageError` if it has no place for this node, and
    `RunTokenError` if it has another token.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    pause_s, told = FIRST_PAUSE_S, ""
    assert place.launcher is not None
    while True:
        try:
            join = await _come(place, place.launcher, place.port or port, token)
        except _NotYetError as error:
            if loop.time() + pause_s > deadline:
                where = f"the launcher at {place.launcher}:{place.port or port}"
                why = f"a place in the run (the last try: {error})"
                raise PeerTimeoutError(where, why, wait_s, "ZMQTRAIN_WAIT, or check ZMQTRAIN_COORDINATOR") from error
            if str(error) != told:
                told = str(error)
                say(f"waiting for the launcher at {place.launcher}:{place.port or port}: {told}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            continue
        try:
            said = await _first_word(join)
        except BaseException:
            join.close()
            raise
        if said is not None:
            return join, said.get("start")
        join.close()
        say("the launcher disconnected before all nodes had joined")
        deadline, pause_s = loop.time() + wait_s, FIRST_PAUSE_S


async def _first_word(join: Join) -> dict[str, Any] | None:
    try:
        async with asyncio.timeout(join.wait_s + MARGIN_S):
            return await join.hear()
    except TimeoutError as error:
        raise HostLostError(
            f"the launcher has sent nothing for {join.wait_s + MARGIN_S:g} s: it hangs, or its host is lost"
        ) from error


async def _come(place: NodePlace, host: str, port: int, token: str) -> Join:
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(2 * HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, port, limit=MOST_BYTES)
            return await _greet(reader, writer, place, host, token)
    except (OSError, TimeoutError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else _words(error)
        _close(writer)
        raise _NotYetError(why) from error
    except BaseException:
        _close(writer)
        raise


def _words(error: OSError) -> str:
    """The system's text for an error: event loops have texts of their own, which differ."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else error.strerror or str(error)


def _close(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.close()


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: NodePlace, host: str, token: str) -> Join:
    number = f"{random_bits(128):032x}"
    interface = str(writer.get_extra_info("sockname")[0]).partition("%")[0]
    try:
        theirs = json.loads(await reader.readline() or b"null")
        if theirs is None:
            raise _NotYetError("it is busy with other nodes")
        if not isinstance(theirs, dict) or theirs.get("zmqtrain") != "rendezvous" or not isinstance(theirs.get("number"), str):
            raise ProtocolError(f"the program that listens at {host} is not a launcher of zmqtrain: check ZMQTRAIN_COORDINATOR")
        seal = Seal(token, theirs["number"], number, launcher=False)
        writer.write(json.dumps({"number": number}).encode() + b"\n")
        writer.write(seal.write(description=own_description(place, interface, host).to_value()))
        line = await reader.readline()
        if not line:
            raise _NotYetError("it closed the connection")
        answer = seal.read(line, "the launcher")
    except ValueError as error:
        raise ProtocolError(
            f"the program that listens at {host} is not a launcher of zmqtrain: check ZMQTRAIN_COORDINATOR"
        ) from error
    if "refused" in answer:
        if answer.get("again"):
            raise _NotYetError(str(answer["refused"]))
        if answer.get("token"):
            raise RunTokenError("the launcher")
        raise UsageError(f"the launcher has no place for this node: {answer['refused']}")
    return Join(str(answer["welcome"]), float(answer["wait_s"]), seal, reader, writer)
