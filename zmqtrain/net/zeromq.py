"""Endpoints over ZeroMQ and TCP.

Each endpoint binds two ROUTER sockets (control, bulk), which only receive, and has two DEALER sockets a peer, which only send.
That makes ZeroMQ's edge-triggered file descriptors simple: only the ROUTERs are watched, plain sockets suffice, and a receive loop
hands back to the event loop after a budget. Connections are watched through the DEALERs' monitors.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import zmq
from zmq.utils.monitor import parse_monitor_message

from zmqtrain.errors import PortInUseError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.loop import dilation_of
from zmqtrain.net.node import Node
from zmqtrain.net.outbox import BULK, CONTROL
from zmqtrain.net.paced import open_paced
from zmqtrain.net.settings import MIB, NetSettings
from zmqtrain.net.transport import Frames, Receiver, Transport

#: A turn of the receive loop ends after so many messages or bytes, so that other tasks run.
BUDGET_MESSAGES = 64
BUDGET_BYTES = 8 * MIB
#: Frames from this size on are used in place; copying smaller ones costs less than their bookkeeping.
IN_PLACE_BYTES = 16 * 1024
#: The longest patience that ZeroMQ can announce to its peer.
MAX_TTL_MS = 6_553_599
#: How the control lane's packets are marked, "low delay": where a queue before a slow link knows priorities, they pass tensors.
URGENT_TOS = 0x10
#: Sockets of one context: six a peer (two DEALERs, two monitors with two ends each).
MAX_SOCKETS = 16384


async def open_zeromq(peer: PeerId, *, token: str | None = None, settings: NetSettings | None = None) -> Node:
    """An endpoint over ZeroMQ, listening. Close it with ``await node.close()``, or use it in ``async with``.

    Raises `PortInUseError` where ``settings.port`` is taken.
    """
    settings = settings or NetSettings()
    if token is not None:
        settings = replace(settings, token=token)
    transport: Transport = ZeroMQTransport(settings)
    if settings.shaping is not None:
        transport = open_paced(transport, settings.shaping, settings)
    try:
        return Node(peer, settings, transport)
    except BaseException:
        await transport.close()
        raise


@contextlib.asynccontextmanager
async def open_endpoint(peer: PeerId, *, token: str | None = None, settings: NetSettings | None = None) -> AsyncIterator[Node]:
    """`open_zeromq` as a context: the endpoint is closed at the end."""
    node = await open_zeromq(peer, token=token, settings=settings)
    try:
        yield node
    finally:
        await node.close()


class ZeroMQTransport:
    """Moves frames over TCP (`zmqtrain.net.transport.Transport`). Listens from construction on, delivers from `start` on.

    The context belongs to the endpoint alone and is made here, never at import: contexts do not survive a fork.
    """

    def __init__(self, settings: NetSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._ms = 1000 * dilation_of(self._loop)  # ZeroMQ's times are real ones
        self._context = zmq.Context(io_threads=settings.io_threads)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._receiver: Receiver | None = None
        self._wires: dict[PeerId, _Wire] = {}
        self._ears: list[_Ear] = []
        try:
            control = self._listen(CONTROL, settings.port)
            bulk = self._listen(BULK, 0)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._address = f"tcp://{_bracketed(settings.advertise or _advertised(settings.host))}:{control},{bulk}"

    @property
    def address(self) -> str:
        return self._address

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        for ear in self._ears:
            ear.start(receiver)

    def find(self, peer: PeerId) -> str:
        return ""

    def connect(self, peer: PeerId, address: str, route: bytes) -> None:
        targets = split_address(address)
        self.disconnect(peer)
        self._wires[peer] = _Wire(self, peer, targets, route)

    def disconnect(self, peer: PeerId) -> None:
        wire = self._wires.pop(peer, None)
        if wire is not None:
            wire.close(int(self._settings.farewell_s * self._ms))

    def send(self, peer: PeerId, lane: int, frames: Frames, nbytes: int) -> bool:
        wire = self._wires.get(peer)
        return wire is None or wire.send(lane, frames)

    def post(self, address: str, frames: Frames) -> None:
        try:
            target = split_address(address)[CONTROL]
            dealer = self._dealer(CONTROL, b"", target)
        except (ValueError, zmq.ZMQError):
            return  # whoever gives such an address gets no answer
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart(frames, zmq.NOBLOCK)
        dealer.close(linger=int(self._settings.farewell_s * self._ms))

    async def close(self) -> None:
        self._receiver = None
        for ear in self._ears:
            ear.close()
        self._ears.clear()
        for peer in list(self._wires):
            self.disconnect(peer)
        # Ending a context waits for its I/O threads, and those for what lingers: at most ``farewell_s``.
        ended = asyncio.ensure_future(asyncio.to_thread(self._context.term))
        await asyncio.shield(ended)

    def up(self, peer: PeerId, wire: _Wire) -> None:
        if self._receiver is not None and self._wires.get(peer) is wire:
            self._receiver.on_link_up(peer)

    def down(self, peer: PeerId, wire: _Wire) -> None:
        if self._receiver is not None and self._wires.get(peer) is wire:
            self._receiver.on_link_down(peer)

    def _listen(self, lane: int, port: int) -> int:
        router = self._context.socket(zmq.ROUTER)
        self._tune(router)
        # A peer whose connection broke comes back under its name before the old connection has timed out here: the new one counts.
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # ROUTER_MANDATORY would make sends to unknown names fail; these sockets never send.
        # What a peer may have in flight (twice, for what a reconnect repeats) fits under the mark, so an I/O thread never stops
        # reading a connection, which would also stop its heartbeats.
        router.setsockopt(zmq.RCVHWM, 2 * self._settings.inflight_messages + 1000)
        # ZeroMQ drops a connection that announces a larger frame before it takes memory for it. No peer of ours sends one:
        # tensors travel in chunks, and a chunk is never larger than the other side's window allows for.
        router.setsockopt(zmq.MAXMSGSIZE, max(64 * MIB, 2 * self._settings.chunk_bytes))
        host = self._settings.host
        endpoint = f"tcp://{_bracketed(host)}:{port or '*'}"
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            router.close(linger=0)
            if error.errno == zmq.EADDRINUSE:
                raise PortInUseError(f"{host}:{port}") from error
            raise OSError(error.errno, f"cannot listen on {host}:{port or 'any port'}: {error}") from error
        self._ears.append(_Ear(self._loop, lane, router))
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _dealer(
        self, lane: int, route: bytes, target: str, watch: Callable[[zmq.Socket[bytes]], None] | None = None
    ) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        try:
            self._tune(dealer)
            if lane == CONTROL:
                dealer.setsockopt(zmq.TOS, URGENT_TOS)
            if route:
                dealer.setsockopt(zmq.ROUTING_ID, route)
            # The link bounds what is in flight; the mark only has to lie above that, with greetings and acknowledgements.
            dealer.setsockopt(zmq.SNDHWM, 2 * self._settings.inflight_messages + 1000)
            # Back-off of reconnecting: soon at first, since roles start at about the same time, then less often.
            dealer.setsockopt(zmq.RECONNECT_IVL, int(0.02 * self._ms))
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, int(1.0 * self._ms))
            # A host that does not answer at all is tried anew after this time, not after the kernel's two minutes.
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(3.0 * self._ms))
            # IMMEDIATE stays off: greetings may queue while the connection is being made, and what a reconnect repeats is sorted
            # out by the sequence numbers.
            if watch is not None:
                watch(dealer)
            dealer.connect(target)
        except BaseException:
            dealer.close(linger=0)
            raise
        return dealer

    def _tune(self, sock: zmq.Socket[bytes]) -> None:
        settings = self._settings
        sock.setsockopt(zmq.LINGER, 0)  # what must arrive was acknowledged before a socket is closed; farewells say otherwise
        sock.setsockopt(zmq.IPV6, 1)  # both families: a host's name may mean either
        heartbeat_ms = max(1, int(settings.heartbeat_s * self._ms))
        # A connection that is silently dead (a cable, a host that lost power) shows only by missing answers.
        sock.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * heartbeat_ms)
        # The other side's patience with us, for half-open connections.
        sock.setsockopt(zmq.HEARTBEAT_TTL, min(3 * heartbeat_ms, MAX_TTL_MS))
        # Whoever connects and does not speak ZMTP (a port scanner) is dropped after this time.
        sock.setsockopt(zmq.HANDSHAKE_IVL, max(int(self._ms), 3 * heartbeat_ms))
        # TCP buffers (SNDBUF, RCVBUF) stay with the kernel, whose autotuning fits them to the path; fixed ones would cap it.


class _Ear:
    """One ROUTER, which only receives."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lane: int, router: zmq.Socket[bytes]) -> None:
        self._loop = loop
        self._lane = lane
        self._router = router
        self._fd = int(router.getsockopt(zmq.FD))
        self._receiver: Receiver | None = None
        self._more: asyncio.Handle | None = None

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop.add_reader(self._fd, self._drain)
        self._more = self._loop.call_soon(self._drain)  # what came before gives no edge any more

    def _drain(self) -> None:
        """Take messages until there are none (the descriptor tells only of the next one after that) or the budget is used up."""
        if self._more is not None:
            self._more.cancel()
            self._more = None
        router, lane, receiver = self._router, self._lane, self._receiver
        nbytes = 0
        for _ in range(BUDGET_MESSAGES):
            if receiver is None or router.closed:
                return
            try:
                route = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frames: list[bytes | memoryview] = []
            while router.getsockopt(zmq.RCVMORE):
                frame = router.recv(zmq.NOBLOCK, copy=False)
                size = len(frame)
                nbytes += size
                frames.append(frame.buffer if size >= IN_PLACE_BYTES else frame.bytes)
            receiver.on_message(lane, route, frames)
            receiver = self._receiver
            if nbytes >= BUDGET_BYTES:
                break
        self._more = self._loop.call_soon(self._drain)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._receiver = None
        if self._more is not None:
            self._more.cancel()
        self._router.close(linger=0)


