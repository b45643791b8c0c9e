"""Endpoints over ZeroMQ and TCP.

Each endpoint binds two ROUTER sockets (control, bulk), which only receive, and has two DEALER sockets per peer, which only send.
That makes ZeroMQ's edge-triggered file descriptors simple: only the ROUTERs are watched, plain sockets suffice, and a receive loop
returns to the event loop after a budget. Connections are watched through the DEALERs' monitors.

Each ROUTER is a server that asks this endpoint's own ZAP handler which callers to admit. With an identity (`zmqtrain.net.curve`)
everything is encrypted, and each DEALER knows the key of the one server that it calls; without one, callers show a password that
follows from the run's token (`zmqtrain.net.password`). What a caller sends before it is admitted is not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

import zmq

from zmqtrain.errors import HostLimitError, PortInUseError
from zmqtrain.net.address import key_in, split_address, with_key, without_key
from zmqtrain.net.blocking import SESSION, BlockingSockets
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.inherited import close_in_children, leave_to_children
from zmqtrain.net.knock import nobody_listens
from zmqtrain.net.loop import dilation_of
from zmqtrain.net.monitor import CallMonitor
from zmqtrain.net.node import Node
from zmqtrain.net.open_files import allow_open_files, explained
from zmqtrain.net.outbox import BULK, CONTROL
from zmqtrain.net.paced import open_paced
from zmqtrain.net.password import Password
from zmqtrain.net.receiver import IN_PLACE_BYTES, RouterReceiver
from zmqtrain.net.settings import MIB, NetSettings
from zmqtrain.net.switchboard import route_of
from zmqtrain.net.transport import Frames, Receiver, Transport
from zmqtrain.net.trouble import Intrusion, Trouble
from zmqtrain.net.zap import ZapHandler
from zmqtrain.wire.message import Header

#: The longest time-out that ZeroMQ can announce to its peer.
MAX_TTL_MS = 6_553_599
#: The mark of the control lane's packets, "low delay": in a queue with priorities before a slow link they pass tensors.
URGENT_TOS = 0x10
#: The number of connections that may wait to be accepted; with ZeroMQ's default of 100, further ones try again after a second.
BACKLOG = 4096
#: How a socket for both IP versions writes an IPv4 address.
IPV4_AS_IPV6 = "::ffff:"
#: Sockets of one context: six per peer (two DEALERs, and two monitors with two ends each).
MAX_SOCKETS = 16384


#: Seconds of silence after which the kernel probes a connection.
KEEPALIVE_S = 30
#: As plain numbers: arithmetic of pyzmq's own enumerations would take as long as the call itself.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
#: Back-off of reconnecting: fast at first, since roles start at about the same time, then slower.
LEAST_PAUSE_S, MOST_PAUSE_S = 0.02, 1.0


def _in_turn(first: int, last: int) -> list[int]:
    """The ports of a range, with another first one in each process: processes that start together rarely try the same port."""
    ports = list(range(first, last + 1))
    begin = 2 * os.getpid() % len(ports)
    return ports[begin:] + ports[:begin]


async def open_zeromq(peer: PeerId, *, token: str | None = None, settings: NetSettings | None = None) -> Node:
    """An endpoint over ZeroMQ, listening. Close it with ``await node.close()``, or use it in ``async with``.

    Raises `PortInUseError` if ``settings.port`` is in use, and `HostLimitError` if ``settings.peers`` are more than this process
    may have connections to.
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
    """`open_zeromq` as a context, which closes the endpoint at its end."""
    node = await open_zeromq(peer, token=token, settings=settings)
    try:
        yield node
    finally:
        await node.close()


