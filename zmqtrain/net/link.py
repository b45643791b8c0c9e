"""One peer, as a state machine: greeting, open, closed. Sans-IO.

A link connects a *session* of this process with a session of the peer. Both ends greet until each knows that the other knows it;
only then is anything else sent, so processes may start in any order and nothing is lost to a late joiner::

    greeting ──(a greeting that knows our session)──> open ──(lost, refused, restarted, left)──> closed
        └──────────────(no answer in time, or refused)───────────────────────────────────────────^

A closed link stays closed: a peer that comes back gets a new link, with new numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from zmqtrain.arena.arena import Block
from zmqtrain.errors import WireError
from zmqtrain.net import ending as endings
from zmqtrain.net.credit import Allowance, Window
from zmqtrain.net.demand import UNWANT, WANT, Demand
from zmqtrain.net.ending import Ending
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.flags import BEYOND, CHUNK, FOLLOWS, LASTING, SHARED, check_flags, shows_by_itself
from zmqtrain.net.greeting import Hello
from zmqtrain.net.handshake import Handshake
from zmqtrain.net.incoming import Buffer, Incoming
from zmqtrain.net.lane import Parcel, ReceiveLane, SendLane, Verdict
from zmqtrain.net.mailbox import Mailbox
from zmqtrain.net.outbox import BULK, CONTROL, Outbox, Outgoing
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.shared import SharedBodies
from zmqtrain.wire.message import PHANTOM, Header, encode_header

LANES = (CONTROL, BULK)

ACK = "ack"
PROBE = "probe"
RESUME = "resume"
BYE = "bye"
_UNNUMBERED = frozenset({ACK, PROBE, RESUME, BYE})


class State(Enum):
    GREETING = "greeting"
    OPEN = "open"
    CLOSED = "closed"


class Link:
    """This process's end of the link to one peer."""

    __slots__ = (
        "_ack_later",
        "_arrived_bytes",
        "_busy_at",
        "_busy_s",
        "_down_at",
        "_gone_at",
        "_lent",
        "_notices",
        "_open",
        "_progress_at",
        "_shared",
        "_unannounced_bytes",
        "_unannounced_pieces",
        "ack_due",
        "ack_urgent",
        "allowances",
        "ending",
        "handshake",
        "heard_at",
        "mailbox",
        "number",
        "outbox",
        "peer",
        "receiving",
        "sending",
        "settings",
        "state",
        "up",
        "wants",
        "windows",
    )

    def __init__(
        self,
        peer: PeerId,
        settings: NetSettings,
        mailbox: Mailbox,
        now: float,
        shared: SharedBodies | None = None,
        *,
        number: int = 0,
    ) -> None:
        """``shared``: the memory that this process shares with others of its host, if any. ``number``: how many links the process
        had made before."""
        self.peer = peer
        self.number = number
        self.settings = settings
        self.mailbox = mailbox
        self.handshake = Handshake(settings, now)
        self.state = State.GREETING
        self.ending: Ending | None = None
        self.up = False
        self.outbox = Outbox(settings.outbox_bytes, settings.chunk_bytes)
        self.sending: tuple[SendLane[Outgoing | None], SendLane[Outgoing | None]] = (SendLane(), SendLane())
        self.receiving = (ReceiveLane(), ReceiveLane())
        self.allowances = (Allowance(), Allowance())
        self.windows = (Window(settings.control_window_bytes), Window(settings.window_bytes))
        self.wants = Demand(peer, mailbox, self.windows, self.outbox, self.sending[CONTROL])
        self.ack_due = False
        """Whether the peer should soon be told how far its pieces have arrived, or what it may send."""
        self.ack_urgent = False
        self.heard_at = now
        """When its newest message arrived."""
        self._ack_later = False  # there is something to acknowledge, but it may wait for the next message
        self._shared = shared
        self._lent: dict[tuple[int, int], Block] = {}  # lane and sequence -> memory of the piece
        self._notices: list[tuple[int, Header]] = []
        self._open: dict[int, Incoming] = {}
        self._unannounced_bytes = 0
        self._unannounced_pieces = 0
        self._down_at = now
        self._gone_at: float | None = None  # when it was last known to have ended, or heard of since
        self._progress_at: list[float] = [now, now]
        self._arrived_bytes, self._busy_s, self._busy_at = 0, 0.0, now  # of the bulk lane

    def speed(self, now: float) -> tuple[int, float]:
        """The bytes of large messages that have arrived, and the seconds in which some were on their way."""
        busy = now - self._busy_at if self.sending[BULK].unacknowledged else 0.0
        return self._arrived_bytes, self._busy_s + busy

    # The greeting.

    def greet(self, hello: Hello) -> bool:
        """The peer's greeting has arrived, and `Handshake.judge` found it to continue. Returns whether to greet back."""
        new = self.handshake.remote is None
        answer = self.handshake.greet(hello)
        if new and self.handshake.remote is not None:
            assert self.state is State.GREETING
            self.allowances[CONTROL].grant(hello.control_window)
            self.allowances[BULK].grant(hello.bulk_window)
        if self.handshake.opened and self.state is State.GREETING:
            self.state = State.OPEN
        return answer

    def link_up(self, now: float) -> None:
        """The transport has a connection: greet over it, and find out what was lost with the previous one."""
        self.up = True
        self._gone_at = None
        self.handshake.link_up(now)
        self._progress_at = [now - self.settings.probe_s, now - self.settings.probe_s]
        for sending in self.sending:
            sending.hurry()
        # The last grant of credit may have been lost with the previous connection, and a peer without credit cannot ask for it.
        self.ack_due = self.ack_urgent = self.state is State.OPEN

    def link_down(self, now: float) -> None:
        if self.up:
            self.up = False
            self._down_at = now
            self.handshake.link_down()

    def gone(self, now: float) -> None:
        """Nobody listens any more where the peer did. What it has sent before, a farewell perhaps, may still arrive."""
        if not self.up and self._gone_at is None and self.settings.gone_s is not None:
            self._gone_at = now

    # Time

    def next_deadline(self) -> float | None:
        if self.state is State.OPEN and self.up and self.handshake.settled:  # the usual case, asked for with every message
            control, bulk = self._silent(CONTROL), self._silent(BULK)
            if control and bulk:
                return min(self._probes_at(CONTROL), self._probes_at(BULK))
            return self._probes_at(CONTROL if control else BULK) if control or bulk else None
        times = self.handshake.deadlines()
        if self.state is State.OPEN:
            if not self.up:
                times.append(self._down_at + self.settings.lost_s)
                if self._gone_at is not None and self.settings.gone_s is not None:
                    times.append(self._gone_at + self.settings.gone_s)
            else:
                times.extend(self._probes_at(lane) for lane in LANES if self._silent(lane))
        return min(times, default=None)

    def tick(self, now: float) -> str | None:
        """Do what is due. Returns why the link is to be closed (``"connect"``, ``"gone"``, ``"lost"`` or ``"unanswered"``), or None
        if it is not."""
        settings = self.settings
        if self.state is State.GREETING and self.handshake.late(now):
            return "connect"
        if self._gone_at is not None and settings.gone_s is not None and now >= self._gone_at + settings.gone_s:
            return "gone" if self.state is State.OPEN else None
        if self.state is State.OPEN and not self.up and now >= self._down_at + settings.lost_s:
            return "lost"
        if self.state is State.OPEN and self.handshake.unanswered(now):
            return "unanswered"
        if self.state is State.OPEN and self.up:
            for lane in LANES:
                if self._silent(lane) and now >= self._probes_at(lane):
                    self._progress_at[lane] = now
                    self._probe(lane)
        return None

    def _silent(self, lane: int) -> bool:
        sending = self.sending[lane]
        return bool(sending.unacknowledged) and sending.peek() is None

    def _probes_at(self, lane: int) -> float:
        settings = self.settings
        later_s = settings.probe_later_s
        return self._progress_at[lane] + (settings.probe_s if later_s is None or self.sending[lane].hurried else later_s)

    def _probe(self, lane: int) -> None:
        self.sending[lane].hurry()
        self._notice(lane, Header(PROBE, sequence=self.sending[lane].transmitted))

    def hurry(self) -> None:
        """Somebody waits until everything has arrived: ask how far that is which the peer would acknowledge later, and tell it what
        would be told later."""
        if self._ack_later:
            self.ack_due = self.ack_urgent = True
        sending = self.sending[CONTROL]
        if self.state is State.OPEN and sending.unhurried and sending.peek() is None:
            self._probe(CONTROL)

    # What is sent.

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to send, except an acknowledgement that is due, and no greeting is under way."""
        control, bulk = self.sending  # attributes rather than properties: this is asked five times a message
        return not (
            self.outbox.queues
            or self._notices
            or control.cursor < len(control.unacknowledged)
            or bulk.cursor < len(bulk.unacknowledged)
            or self.state is not State.OPEN
            or not self.handshake.settled
        )

    def next_parcel(self, lane: int) -> Parcel[Outgoing | None] | None:
        """The piece that the transport should take next on this lane; call `parcel_sent` when it has taken it."""
        sending = self.sending[lane]
        if sending.cursor < len(sending.unacknowledged):
            return sending.peek()
        settings = self.settings
        if (
            not self.outbox.queues
            or sending.inflight_bytes >= settings.inflight_bytes
            or len(sending.unacknowledged) >= settings.inflight_messages
        ):
            return None
        allowance = self.allowances[lane]
        message = self.outbox.next(lane, credit=allowance.open)
        if message is None:
            return None
        beyond = message.beyond
        lasting = message.lasting and self._shares and self._shared is not None and self._shared.holds(message.body)
        small = message.exempt and lane == CONTROL and settings.probe_later_s is not None
        acks = self._totals() if small and (self.ack_due or self._ack_later) else ()
        header, body, size = self.outbox.cut(message, sending.next_sequence, whole=lasting, acks=acks)
        lent = None
        if body is not None and self._shared is not None and self._shares:
            lent = self._shared.lend(body)
            if lent is not None:
                flags = header.flags | (SHARED | LASTING if lasting else SHARED)
                header, body = header._replace(flags=flags), memoryview(lent.descriptor)
                if lent.block is not None:
                    self._lent[lane, sending.next_sequence] = lent.block
        if (self.ack_due or self._ack_later) and 0 < settings.ack_with_bytes >= max(size, sending.inflight_bytes):
            header = header._replace(acks=self._totals())
        encoded = encode_header(header, self.settings.limits, None if header.kind == CHUNK else message.label)
        cost = len(encoded) + size
        if not beyond:
            allowance.spend(cost)
        wire_bytes = cost if lent is None else len(encoded) + len(lent.descriptor)
        frames = (encoded,) if body is None else (encoded, body)
        return sending.add(frames, cost, message, wire_bytes=wire_bytes, header=header, hurried=not small)

    def parcel_sent(self, lane: int, now: float) -> None:
        """The transport has taken the parcel."""
        sending = self.sending[lane]
        sending.advance()
        if len(sending.unacknowledged) == 1 or (sending.hurried and sending.transmitted == sending.hurried_from + 1):
            self._progress_at[lane] = now
            if lane == BULK:
                self._busy_at = now

    def owes_credit(self) -> bool:
        """Whether the peer may send more than it knows of: then it is told with the next acknowledgement."""
        control, bulk = self.windows
        if control.limit == control.announced and bulk.limit == bulk.announced:
            return False
        self.ack_due = True
        self.ack_urgent = self.ack_urgent or control.due or bulk.due
        return True

    def show(self) -> None:
        """Let the peer know that this process is there, by a message that needs no answer."""
        if self.state is State.OPEN and self.up:
            self.ack_due = self.ack_urgent = True

    def take_notices(self) -> Sequence[tuple[int, Header]]:
        """Short unnumbered messages that are due, and their lanes."""
        if self.ack_due:
            self._announce()
        notices, self._notices = self._notices, []
        return notices

    def say_bye(self, *, finished: bool) -> None:
        """Send a farewell; first tell how far the peer's pieces have arrived, since it does not listen afterwards."""
        self._announce()
        self._notice(CONTROL, Header(BYE, meta=finished))

    def _announce(self) -> None:
        """Tell how far the peer's pieces have arrived here, and up to where it may send, on each lane."""
        self._notices.append((CONTROL, Header(ACK, acks=self._totals())))

    def _totals(self) -> tuple[int, int, int, int]:
        """What an acknowledgement tells. It is on its way from now on."""
        self.ack_due = self.ack_urgent = self._ack_later = False
        self._unannounced_bytes = self._unannounced_pieces = 0
        (control, bulk), (small, large) = self.receiving, self.windows
        return control.expected, small.announce(), bulk.expected, large.announce()

    @property
    def idle(self) -> bool:
        """Whether everything that was to be sent has arrived."""
        return not self.outbox and not any(sending.unacknowledged for sending in self.sending)

    @property
    def delivering(self) -> bool:
        """Whether anything is on its way to the peer, rather than held back until the peer has room for it."""
        if self.state is not State.OPEN:
            return bool(self.outbox)
        return any(
            sending.unacknowledged or self.outbox.next(lane, credit=self.allowances[lane].open) is not None
            for lane, sending in enumerate(self.sending)
        )

    def _notice(self, lane: int, header: Header) -> None:
        self._notices.append((lane, header))

    # What arrives.

    def receive(self, lane: int, header: Header, size: int, body: Buffer, now: float) -> Ending | None:
        """Handle one message of the peer; ``size`` is its header's. Returns the link's end if the message is a farewell.

        Raises `WireError` for a message that a correct peer never sends.
        """
        self.heard_at = now
        if self._gone_at is not None:
            self._gone_at = now
        flags = header.flags
        if flags:
            check_flags(header.kind, flags)
        if header.kind in _UNNUMBERED:
            return self._noticed(lane, header, now)
        if header.acks:
            self._told(header.acks, now)
        if flags & SHARED:
            if self._shared is None:
                raise WireError("a descriptor of memory that is not shared")
            body = self._shared.borrow(body)
        verdict = self.receiving[lane].judge(header.sequence)
        if verdict is not Verdict.TAKE:
            if verdict is Verdict.NEW_GAP:
                self._ask_again(lane)
            elif verdict is Verdict.REPEATED:
                self.ack_due = True
            return None
        if lane == CONTROL and self.settings.probe_later_s is not None and shows_by_itself(header):
            self._ack_later = True
        else:
            self.ack_due = True
        self._unannounced_bytes += size + len(body)
        self._unannounced_pieces += 1
        if header.kind in (WANT, UNWANT):
            self.wants.heard(header)
        else:
            self._piece(lane, header, size, body)
        if (
            self._unannounced_bytes * 4 >= self.settings.inflight_bytes
            or self._unannounced_pieces * 4 >= self.settings.inflight_messages
            or len(body) > self.settings.ack_with_bytes > 0
            or self.windows[lane].due
        ):
            self.ack_due = self.ack_urgent = True
        return None

    @property
    def _shares(self) -> bool:
        """Whether the peer has the same shared memory open."""
        remote = self.handshake.remote
        return self._shared is not None and remote is not None and remote.region == self._shared.region

    def _piece(self, lane: int, header: Header, size: int, body: Buffer) -> None:
        flags = header.flags
        beyond, borrowed = bool(flags & BEYOND), flags & (SHARED | LASTING) == SHARED
        length = len(body)
        if header.kind == CHUNK:
            incoming = self._open.get(header.message)
            if incoming is None or header.offset != incoming.received:
                raise WireError(f"a piece at {header.offset} of message {header.message} does not continue it")
            if incoming.header.kind == PHANTOM:
                if type(header.meta) is not int or header.meta < 0 or length:
                    raise WireError(f"a piece of a phantom has the size {header.meta!r:.60}")
                length = header.meta
        else:
            if header.kind == PHANTOM and not flags & FOLLOWS:
                length = header.nbytes
            if header.message in self._open:
                raise WireError(f"message {header.message} begins twice")
            incoming = Incoming(self.peer, header, self.windows[lane], self.settings.limits)
            self._open[header.message] = incoming
            self.mailbox.begin(incoming)
        incoming.add(body, length, size + length, beyond=beyond, borrowed=borrowed)
        if incoming.complete:
            del self._open[header.message]
            self.wants.completed(incoming)
        if not beyond and self.windows[lane].crowded:
            self.wants.crowd()

    # Acknowledgements, probes and farewells.

    def _ask_again(self, lane: int) -> None:
        self._notice(CONTROL, Header(RESUME, sequence=self.receiving[lane].expected, meta=lane))

    def _noticed(self, lane: int, header: Header, now: float) -> Ending | None:
        if header.kind == PROBE:
            self.ack_due = self.ack_urgent = True
            if self.receiving[lane].probed(header.sequence):
                self._ask_again(lane)
        elif header.kind == RESUME:
            if header.meta not in LANES or type(header.meta) is not int:
                raise WireError(f"there is no lane {header.meta!r:.60}")
            self._acknowledge(header.meta, header.sequence, now)
            self.sending[header.meta].resume(header.sequence)
        elif header.kind == ACK:
            self._told(header.acks, now)
        elif header.kind == BYE:
            return endings.left(self.peer) if header.meta is True else endings.lost(self.peer, "it has closed its endpoint")
        return None

    def _told(self, acks: Sequence[int], now: float) -> None:
        """The peer has received so much, and accepts so much. Totals: what was told before, and arrives late, does no harm."""
        if len(acks) != 2 * len(LANES):
            raise WireError(f"an invalid acknowledgement: {acks!r:.60}")
        for lane in LANES:
            self.allowances[lane].grant(acks[2 * lane + 1])
            self._acknowledge(lane, acks[2 * lane], now)

    def _acknowledge(self, lane: int, upto: int, now: float) -> None:
        done = self.sending[lane].acknowledge(upto)
        if not done:
            return
        self._progress_at[lane] = now
        if lane == BULK:
            self._arrived_bytes += sum(parcel.wire_bytes for parcel in done)
            if not self.sending[BULK].unacknowledged:
                self._busy_s += now - self._busy_at
        for parcel in done:
            if self._lent and (block := self._lent.pop((lane, parcel.sequence), None)) is not None:
                block.free()
            if parcel.owner is not None:
                self.outbox.acknowledged(parcel.owner)

    def close(self, ending: Ending) -> list[Outgoing]:
        """The link ends here. Returns the messages that did not arrive, marked lost."""
        self.state = State.CLOSED
        self.ending = ending
        messages = dict.fromkeys(self.outbox.messages())
        for sending in self.sending:
            for parcel in sending.unacknowledged:
                if parcel.owner is not None:
                    messages[parcel.owner] = None
            sending.clear()
        for block in self._lent.values():
            block.free()
        self._lent.clear()
        for incoming in self._open.values():
            incoming.drop()
        self._open.clear()
        for message in messages:
            message.lost = True
        return list(messages)
