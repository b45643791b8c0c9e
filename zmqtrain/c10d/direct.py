"""Messages of collectives between ranks of different hosts, from the thread that carries out one to that of the other.

No event loop takes part, and nothing is acknowledged by itself: each message says how many of its receiver's have come. Until then
its sender keeps it. The ranks' endpoints know who is lost, and carry what a broken connection may have lost: a rank that waits for
long asks there for the message, and one that leaves hands over there what may not have come yet.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import struct
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import zmq
from torch import Tensor

from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError, ZmqTrainError
from zmqtrain.host.window import as_bytes
from zmqtrain.net.address import with_port
from zmqtrain.net.blocking import BlockingSockets
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.node import Node
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

#: A message's number, from 1, how many messages of its receiver have come, and the bytes of what the rank calls, which follow.
_HEAD = struct.Struct("<QQH")
_MOST_CALL = (1 << 16) - 1
#: A rank that has waited so long asks for the message at the other's endpoint, and again after twice the time each time.
AGAIN_S = 1.0
_PORT, _MESSAGE = ("direct", "port"), "direct"
_NO_BYTES = torch.empty(0, dtype=torch.uint8)

Message = tuple[bytes, zmq.Frame | None]


class Direct:
    """One rank's side. `meet` first; `send` and `receive` are called in one thread at a time, and block."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, node: Node, sockets: BlockingSockets, ranks: Mapping[int, PeerId], own: PeerId
    ) -> None:
        """``loop``: of ``node``. ``ranks``: those with which this one exchanges messages, and both have one another."""
        self._loop, self._node, self._sockets, self._own = loop, node, sockets, own
        self._peers = dict(ranks)
        self._ranks = {peer: rank for rank, peer in ranks.items()}
        self._sent = dict.fromkeys(ranks, 0)
        self._received = dict.fromkeys(ranks, 0)
        self._kept: dict[int, deque[tuple[int, Message]]] = {rank: deque() for rank in ranks}
        self._come: dict[int, dict[int, tuple[bytes, Tensor]]] = {rank: {} for rank in ranks}
        self._repeated: deque[tuple[int, Tensor]] = deque()  # by the loop's thread, as the next two
        self._ended: dict[int, PeerLostError] = {}
        self._asked: set[asyncio.Task[None]] = set()
        self._closed = False

    async def meet(self, addresses: Mapping[int, str]) -> None:
        """Connect to the others. ``addresses``: of their endpoints. Raises `PeerLostError`."""
        for peer in self._peers.values():
            await self._node.send(peer, _PORT, ValuePayload(self._sockets.port))
        for rank, peer in self._peers.items():
            # It has admitted this one: its endpoint has answered.
            port = (await self._node.receive(peer, _PORT)).meta
            if not isinstance(port, int):
                raise ProtocolError(f"{peer} did not say where it listens")
            self._sockets.connect(peer, with_port(addresses[rank], port))
        self._node.serve(_MESSAGE, self._again)
        for rank in self._peers:
            self._in_background(self._watch(rank))

    def send(self, rank: int, call: bytes, body: zmq.Frame | None = None) -> None:
        """Send what this rank calls, and a tensor's bytes (see `copied`)."""
        self._sent[rank] += 1
        head = _HEAD.pack(self._sent[rank], self._received[rank], len(call)) + call
        self._kept[rank].append((self._sent[rank], (head, body)))
        self._sockets.send(self._peers[rank], head, body)

    def receive(self, rank: int, what: str, timeout_s: float, setting: str) -> tuple[bytes, Tensor]:
        """The next message of a rank: what it calls, and a tensor's bytes, which must not be written.

        Raises `PeerLostError`, `PeerTimeoutError` and `ProtocolError`.
        """
        number = self._received[rank] + 1
        come = self._come[rank]
        began: float | None = None
        again_s = AGAIN_S
        while number not in come:
            if self._take():
                continue
            if self._closed:
                raise PeerLostError(self._own, "its process group was destroyed")
            now = time.monotonic()
            began = now if began is None else began
            ended = self._ended.get(rank)  # first: what it has handed over before
            while self._repeated:
                self._note_repeated(*self._repeated.popleft())
            if number in come:
                break
            if ended is not None:
                raise ended
            if now - began >= timeout_s:
                raise PeerTimeoutError(self._peers[rank], what, timeout_s, setting)
            if now - began >= again_s:
                again_s *= 2
                self._loop.call_soon_threadsafe(self._in_background, self._ask(rank, number, timeout_s))
        self._received[rank] = number
        return come.pop(number)

    async def hand_over(self) -> None:
        """This rank leaves: what may not have come yet is sent by its endpoint."""
        for rank, kept in self._kept.items():
            with suppress(PeerLostError):
                for number, message in list(kept):
                    await self._node.send(self._peers[rank], (_MESSAGE, number), _packed(message))

    def close(self) -> None:
        """Whoever waits gets an error. May be called in any thread."""
        self._closed = True
        self._sockets.close()

    def _take(self) -> bool:
        """Take a message, or wait for one for a while. Returns whether one has come."""
        found = self._sockets.receive()
        if found is None:
            return False
        peer, head, body = found
        self._note(self._ranks[peer], head, _NO_BYTES if body is None else _of(body.buffer))
        return True

    def _note(self, rank: int, head: bytes, content: Tensor) -> None:
        """A message has come. Raises `ProtocolError` for one that a rank never sends."""
        try:
            number, received, length = _HEAD.unpack_from(head)
        except struct.error:
            length = -1
        if len(head) != _HEAD.size + length:
            raise ProtocolError(f"{self._peers[rank]} did not say what it calls")
        kept = self._kept[rank]
        while kept and kept[0][0] <= received:
            kept.popleft()
        if number > self._received[rank]:  # otherwise it has come twice
            self._come[rank].setdefault(number, (head[_HEAD.size :], content))

    def _note_repeated(self, rank: int, message: Tensor) -> None:
        content = message[: _HEAD.size + _MOST_CALL].numpy().tobytes()
        stop = _HEAD.size + (_HEAD.unpack_from(content)[2] if len(content) >= _HEAD.size else 0)
        self._note(rank, content[:stop], message[stop:])

    # In the loop's thread.

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def _again(self, caller: PeerId, number: int) -> Payload | None:
        """The answer to a rank that has waited for this message for long."""
        rank = self._ranks.get(caller)
        kept: Iterable[tuple[int, Message]] = () if rank is None else list(self._kept[rank])
        return next((_packed(message) for found, message in kept if found == number), None)

    async def _ask(self, rank: int, number: int, timeout_s: float) -> None:
        with suppress(ZmqTrainError):  # a loss is noticed by `_watch`
            self._add_repeated(rank, await self._node.request(self._peers[rank], _MESSAGE, number, timeout=timeout_s))

    async def _watch(self, rank: int) -> None:
        """Wait for the loss of a rank, or until it leaves."""
        peer = self._peers[rank]
        try:
            await self._node.receive(peer, (_MESSAGE, 0))  # there is none
        except ZmqTrainError as error:
            with suppress(ZmqTrainError):
                for number in itertools.count(self._received[rank] + 1):
                    self._add_repeated(rank, await self._node.receive(peer, (_MESSAGE, number)))
            reason = error.reason if isinstance(error, PeerLostError) else str(error)
            self._ended[rank] = PeerLostError(peer, reason)

    def _add_repeated(self, rank: int, payload: Payload) -> None:
        if isinstance(payload, TensorPayload):
            self._repeated.append((rank, payload.tensor.view(torch.uint8).clone()))


def copied(tensor: Tensor) -> zmq.Frame:
    """A flat tensor's bytes, copied once for all to whom they are sent."""
    content = as_bytes(tensor)
    # Not by an array of numpy, after which the tensor's storage could not be resized.
    memory = memoryview((ctypes.c_char * content.numel()).from_address(content.data_ptr())).cast("B")
    return zmq.Frame(memory, copy=True)


def _of(buffer: memoryview) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else _NO_BYTES


def _packed(message: Message) -> TensorPayload:
    head, body = message
    return TensorPayload.of(np.frombuffer(head if body is None else head + body.bytes, np.uint8))