class ZeroMQTransport:
    """Moves frames over TCP (`zmqtrain.net.transport.Transport`). Listens from its construction on, delivers from `start` on.

    The context belongs to the endpoint alone and is made here, never at import: contexts do not survive a fork.
    """

    def __init__(self, settings: NetSettings) -> None:
        self._settings = settings
        allow_open_files(settings.peers)
        self._loop = asyncio.get_running_loop()
        self._ms = 1000 * dilation_of(self._loop)  # ZeroMQ's times are real ones
        self._context = zmq.Context(io_threads=settings.io_threads)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._receiver: Receiver | None = None
        self._wires: dict[PeerId, _Wire] = {}
        self._receivers: list[RouterReceiver] = []
        self._blocking: BlockingSockets | None = None
        self._endpoints: list[str] = []
        self.identity = settings.identity
        self._password = Password(settings.token)
        self._zap: ZapHandler | None = None
        try:
            kind = Intrusion.NO_TOKEN if self.identity is None else Intrusion.UNLISTED
            door = self._password if self.identity is None else self.identity
            self._zap = ZapHandler(self._loop, self._context, door, partial(self._turned_away, kind))
            control = self._listen(CONTROL, settings.port)
            bulk = self._listen(BULK, settings.bulk_port)
        except BaseException:
            self._shut()
            self._context.destroy(linger=0)
            self._forget()
            raise
        address = f"tcp://{_bracketed(settings.advertise or _advertised(settings.host))}:{control},{bulk}"
        self._address = address if self.identity is None else with_key(address, self.identity.public)

    @property
    def address(self) -> str:
        return self._address

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        for each in self._receivers:
            each.start(receiver)

    def find(self, peer: PeerId) -> str:
        return ""

    def connect(self, peer: PeerId, address: str, route: bytes) -> None:
        self._check(address)
        self.disconnect(peer)
        self._wires[peer] = _Wire(self, peer, address, route)

    def disconnect(self, peer: PeerId) -> None:
        wire = self._wires.pop(peer, None)
        if wire is not None:
            wire.close(int(self._settings.farewell_s * self._ms))

    def send(self, peer: PeerId, lane: int, frames: Frames, nbytes: int, header: Header | None = None) -> bool:
        wire = self._wires.get(peer)
        return wire is None or wire.send(lane, frames)

    def post(self, address: str, frames: Frames) -> None:
        try:
            self._check(address)
            dealer = self._dealer(CONTROL, b"", address, self._heartbeat_ms())
        except (ValueError, zmq.ZMQError, HostLimitError):
            return  # a process that gives such an address gets no answer
        with contextlib.suppress(zmq.Again):
            dealer.send_multipart(frames, zmq.NOBLOCK)
        dealer.close(linger=int(self._settings.farewell_s * self._ms))

    def blocking(self, peer: PeerId, wait_s: float) -> BlockingSockets:
        """Sockets for a thread that waits, at most ``wait_s`` at a time. ``peer``: this process. Called once; they end with the
        transport at the latest."""
        assert self._blocking is None
        router, port = self._bound(BULK, 0)

        def dealer(to: PeerId, address: str) -> zmq.Socket[bytes]:
            self._check(address)
            return self._dealer(BULK, route_of(peer, SESSION), address, self._heartbeat_ms(to))

        self._blocking = BlockingSockets(router, port, dealer, lambda other: route_of(other, SESSION), self.identity, wait_s)
        return self._blocking

    async def close(self) -> None:
        self._receiver = None
        self._shut()
        for peer in list(self._wires):
            self.disconnect(peer)
        # Ending a context waits for its I/O threads, and these for unsent messages: at most ``farewell_s``.
        ended = asyncio.ensure_future(asyncio.to_thread(self._context.term))
        await asyncio.shield(ended)
        self._forget()

    def _shut(self) -> None:
        """Stop accepting connections."""
        for each in self._receivers:
            each.close()
        self._receivers.clear()
        if self._blocking is not None:
            self._blocking.close()
        if self._zap is not None:
            self._zap.close()
            self._zap = None

    def _forget(self) -> None:
        for each in self._endpoints:
            leave_to_children(each)
        self._endpoints.clear()

    def up(self, peer: PeerId, wire: _Wire) -> None:
        if self._receiver is not None and self._wires.get(peer) is wire:
            self._receiver.on_link_up(peer)

    def down(self, peer: PeerId, wire: _Wire) -> None:
        if self._receiver is not None and self._wires.get(peer) is wire:
            self._receiver.on_link_down(peer)

    def gone(self, peer: PeerId, wire: _Wire) -> None:
        if self._receiver is not None and self._wires.get(peer) is wire:
            self._receiver.on_gone(peer)

    def trouble(self, peer: PeerId, wire: _Wire, trouble: Trouble | None) -> None:
        if self._receiver is not None and self._wires.get(peer) is wire:
            self._receiver.on_trouble(peer, trouble)

    def _turned_away(self, intrusion: Intrusion, origin: str) -> None:
        if self._receiver is not None:
            self._receiver.on_intruder(intrusion, origin.removeprefix(IPV4_AS_IPV6))

    def _check(self, address: str) -> None:
        """Raise `ValueError` for an address that this process cannot connect to."""
        split_address(address)
        if (key_in(address) is None) != (self.identity is None):
            one, other = ("encrypts", "does not") if self.identity is None else ("does not encrypt", "requires encryption")
            raise ValueError(f"the process at {without_key(address)} {one}, but this one {other}")

    def _listen(self, lane: int, port: int) -> int:
        router, found = self._bound(lane, port)
        pause_s = self._settings.pause_s if lane == CONTROL else 0.0
        self._receivers.append(RouterReceiver(self._loop, lane, router, self.identity, self._turned_away, pause_s))
        return found

    def _bound(self, lane: int, port: int) -> tuple[zmq.Socket[bytes], int]:
        """A socket that listens, and its port."""
        router = self._socket(zmq.ROUTER)
        # Callers send the heartbeats, and say after which silence the connection is to be given up. Of a caller that vanishes just
        # after another message only the kernel notices.
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
        (self._password if self.identity is None else self.identity).guard(router)
        # A peer whose connection broke returns under its name before the old connection has timed out here: the new one counts.
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # ROUTER_MANDATORY would make sends to unknown names fail; these sockets never send.
        # All that a peer may have in flight (twice, for what a reconnect repeats) is below the mark, so an I/O thread never stops
        # reading a connection, which would also stop its heartbeats.
        router.setsockopt(zmq.RCVHWM, 2 * self._settings.inflight_messages + 1000)
        # ZeroMQ drops a connection that announces a larger frame before it allocates memory for it. No correct peer sends one:
        # tensors are sent in chunks, and a chunk is never larger than the other side's window allows.
        router.setsockopt(zmq.MAXMSGSIZE, max(64 * MIB, 2 * self._settings.chunk_bytes))
        self._divide_work(router, lane, sends=False)
        # Callers waiting until the I/O thread has time for them: a large run's members come all at once, and so may strangers.
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        self._bind(router, port)
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._endpoints.append(endpoint)
        close_in_children(endpoint)
        return router, int(endpoint.rpartition(":")[2])

    def _bind(self, router: zmq.Socket[bytes], port: int) -> None:
        """Bind to the port; 0: to any free one, of the range if there is one. Closes the socket if that fails."""
        host, within = self._settings.host, self._settings.ports
        tried: Sequence[int | str] = (port,) if port else ("*",) if within is None else _in_turn(*within)
        for number in tried:
            try:
                router.bind(f"tcp://{_bracketed(host)}:{number}")
                return
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and number != tried[-1]:
                    continue
                router.close(linger=0)
                if error.errno == zmq.EADDRINUSE:
                    raise PortInUseError(f"{host}:{port}" if port else host, None if port else within) from error
                raise OSError(error.errno, f"cannot listen on {host}:{port or 'any port'}: {error}") from error

    def _dealer(
        self,
        lane: int,
        route: bytes,
        address: str,
        heartbeat_ms: int,
        watch: Callable[[zmq.Socket[bytes]], CallMonitor] | None = None,
    ) -> zmq.Socket[bytes]:
        dealer = self._socket(zmq.DEALER)
        monitor: CallMonitor | None = None
        try:
            # A connection that is silently dead (a cable, a host that lost power) is noticed only by missing answers.
            dealer.setsockopt(zmq.HEARTBEAT_IVL, heartbeat_ms)
            dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * heartbeat_ms)
            # How long the other side waits for us, for half-open connections.
            dealer.setsockopt(zmq.HEARTBEAT_TTL, min(3 * heartbeat_ms, MAX_TTL_MS))
            if self.identity is not None:
                self.identity.arm(dealer, address)
            else:
                self._password.arm(dealer)
            if lane == CONTROL:
                dealer.setsockopt(zmq.TOS, URGENT_TOS)
            self._divide_work(dealer, lane, sends=True)
            if route:
                dealer.setsockopt(zmq.ROUTING_ID, route)
            # The link limits what is in flight; the mark only has to be above that plus greetings and acknowledgements.
            dealer.setsockopt(zmq.SNDHWM, 2 * self._settings.inflight_messages + 1000)
            dealer.setsockopt(zmq.RECONNECT_IVL, int(LEAST_PAUSE_S * self._ms))
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, int(MOST_PAUSE_S * self._ms))
            # A host that does not answer at all is tried again after this time, not after the kernel's two minutes.
            dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(3.0 * self._ms))
            # IMMEDIATE stays off: greetings may queue while the connection is being made, and sequence numbers sort out what a
            # reconnect repeats.
            if watch is not None:
                monitor = watch(dealer)
            dealer.connect(split_address(address)[lane])
        except BaseException as error:
            if monitor is not None:
                monitor.close()
            dealer.close(linger=0)
            if isinstance(error, zmq.ZMQError) and (limit := explained(error)) is not None:
                raise limit from error
            raise
        return dealer

    def _divide_work(self, sock: zmq.Socket[bytes], lane: int, *, sends: bool) -> None:
        """Of several I/O threads, half move the tensors that come, and half those that go.

        ZeroMQ itself gives a new connection to the thread with the fewest, whatever they carry: one may then decrypt and encrypt
        everything while the other has nothing to do.
        """
        half = self._settings.io_threads // 2
        if lane == BULK and half:
            threads = (1 << half) - 1
            sock.setsockopt(zmq.AFFINITY, threads << half if sends else threads)

    def _heartbeat_ms(self, peer: PeerId = "") -> int:
        return max(1, int(self._settings.heartbeat_to(peer) * self._ms))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """A socket with the options that both kinds share. Raises `HostLimitError`."""
        try:
            sock = self._context.socket(kind)
        except zmq.ZMQError as error:
            if (limit := explained(error)) is not None:
                raise limit from error
            raise
        sock.setsockopt(zmq.LINGER, 0)  # what must arrive was acknowledged before a socket is closed; farewells set another value
        sock.setsockopt(zmq.IPV6, 1)  # both IP versions: a host's name may mean either
        # A caller that connects and does not speak ZMTP (a port scanner) is dropped after this time.
        sock.setsockopt(zmq.HANDSHAKE_IVL, max(int(self._ms), 3 * self._heartbeat_ms()))
        # TCP buffers (SNDBUF, RCVBUF) are left to the kernel, whose autotuning fits them to the path; fixed ones would limit it.
        return sock


