"""All links of an endpoint, connected to its transport and the loop's clock: which peers are greeted, refused, kept or lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from zmqtrain.errors import PeerTimeoutError, WireError
from zmqtrain.net import ending as endings
from zmqtrain.net.address import without_key
from zmqtrain.net.admission import Admission
from zmqtrain.net.ending import Ending
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.flush import Flush
from zmqtrain.net.greeting import Hello, Refusal, RefusalCode, decode_greeting, encode_greeting
from zmqtrain.net.handshake import Judgement
from zmqtrain.net.intruder_log import IntruderLog
from zmqtrain.net.link import LANES, Link, State
from zmqtrain.net.mailbox import Mailbox, Ticket
from zmqtrain.net.outbox import CONTROL, Outgoing
from zmqtrain.net.settings import NetSettings
from zmqtrain.net.shared import SharedBodies
from zmqtrain.net.transport import Frames, Transport
from zmqtrain.net.trouble import Intrusion, Trouble, Troubles
from zmqtrain.wire.message import WIRE_VERSION, Header, decode_header, encode_header
from zmqtrain.world import random_bits

log = logging.getLogger(__name__)

#: The transport's high-water marks are above what is ever in flight; if it refuses all the same, try again after this time.
RETRY_S = 0.01

OnLost = Callable[[PeerId, Ending, Sequence[Outgoing], Sequence[Ticket]], None]


def route_of(peer: PeerId, session: int) -> bytes:
    """The name under which a peer's end of a link connects to others."""
    return f"{session:016x}/{peer}".encode()


