"""The numbers an endpoint runs by: windows, limits and time-outs, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zmqtrain.arena.arena import Arena
from zmqtrain.net.shaping import Shaping
from zmqtrain.wire.limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    from zmqtrain.net.curve import Identity  # which needs ZeroMQ; simulated networks do not

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class NetSettings:
    """Settings of one endpoint. The defaults suit a cluster on one Ethernet; tests shorten the times."""

    token: str = field(default="", repr=False)
    """Run token: peers with another one are refused."""
    host: str = "127.0.0.1"
    """Address to bind; ``0.0.0.0`` or ``::`` for all interfaces."""
    advertise: str = ""
    """Address that others connect to; empty: ``host``, or this machine's name where ``host`` means all interfaces."""
    port: int = 0
    """Port of the control lane; 0: any free one, as the bulk lane takes."""
    ports: tuple[int, int] | None = None
    """The first and the last of those that any free one is taken from; ``None``: the kernel's own."""
    window_bytes: int = 16 * MIB
    """Bytes that one sender may have lying at this receiver, on the bulk lane, before anybody here asks for them."""
    control_window_bytes: int = MIB
    """The same for small values on the control lane."""
    outbox_bytes: int = 16 * MIB
    """Bytes queued towards one peer beyond which ``send`` waits."""
    chunk_bytes: int = MIB
    """Tensors travel in pieces of this size: longer ones keep a more urgent message waiting, shorter ones cost time a piece."""
    inflight_bytes: int = 8 * MIB
    """Bytes handed to the transport and not acknowledged yet: what a more urgent message may have to wait for."""
    inflight_messages: int = 512
    """The same in pieces, for small messages. The transport's high-water marks are above it, so they never bite."""
    limits: Limits = DEFAULT_LIMITS
    """Bounds of one message."""
    greet_s: float = 60.0
    """A peer that this process waits for must have answered the first greeting after this time. Peers start in any order, so it is
    as long as joining may take."""
    hello_s: float = 0.25
    """Pause before an unanswered greeting is repeated; doubles up to eight times this."""
    lost_s: float = 10.0
    """A link that stays down for this time means that the peer is lost."""
    probe_s: float = 1.0
    """When nothing was acknowledged for this time, ask the peer how far it got."""
    ack_s: float = 0.001
    """An acknowledgement waits this long for others to go with it (much data is acknowledged sooner)."""
    heartbeat_s: float = 1.0
    """Interval of the transport's own heartbeats; its I/O thread sends them, so Python may be busy. Three unanswered: down."""
    flush_s: float = 5.0
    """How long ``close`` waits for queued messages to be acknowledged."""
    farewell_s: float = 0.3
    """How long a last word may take to leave after that; a peer that does not hear it finds out by ``lost_s``."""
    io_threads: int = 1
    """Threads that move bytes between memory and sockets."""
    arena: Arena | None = field(default=None, repr=False)
    """This process's slot in the memory of its host; ``None``: it shares none."""
    identity: Identity | None = field(default=None, repr=False)
    """This process's keys, and its list of whom it lets in; ``None``: connections are in plain text."""
    shaping: Shaping | None = field(default=None, repr=False)
    """A network to be as slow as; ``None``: as fast as it goes."""