class _Wire:
    """The connections to one peer: a DEALER a lane, which only sends, and its monitor. The bulk lane connects when it is used."""

    def __init__(self, transport: ZeroMQTransport, peer: PeerId, targets: tuple[str, str], route: bytes) -> None:
        self._transport = transport
        self._peer = peer
        self._targets = targets
        self._route = route
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, _Monitor] = {}
        self._up: dict[int, bool] = {}
        self._was_up = False
        self._open(CONTROL)

    def send(self, lane: int, frames: Frames) -> bool:
        dealer = self._dealers.get(lane) or self._open(lane)
        try:
            if len(frames) == 1:
                dealer.send(frames[0], zmq.NOBLOCK)
            else:
                dealer.send(frames[0], zmq.NOBLOCK | zmq.SNDMORE)
                dealer.send(frames[1], zmq.NOBLOCK, copy=len(frames[1]) < IN_PLACE_BYTES)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int) -> None:
        # In this order: while a dealer is monitored, its I/O thread holds a lock as it sends an event, and would wait for ever on a
        # monitor that is closed; `disable_monitor` would then wait for the lock, with the GIL held.
        for dealer in self._dealers.values():
            dealer.disable_monitor()
        for monitor in self._monitors.values():
            monitor.close()
        for dealer in self._dealers.values():
            dealer.close(linger=linger_ms)
        self._dealers.clear()
        self._monitors.clear()

    def _open(self, lane: int) -> zmq.Socket[bytes]:
        def watch(dealer: zmq.Socket[bytes]) -> None:
            self._monitors[lane] = _Monitor(self._transport._loop, dealer, lambda up: self._changed(lane, up))

        dealer = self._dealers[lane] = self._transport._dealer(lane, self._route, self._targets[lane], watch)
        # A lane that is being opened for the first time does not make the link count as down.
        self._up[lane] = lane == BULK
        return dealer

    def _changed(self, lane: int, up: bool) -> None:
        again = up and self._up[lane]
        self._up[lane] = up
        if not up and self._was_up:
            self._was_up = False
            self._transport.down(self._peer, self)
        elif all(self._up.values()) and (not self._was_up or again):
            self._was_up = True
            self._transport.up(self._peer, self)


class _Monitor:
    """Tells when a DEALER's connection is made and when it breaks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dealer: zmq.Socket[bytes], changed: Callable[[bool], None]) -> None:
        self._loop = loop
        self._changed = changed
        self._socket = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        self._first: asyncio.Handle = loop.call_soon(self._drain)

    def _drain(self) -> None:
        while not self._socket.closed:
            try:
                event = parse_monitor_message(self._socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._changed(event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._first.cancel()
        self._socket.close(linger=0)


def split_address(address: str) -> tuple[str, str]:
    """``tcp://HOST:CONTROL,BULK`` as the addresses of both lanes. Raises `ValueError` for anything else."""
    host, _, ports = address.rpartition(":")
    control, _, bulk = ports.partition(",")
    if not host.startswith("tcp://") or len(host) < 7 or not (control.isdecimal() and bulk.isdecimal()):
        raise ValueError(f"{address!r} is no address of an endpoint: 'tcp://HOST:PORT,PORT' is")
    return f"{host}:{control}", f"{host}:{bulk}"


def _advertised(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::", "*", "") else host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host or "*"