class Switchboard:
    """Implements `zmqtrain.net.transport.Receiver`. Everything is sent in `_flush`, once per turn of the loop."""

    def __init__(self, peer: PeerId, settings: NetSettings, transport: Transport, mailbox: Mailbox, on_lost: OnLost) -> None:
        self._peer = peer
        self._settings = settings
        self._transport = transport
        self._mailbox = mailbox
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.process = random_bits(63) | 1
        self._links: dict[PeerId, Link] = {}
        self._numbers = 0  # of links so far
        self._flushed = Flush(self._links)
        self._routes: dict[bytes, Link] = {}
        self._gone: dict[PeerId, Ending] = {}
        self._addresses: dict[PeerId, str] = {}
        self._shared = SharedBodies(settings.arena) if settings.arena is not None else None
        self._admission = Admission()
        self._troubles, self._intruders = Troubles(), IntruderLog(peer)
        self._counters: Counter[str] = Counter()
        self._sent: Counter[PeerId] = Counter()  # bytes, by peer
        self._received: Counter[PeerId] = Counter()
        self._dirty: dict[Link, None] = {}
        self._owing: dict[Link, None] = {}  # acknowledgements
        self._flush_handle: asyncio.Handle | None = None
        self._ack_handle: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._alarm = 0.0  # when the timer is due; uvloop does not tell the time of a timer that is due at once
        self._finished = False
        self._shut = False
        self._newest = settings.epoch  # the highest epoch of a leader of the run
        self.on_superseded: Callable[[], None] = lambda: None
        """Called when another process has a higher epoch than this one, which leads."""

    # Calls by the node.

    def demand(self, peer: PeerId, what: str) -> Link:
        """Return the link to a peer for which a receive begins to wait. Raises if the peer is lost."""
        ending = self._gone.get(peer)
        if ending is not None:
            raise ending.error(what)
        link = self._links.get(peer) or self._add_link(peer)
        if link.state is State.GREETING and not link.handshake.demanded:
            link.handshake.demand(self._loop.time())
            self._arm(link)
        return link

    def add_peer(self, peer: PeerId, address: str) -> None:
        if self._settings.identity is not None:
            self._settings.identity.admit(peer, address)
        known = self._addresses.get(peer)
        self._addresses[peer] = address
        self._gone.pop(peer, None)
        link = self._links.get(peer)
        if link is None:
            return  # connected when this process or the peer has something to send: most pairs in a large run never do
        if not link.handshake.address:
            self._connect(link, address)
        elif address == known and address != link.handshake.address and not link.handshake.opened and not link.up:
            self._connect(link, address)  # the one that it announces itself may lead nowhere from here
        elif address not in (known, link.handshake.address):
            self._end(link, endings.lost(peer, f"it was restarted at {without_key(address)}"))
            self._gone.pop(peer, None)
            self._add_link(peer)

    def replaced(self, peer: PeerId, process: int | None) -> Link | None:
        """The link to another process of this name than the given one, if it has greeted already."""
        link = self._links.get(peer)
        remote = None if link is None else link.handshake.remote
        return link if process is not None and remote is not None and remote.process != process else None

    def forget(self, peer: PeerId, ending: Ending) -> None:
        if self._settings.identity is not None:
            self._settings.identity.dismiss(peer)
        link = self._links.get(peer)
        if link is not None:
            self._end(link, ending, refuse="lost")
        elif peer not in self._gone or self._gone[peer].loss:
            # No wait here is for this peer, but the work that it was a part of is broken all the same; also such work as has begun
            # since its link was lost.
            self._gone[peer] = ending
            self._on_lost(peer, ending, (), self._mailbox.lose(peer))
        self._gone[peer] = ending

    def let_go(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._end(link, endings.left(peer))

    def undelivered(self) -> list[PeerId]:
        return self._flushed.undelivered()

    def links(self) -> Iterable[Link]:
        return [link for link in self._links.values() if link.state is State.OPEN]

    def unreached(self, peer: PeerId) -> str:
        """Why there is no connection to a peer yet, as far as is known; empty if there is one."""
        link = self._links.get(peer)
        if link is None or link.state is not State.GREETING:
            return ""
        return f"no connection to it was made ({endings.where(link.handshake.address, self._troubles.why(peer))})"

    def touch(self, link: Link) -> None:
        """There may be something to send to the peer, or something may have arrived there."""
        if link.ack_due:
            self._owing[link] = None
        if link.quiet and not link.ack_urgent and not self._flushed.awaited:
            # Of all messages that arrive, half are acknowledgements, and most others need nothing else: a callback for each of them
            # would be work for nothing.
            if link.ack_due:
                self._acknowledge_soon()
            return
        self._dirty[link] = None
        if self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def consumed(self, peer: PeerId) -> None:
        """A message of the peer was taken: return credit if any is due."""
        link = self._links.get(peer)
        if link is not None and link.owes_credit():
            self.touch(link)

    def show(self, peer: PeerId) -> None:
        """Let a peer know that this process is there, if there is a connection."""
        link = self._links.get(peer)
        if link is not None:
            link.show()
            self.touch(link)

    def heard_at(self, peer: PeerId) -> float | None:
        """When the newest message of a peer arrived; ``None`` if there is no link to it."""
        link = self._links.get(peer)
        return None if link is None or link.state is not State.OPEN else link.heard_at

    def traffic(self) -> dict[PeerId, tuple[int, int]]:
        """Bytes sent to each peer and received from it so far."""
        return {peer: (self._sent[peer], self._received[peer]) for peer in sorted({*self._sent, *self._received})}

    def speeds(self) -> dict[PeerId, tuple[int, float]]:
        """For each peer to which large messages were sent: their bytes that have arrived, and the seconds that took."""
        now = self._loop.time()
        return {peer: speed for peer, link in sorted(self._links.items()) if (speed := link.speed(now))[0]}

    def statistics(self) -> dict[str, int]:
        links = self._links.values()
        return {
            "bytes_sent": sum(self._sent.values()),
            "bytes_received": sum(self._received.values()),
            "messages_sent": 0,
            "messages_received": 0,
            "garbage": 0,
            "stray": 0,
            "refused": 0,
            "intruders": self._intruders.count,
            "lost": 0,
            **self._counters,
            "queued_bytes": sum(link.outbox.queued_bytes for link in links),
            "inflight_bytes": sum(sending.inflight_bytes for link in links for sending in link.sending),
            "held_bytes": sum(window.held for link in links for window in link.windows),
            "resent_bytes": self._counters["resent_bytes"] + sum(s.resent_bytes for link in links for s in link.sending),
            "links": len(self._links),
        }

    async def finish(self, patience_s: float) -> None:
        """Wait for what is on its way: see `zmqtrain.net.endpoint.Endpoint.finish`."""
        for link in self._links.values():
            link.hurry()
            self.touch(link)
        late = await self._flushed.on_its_way_arrived(patience_s)
        if late:
            raise PeerTimeoutError(", ".join(late), f"what {self._peer} has sent to arrive there", patience_s)
        self._finished = True

    async def close(self, ending: Ending) -> None:
        """Flush the queues, send farewells, end all links, and close the transport."""
        for link in self._links.values():
            link.hurry()
            self.touch(link)
        try:
            left = await self._flushed.all_arrived(self._settings.flush_s)
            if left:
                log.warning("%s closes with messages undelivered to %s after %g s", self._peer, left, self._settings.flush_s)
        finally:
            for link in list(self._links.values()):
                if link.state is State.OPEN:
                    link.say_bye(finished=self._finished)
                    self._send_notices(link)
                self._end(link, ending)
            self._shut = True
            self._intruders.tell()
            for handle in (self._flush_handle, self._ack_handle, self._timer):
                if handle is not None:
                    handle.cancel()
            await self._transport.close()

    # Calls by the transport.

    def on_message(self, lane: int, route: bytes, frames: Frames, header: Header | None = None) -> None:
        link = self._routes.get(route)
        if link is None:
            self._stranger(lane, route, frames)
            return
        try:
            if not 1 <= len(frames) <= 2:
                raise WireError(f"a message of {len(frames)} frames")
            if header is None:
                header = decode_header(frames[0], self._settings.limits)
            if header.kind in ("hello", "refusal"):
                self._stranger(lane, route, frames)
                return
            body = frames[1] if len(frames) == 2 else b""
            before = link.receiving[lane].expected
            farewell = link.receive(lane, header, len(frames[0]), body, self._loop.time())
        except WireError as error:
            self._counters["garbage"] += 1
            log.warning("%s closes the link to %s: %s", self._peer, link.peer, error)
            self._end(link, endings.bad_message(link.peer, str(error)), refuse="protocol")
            return
        if link.receiving[lane].expected != before:
            self._received[link.peer] += len(frames[0]) + len(body)
            self._counters["messages_received"] += 1
        if farewell is not None:
            self._end(link, farewell)
            return
        self.touch(link)

    def on_link_up(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._troubles.over(peer)
            link.link_up(self._loop.time())
            self.touch(link)

    def on_link_down(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.link_down(self._loop.time())
            self._arm(link)

    def on_gone(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.gone(self._loop.time())
            self._arm(link)

    def on_trouble(self, peer: PeerId, trouble: Trouble | None) -> None:
        link, identity = self._links.get(peer), self._settings.identity
        trouble = trouble or self._troubles.of(peer)
        if link is None or trouble is None:
            return
        if trouble is Trouble.UNLISTED and (identity is None or identity.joins(link.handshake.address)):
            log.warning("%s is not admitted by %s: it has another run token", self._peer, peer)
            self._end(link, endings.other_token(peer))
        elif self._troubles.note(peer, trouble, self._loop.time()):
            where = without_key(link.handshake.address)
            log.warning("%s cannot connect to %s at %s, and keeps trying: %s", self._peer, peer, where, trouble.value)

    def pardon(self, count: int) -> None:
        """Expect ``count`` callers that only test the connection and disconnect before sending anything."""
        self._intruders.pardon(count)

    def on_intruder(self, intrusion: Intrusion, origin: str) -> None:
        self._intruders.note(intrusion, origin)

    def on_wrong_request(self, peer: PeerId) -> None:
        """A peer has sent a request that cannot be answered."""
        self._intruders.note(Intrusion.BAD_REQUEST, peer)

    # Greeting

    def _add_link(self, peer: PeerId, address: str = "") -> Link:
        self._numbers += 1
        link = Link(peer, self._settings, self._mailbox, self._loop.time(), self._shared, number=self._numbers)
        self._links[peer] = link
        address = address or self._addresses.get(peer, "") or self._transport.find(peer)
        if address:
            try:
                self._connect(link, address)
            except ValueError:
                del self._links[peer]
                raise
        return link

    def _connect(self, link: Link, address: str) -> None:
        if link.handshake.address:
            self._transport.disconnect(link.peer)
            link.link_down(self._loop.time())
        link.handshake.connect(address, self._loop.time())
        self._transport.connect(link.peer, address, route_of(self._peer, link.handshake.session))

    def _hello(self, link: Link, *, opened: bool, known: int | None = None) -> None:
        hello = Hello(
            peer=self._peer,
            to=link.peer,
            address=self._transport.address,
            token=self._settings.token,
            process=self.process,
            session=link.handshake.session,
            known=(link.handshake.remote.session if link.handshake.remote else 0) if known is None else known,
            opened=opened,
            control_window=self._settings.control_window_bytes,
            bulk_window=self._settings.window_bytes,
            region=self._shared.region if self._shared is not None else 0,
            epoch=self._settings.epoch,
            newest=self._newest,
        )
        self._transport.send(link.peer, CONTROL, encode_greeting(hello), 0)

    def _stranger(self, lane: int, route: bytes, frames: Frames) -> None:
        """Handle greetings, refusals and anything else from an unknown sender."""
        if self._admission.ignores(route):
            self._counters["garbage"] += 1
            return
        try:
            greeting = decode_greeting(frames)
            if isinstance(greeting, Hello) and (lane != CONTROL or route != route_of(greeting.peer, greeting.session)):
                raise WireError("a greeting under another name")
        except WireError as error:
            self._garbage(route, frames)
            log.debug("%s: garbage from %.40r: %s", self._peer, route, error)
            return
        if isinstance(greeting, Refusal):
            self._refused(greeting)
        else:
            self._greeted(route, greeting)

    def _garbage(self, route: bytes, frames: Frames) -> None:
        try:
            if 1 <= len(frames) <= 2:
                decode_header(frames[0], self._settings.limits)
                self._counters["stray"] += 1  # a late message of a link that has ended
                return
        except WireError:
            pass
        self._counters["garbage"] += 1
        self._admission.ignore(route)
        self._intruders.note(Intrusion.GARBAGE, "")

    def _greeted(self, route: bytes, hello: Hello) -> None:
        peer = hello.peer
        link = self._links.get(peer)
        objection = self._admission.objection(hello, route, self._peer, self._settings)
        if objection is not None:
            if objection[0] == "lost" and self._outdated(hello):
                return
            self._refuse(hello, *objection)
            same_run = hello.token == self._settings.token
            if hello.version != WIRE_VERSION and same_run and (link is None or link.state is State.GREETING):
                self.forget(peer, endings.other_version(peer, hello.version))
            return
        if self._outdated(hello):
            return
        link = self._links.get(peer)
        judgement = Judgement.CONTINUES if link is None else link.handshake.judge(hello)
        if link is not None and judgement is not Judgement.CONTINUES:
            if judgement is Judgement.OUTDATED:
                self._hello(link, opened=False, known=0)
                return
            if judgement is Judgement.REPLACED:
                assert link.handshake.remote is not None
                self._routes.pop(route_of(peer, link.handshake.remote.session), None)
                link.handshake.forget()
            else:
                self._end(link, endings.lost(peer, judgement.value))
                link = None
        try:
            if link is None:
                link = self._add_link(peer, hello.address)
            elif not link.up and link.handshake.gives_up_address(hello.address, self._loop.time()):
                before = link.handshake.address
                try:
                    self._connect(link, hello.address)
                except ValueError:
                    self._connect(link, before)
                    raise
        except ValueError as error:
            self._counters["garbage"] += 1
            self._intruders.note(Intrusion.GARBAGE, peer)
            log.debug("%s ignores a greeting of %s: %s", self._peer, peer, error)
            return
        self._gone.pop(peer, None)
        new = link.handshake.remote is None
        answer = link.greet(hello)
        if link.handshake.remote is not None:
            self._routes[route] = link
            if new:
                self._mailbox.purge(peer)
        if answer and link.up:
            self._hello(link, opened=link.state is State.OPEN)
        self.touch(link)

    def _outdated(self, hello: Hello) -> bool:
        """Look at the epochs in a greeting: only the highest counts. Returns whether the sender leads no more."""
        known, self._newest = self._newest, max(self._newest, hello.epoch, hello.newest)
        if 0 < self._settings.epoch < self._newest:
            self.on_superseded()
        if not 0 < hello.epoch < self._newest:
            link = self._links.get(hello.peer)
            if known < hello.epoch and link is not None and link.handshake.remote is not None:
                before = link.handshake.remote
                if before.process != hello.process and 0 < before.epoch < hello.epoch:  # whatever it still knows of this process
                    self._end(link, endings.lost(hello.peer, "another process has taken its place"), refuse="epoch")
            return False
        self._refuse(hello, "epoch", f"epoch {hello.epoch} is over: a process with epoch {self._newest} leads the run")
        link = self._links.get(hello.peer)
        if link is not None and link.handshake.remote is not None and link.handshake.remote.process == hello.process:
            self._end(link, endings.lost(hello.peer, "it does not lead the run any more"))
        return True

    def _refuse(self, hello: Hello, code: RefusalCode, reason: str) -> None:
        self._counters["refused"] += 1
        if self._admission.may_answer(hello.address, self._loop.time()):
            log.warning("%s refuses %s at %s: %s", self._peer, hello.peer, without_key(hello.address), reason)
            self._transport.post(hello.address, encode_greeting(Refusal(self._peer, hello.peer, hello.session, code, reason)))

    def _refused(self, refusal: Refusal) -> None:
        for link in list(self._links.values()):
            if link.handshake.session == refusal.session:
                log.warning("%s was refused by %s: %s", self._peer, refusal.peer, refusal.reason)
                if refusal.code == "epoch" and self._settings.epoch:
                    self.on_superseded()
                self._end(link, endings.refused(link.peer, refusal.code, refusal.reason, refusal.version))
                return
        self._counters["stray"] += 1

    # Ending

    def _end(self, link: Link, ending: Ending, *, refuse: RefusalCode | None = None) -> None:
        """Close a link for good. ``refuse`` tells the peer."""
        remote = link.handshake.remote
        messages = link.close(ending)
        self._counters["lost"] += 1
        self._counters["resent_bytes"] += sum(sending.resent_bytes for sending in link.sending)
        del self._links[link.peer]
        self._dirty.pop(link, None)
        self._owing.pop(link, None)
        self._troubles.over(link.peer)
        if remote is not None:
            route = route_of(link.peer, remote.session)
            self._routes.pop(route, None)
            self._admission.bury(route, ending.reason)
        if link.handshake.address:
            self._transport.disconnect(link.peer)
        self._gone[link.peer] = ending
        if refuse is not None and remote is not None:
            refusal = Refusal(self._peer, link.peer, remote.session, refuse, ending.reason)
            self._transport.post(remote.address, encode_greeting(refusal))
        tickets = self._mailbox.lose(link.peer)
        self._on_lost(link.peer, ending, messages, tickets)
        self._flushed.moved()

    # What is sent.

    def _flush(self) -> None:
        self._flush_handle = None
        dirty, self._dirty = self._dirty, {}
        now = self._loop.time()
        for link in dirty:
            if link.up and link.handshake.hello_due(now):
                self._hello(link, opened=False)
            if link.state is State.OPEN:
                self._pump(link, now)
                if self._flushed.waits:
                    link.hurry()
                if not link.ack_due or link.ack_urgent:
                    self._send_notices(link)
                else:
                    self._acknowledge_soon()
            if link.state is not State.CLOSED:
                self._arm(link)
        self._flushed.moved()

    def _pump(self, link: Link, now: float) -> None:
        for lane in LANES:
            while (parcel := link.next_parcel(lane)) is not None:
                if not self._transport.send(link.peer, lane, parcel.frames, parcel.wire_bytes, parcel.header):
                    self._loop.call_later(RETRY_S, self._retry, link)
                    break
                link.parcel_sent(lane, now)
                self._sent[link.peer] += parcel.wire_bytes
                self._counters["messages_sent"] += 1

    def _retry(self, link: Link) -> None:
        if not self._shut and link.state is State.OPEN:
            self.touch(link)

    def _acknowledge_soon(self) -> None:
        if self._ack_handle is None:
            self._ack_handle = self._loop.call_later(self._settings.ack_s, self._send_acks)

    def _send_acks(self) -> None:
        self._ack_handle = None
        owing, self._owing = self._owing, {}
        # In the order of the links, not of what has arrived: in a simulation the first of several messages that came at one time
        # should not decide whose acknowledgement goes first.
        for link in sorted(owing, key=lambda link: link.number) if len(owing) > 1 else owing:
            if link.state is State.OPEN and link.ack_due:
                self._send_notices(link)

    def _send_notices(self, link: Link) -> None:
        for lane, header in link.take_notices():
            self._transport.send(link.peer, lane, (encode_header(header),), 0, header)

    # Time

    def _arm(self, link: Link) -> None:
        deadline = link.next_deadline()
        if deadline is None or (self._timer is not None and self._alarm <= deadline) or self._shut:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._alarm = self._loop.call_at(deadline, self._tick), deadline

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        settings = self._settings
        for link in list(self._links.values()):
            due = link.tick(now)
            if due == "connect":
                trouble = self._troubles.why(link.peer)
                self._end(link, endings.never_came(link.peer, settings.greet_s, link.handshake.address, trouble))
            elif due == "lost":
                reason = f"no connection for {settings.lost_s:g} s: it stands still, or nothing gets through"
                self._end(link, endings.lost(link.peer, reason))
            elif due == "gone":
                self._end(link, endings.lost(link.peer, "its process has ended: nobody listens any more where it did"))
            elif due == "unanswered":
                self._end(link, endings.lost(link.peer, f"it has not answered a greeting for {settings.greet_s:g} s"))
            elif link.state is not State.CLOSED:
                self.touch(link)
                self._arm(link)