class _Wire:
    """The connections to one peer: a DEALER per lane, which only sends, and its monitor. The bulk lane connects on first use."""

    def __init__(self, transport: ZeroMQTransport, peer: PeerId, address: str, route: bytes) -> None:
        self._transport = transport
        self._peer = peer
        self._address = address
        self._route = route
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, CallMonitor] = {}
        self._again: dict[int, asyncio.TimerHandle] = {}  # lanes that are to be opened again
        self._pause_s = LEAST_PAUSE_S
        self._up: dict[int, bool] = {}
        self._was_up = False
        self._broke = False  # there was a connection, and there is none
        self._knocking: asyncio.Task[bool] | None = None
        self._closed = False
        self._open(CONTROL)

    def send(self, lane: int, frames: Frames) -> bool:
        if lane not in self._dealers and lane not in self._again:
            self._open(lane)
        dealer = self._dealers.get(lane)
        if dealer is None:
            return False
        try:
            if len(frames) == 1:
                dealer.send(frames[0], _NOBLOCK)
            else:
                dealer.send(frames[0], _MORE)
                dealer.send(frames[1], _NOBLOCK, len(frames[1]) < IN_PLACE_BYTES)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int) -> None:
        self._closed = True
        for timer in self._again.values():
            timer.cancel()
        if self._knocking is not None:
            self._knocking.cancel()
        for lane in list(self._dealers):
            self._drop(lane, linger_ms)

    def _drop(self, lane: int, linger_ms: int) -> None:
        if lane in self._monitors:
            self._monitors.pop(lane).close()
        if lane in self._dealers:
            self._dealers.pop(lane).close(linger=linger_ms)

    def _open(self, lane: int) -> None:
        transport = self._transport

        def watch(dealer: zmq.Socket[bytes]) -> CallMonitor:
            self._monitors[lane] = CallMonitor(
                transport._loop,
                dealer,
                encrypted=transport.identity is not None,
                changed=lambda up: self._changed(lane, up),
                failed=lambda trouble, over: self._failed(lane, trouble, over),
                missed=None if transport._settings.gone_s is None else self._knock,
            )
            return self._monitors[lane]

        # A lane that is being opened for the first time does not make the link count as down.
        self._up.setdefault(lane, lane == BULK)
        try:
            self._dealers[lane] = transport._dealer(lane, self._route, self._address, transport._heartbeat_ms(self._peer), watch)
        except HostLimitError:
            self._monitors.pop(lane, None)  # which was closed before its socket was
            # Soon, not now: the peer may be known only once this has returned.
            transport._loop.call_soon(self._failed, lane, Trouble.FILES, True)

    def _changed(self, lane: int, up: bool) -> None:
        again = up and self._up[lane]
        self._up[lane] = up
        if not up and self._was_up:
            self._was_up, self._broke = False, True
            self._transport.down(self._peer, self)
        elif all(self._up.values()) and (not self._was_up or again):
            self._was_up, self._broke = True, False
            self._pause_s = LEAST_PAUSE_S
            self._transport.up(self._peer, self)

    def _failed(self, lane: int, trouble: Trouble | None, over: bool) -> None:
        """The handshake failed, or there is no socket for it. ``over``: ZeroMQ does not try again, but the peer may accept later (a
        member that has not been told of this one yet), or be replaced."""
        if self._closed:
            return
        if over and lane not in self._again:
            self._again[lane] = self._transport._loop.call_later(self._pause_s, self._reopen, lane)
            self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
        self._transport.trouble(self._peer, self, trouble)

    def _knock(self) -> None:
        """ZeroMQ could not connect again, but does not say why: find out whether anybody listens there. Not before: whoever listens
        logs the call of a stranger."""
        if not self._broke or self._knocking is not None or self._closed:
            return
        self._knocking = self._transport._loop.create_task(nobody_listens(split_address(self._address)[CONTROL]))
        self._knocking.add_done_callback(self._knocked)

    def _knocked(self, knocking: asyncio.Task[bool]) -> None:
        self._knocking = None
        if not knocking.cancelled() and knocking.result() and self._broke:
            self._transport.gone(self._peer, self)

    def _reopen(self, lane: int) -> None:
        del self._again[lane]
        self._drop(lane, 0)
        self._open(lane)


def _advertised(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::", "*", "") else host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host or "*"
