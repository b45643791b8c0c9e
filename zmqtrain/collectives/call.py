"""One running collective on one rank: it sends and receives pieces, and ends as a whole, well or with one clear error."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.schedule import Schedule, Span, Step
from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError
from zmqtrain.net.endpoint import Sent, Tag
from zmqtrain.waiting import first_error
from zmqtrain.wire.payload import Payload

#: The last bytes that a call sends are copied, since waiting for their acknowledgement at the end (a round trip, and the time for
#: which an endpoint collects acknowledgements) would take longer. Earlier ones have been acknowledged by then.
COPY_BYTES = 512 * 1024
#: But not in a longer piece, whose copy would take as long.
COPIED_PIECE_BYTES = 1 << 20
#: A call that sends no more than this in all sends it over the control lane. On the bulk lane it would wait for all that is on its
#: way there, however urgent it is: statistics of a batch norm, for which a step stands still, behind megabytes of weight gradients,
#: for which it does not. At 1 Gbit/s this many bytes delay a heartbeat by half a millisecond.
SMALL_BYTES = 64 * 1024
#: After a piece of this many bytes other tasks get a turn.
YIELD_BYTES = 64 * 1024


class Call:
    """Sends and receives the pieces of one collective. Made by `collective`.

    Sending and receiving never wait for each other: a separate task sends what is posted. If a rank waited for byte
    credit before it receives, ranks that wait for each other's credit would wait for ever.
    """

    def __init__(self, group: Group, tag: Tag, what: str, priority: int, to_send: int, limit: asyncio.Timeout) -> None:
        self.group = group
        self.what = what
        self.waiting_for_rank: int | None = None
        self._endpoint = group.endpoint
        self._tag = group.tag(tag)
        self._priority = priority
        self._to_send = to_send
        self._small = 0 < to_send <= SMALL_BYTES
        self._limit = limit
        self._outbox: deque[tuple[int, Payload, bool]] = deque()
        self._posted = asyncio.Event()
        self._complete = False
        self._lent: deque[Sent] = deque()

    def post(self, to: int, part: Payload, *, copied: bool = False) -> None:
        """Send ``part`` to a rank, in the order of posting, without waiting.

        Its memory may be overwritten by a message which proves that it has arrived, or else after `collective` has ended; at once
        if ``copied``.
        """
        self._to_send -= part.nbytes
        copied = copied or (self._to_send < COPY_BYTES and part.nbytes <= COPIED_PIECE_BYTES)
        if copied:
            original, part = part, part.empty_like()
            part.copy_(original)
        self._outbox.append((to, part, not copied))
        self._posted.set()

    async def receive(self, source: int, part: Payload, *, add: bool = False) -> None:
        """Write the next message of rank ``source`` into ``part``, or add it."""
        peer = self.group.members[source]
        self.waiting_for_rank = source
        received = await self._endpoint.receive(peer, self._tag)
        self._check(peer, received, part)
        if add:
            part.add_(received)
        else:
            part.copy_(received)
        del received  # it holds the sender's memory or credit, and must not do so during the wait below
        if self.group.timeout_s is not None and self.group.lost is None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self.group.timeout_s)
        if part.nbytes >= YIELD_BYTES:
            # A receive that finds its message does not suspend, so sending would have to wait until none is left.
            await asyncio.sleep(0)

    def _check(self, peer: str, received: Payload, part: Payload) -> None:
        if received.numel != part.numel or received.dtype != part.dtype:
            raise ProtocolError(
                f"{peer} sent {received.numel} {received.dtype}, but {part.numel} {part.dtype} were expected in {self.what}: all "
                "members must call it with the same size, dtype, algorithm and chunk size"
            )

    async def send_posted(self) -> None:
        """Send what is posted, until `finish`."""
        while self._outbox or not self._complete:
            if not self._outbox:
                self._posted.clear()
                await self._posted.wait()
                continue
            to, part, lent = self._outbox.popleft()
            peer = self.group.members[to]
            sent = await self._endpoint.send(peer, self._tag, part, priority=self._priority, control=self._small)
            if lent:
                self._lent.append(sent)
            while self._lent and self._lent[0].released:
                self._lent.popleft()

    def finish(self) -> None:
        """Nothing more will be posted."""
        self._complete = True
        self._posted.set()

    async def wait_released(self) -> None:
        """Wait until the caller may write to everything that was posted."""
        while self._lent:
            sent = self._lent.popleft()
            if not sent.released:
                await sent.wait_released()


@asynccontextmanager
async def collective(group: Group, name: str, tag: Tag, priority: int = 0, *, to_send: int = 0) -> AsyncIterator[Call]:
    """The context of every collective: at a normal end everything posted was delivered or copied, and its memory is free again.
    ``to_send``: the total number of bytes that will be posted.

    Raises `PeerLostError` that names the first lost member, whichever rank noticed, and `PeerTimeoutError` after
    ``group.timeout_s`` without progress. After an error or a cancellation the payload's content is undefined.
    """
    what = f"{name} {'/'.join(str(word) for word in group.tag(tag))}"
    if group.lost is not None:
        raise PeerLostError(group.lost.peer, group.lost.reason, waiting_for=what)
    limit = asyncio.timeout(group.timeout_s)
    call = Call(group, tag, what, priority, to_send, limit)
    try:
        async with limit:
            group.enter(limit)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(call.send_posted())
                yield call
                call.finish()
            await call.wait_released()
    except (BaseExceptionGroup, PeerLostError, TimeoutError) as raised:
        error = first_error(raised)
        if group.lost is not None and isinstance(error, (PeerLostError, TimeoutError)):
            raise PeerLostError(group.lost.peer, group.lost.reason, waiting_for=what) from error
        if isinstance(error, TimeoutError) and limit.expired():
            peer = group.members[call.waiting_for_rank if call.waiting_for_rank is not None else group.rank]
            raise PeerTimeoutError(peer, what, group.timeout_s or 0.0) from error
        raise error from None
    finally:
        group.leave(limit)


async def while_all_are_there(group: Group, work: Awaitable[None]) -> None:
    """Wait for ``work``, which consists of collectives of some of the members, and counts only if all of ``group`` have done it.
    Raises `PeerLostError` at once when any of them is lost: those who wait for that one are waited for by others in turn."""
    limit = asyncio.timeout(None)

    def look() -> None:
        if group.lost is not None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())

    forget = group.endpoint.on_lost(lambda _peer, _reason: look())
    try:
        async with limit:
            look()
            await work
    except TimeoutError:
        if group.lost is None or not limit.expired():
            raise
        raise PeerLostError(group.lost.peer, group.lost.reason, waiting_for=f"the collectives of {group.name}") from None
    finally:
        forget()


async def carry_out(call: Call, schedule: Schedule, payload: Payload, piece: int) -> None:
    """Carry out a schedule in place, in pieces of ``piece`` elements: one is added while the next is received, and is sent on
    as soon as it is complete."""
    for step, following in zip([Step(), *schedule], [*schedule, Step()], strict=True):
        ready = deque(pieces(following.out, piece))
        # Both are in ascending order, so everything below the end of what has arrived is complete. Not so for a run of two spans.
        pipelined = len(step.into) == 1 and len(following.out) == 1
        for start, stop in pieces(step.into, piece):
            assert step.source is not None
            await call.receive(step.source, payload.part(start, stop), add=step.add)
            while pipelined and ready and ready[0][1] <= stop:
                _post(call, following, payload, ready.popleft())
        while ready:
            _post(call, following, payload, ready.popleft())


def pieces(spans: Sequence[Span], piece: int) -> Iterator[Span]:
    """Divide spans at the multiples of ``piece``, so that overlapping spans are divided at the same places. Nothing for empty
    spans."""
    for start, stop in spans:
        while start < stop:
            end = min(stop, (start // piece + 1) * piece)
            yield start, end
            start = end


def _post(call: Call, step: Step, payload: Payload, span: Span) -> None:
    assert step.to is not None
    call.post(step.to, payload.part(*span), copied=step.copied)
