"""The settings of an endpoint: windows, limits and time-outs, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zmqtrain.arena.arena import Arena
from zmqtrain.net.endpoint import PeerId
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
    """Run token: peers with a different one are refused."""
    host: str = "127.0.0.1"
    """Address to bind; ``0.0.0.0`` or ``::`` for all interfaces."""
    advertise: str = ""
    """Address to which others connect; empty: ``host``, or this machine's name if ``host`` means all interfaces."""
    port: int = 0
    """Port of the control lane; 0: any free one."""
    bulk_port: int = 0
    """Port of the bulk lane; 0: any free one."""
    epoch: int = 0
    """Of a process that leads the run: the number of its leadership. A process with a higher one makes it worthless."""
    ports: tuple[int, int] | None = None
    """The first and last port of the range for free ports; ``None``: the kernel's own range."""
    window_bytes: int = 16 * MIB
    """The most bytes of one sender that are stored here, on the bulk lane, before any receive asks for them."""
    control_window_bytes: int = MIB
    """The same for small values on the control lane."""
    outbox_bytes: int = 16 * MIB
    """The number of bytes queued for one peer beyond which ``send`` waits."""
    chunk_bytes: int = MIB
    """Tensors are sent in pieces of this many bytes: longer ones delay more urgent messages, shorter ones cost time per piece."""
    inflight_bytes: int = 8 * MIB
    """The most bytes passed to the transport and not acknowledged yet: what a more urgent message may have to wait for."""
    inflight_messages: int = 512
    """The same in pieces, for small messages. The transport's high-water marks are higher, so they are never reached."""
    limits: Limits = DEFAULT_LIMITS
    """Limits on one message."""
    greet_s: float = 60.0
    """A peer for which this process waits must have answered the first greeting after this time. Peers start in any order, so it is
    as long as joining may take."""
    hello_s: float = 0.25
    """The time before an unanswered greeting is repeated; it doubles up to eight times this value."""
    lost_s: float = 10.0
    """A peer is lost if its link stays down for this time."""
    gone_s: float | None = None
    """A peer whose connection broke, and where nobody listens any more, is lost after this time without a message of it: its
    process has ended. ``None``: after ``lost_s``, as if its host had vanished; another process may take its place."""
    probe_s: float = 1.0
    """If nothing was acknowledged for this time, the peer is asked how far it got."""
    probe_later_s: float | None = None
    """The same for requests and answers, if these are acknowledged by what follows: by an answer, or the next request. ``None``:
    they are acknowledged as everything else."""
    ack_s: float = 0.001
    """An acknowledgement waits this long for further ones (large amounts are acknowledged sooner)."""
    ack_with_bytes: int = 0
    """An acknowledgement may travel with a message of up to this many bytes, behind no more than as many; longer messages are
    acknowledged at once. 0: acknowledgements travel alone."""
    heartbeat_s: float = 1.0
    """Interval of the transport's own heartbeats; its I/O thread sends them, so Python may be busy. Down after three unanswered."""
    heartbeats_s: Mapping[PeerId, float] = field(default_factory=dict)
    """Other intervals, for links to some peers."""
    pause_s: float = 0.0
    """How long small messages may wait here for others, with which they are taken: to be woken by each costs as much as to handle
    it."""
    flush_s: float = 5.0
    """How long ``close`` waits for queued messages to be acknowledged."""
    farewell_s: float = 0.3
    """How long a farewell may then take to be sent; a peer that does not receive it notices after ``lost_s``."""
    peers: int = 0
    """The number of other processes that it will be connected to, as far as that is known beforehand."""
    io_threads: int = 1
    """The number of threads that move bytes between memory and sockets."""
    arena: Arena | None = field(default=None, repr=False)
    """This process's slot in its host's memory; ``None``: it shares none."""
    identity: Identity | None = field(default=None, repr=False)
    """This process's keys, and its list of callers to admit; ``None``: connections are in plain text."""
    shaping: Shaping | None = field(default=None, repr=False)
    """A network to be as slow as; ``None``: as fast as possible."""

    def heartbeat_to(self, peer: PeerId) -> float:
        """The interval of heartbeats on links to this peer, in seconds."""
        return self.heartbeats_s.get(peer, self.heartbeat_s)
