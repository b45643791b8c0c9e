"""What waits to be sent to one peer: highest priority first, in pieces, messages with one tag in order. Sans-IO.

A message is in the outbox from the moment of the call, so that priorities and demands see all messages. But only a limited number
of bytes is *admitted*, and ``send`` waits for its admission. Memory is not copied: the outbox refers to the sender's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from zmqtrain.net.endpoint import Tag
from zmqtrain.net.flags import BEYOND, CHUNK, FOLLOWS
from zmqtrain.wire.message import PHANTOM, Header

CONTROL = 0
BULK = 1
#: What messages without a body refer to.
_NO_BODY: Final = memoryview(b"")
#: In place of an empty queue: see `zmqtrain.net.lane`. Nothing is ever added to it.
_EMPTY: Final[deque[Outgoing]] = deque(maxlen=0)


class Outgoing:
    """A message that is queued or on its way, with what is needed to send its chunks."""

    __slots__ = (
        "admitted",
        "beyond",
        "body",
        "cancelled",
        "exempt",
        "header",
        "label",
        "lane",
        "lasting",
        "lost",
        "number",
        "offset",
        "on_admitted",
        "on_released",
        "order",
        "outstanding",
        "parked",
        "priority",
        "started",
        "tag",
        "wanted_by_topic",
    )

    def __init__(
        self,
        header: Header,
        frames: Sequence[memoryview],
        priority: int = 0,
        *,
        exempt: bool = False,
        lasting: bool = False,
        control: bool = False,
        label: bytes | None = None,
    ) -> None:
        self.header = header
        self.tag: Tag = header.tag
        self.label = label
        """The header's tag and ``meta`` as bytes; None: not packed yet."""
        self.body = frames[0] if len(frames) == 1 else memoryview(b"".join(frames)) if frames else _NO_BODY
        self.priority = priority
        self.exempt = exempt
        """Whether the message needs no credit: requests and their answers are always awaited at the receiver."""
        self.lasting = lasting
        """Its memory does not change until the peer has used it."""
        self.beyond = exempt
        """Needs no credit from now on."""
        self.wanted_by_topic = False
        self.lane = CONTROL if control or (not header.nbytes and header.kind == "value") else BULK
        self.order = 0
        self.number = 0
        self.offset = 0
        self.started = False
        self.admitted = False
        self.cancelled = False
        self.lost = False
        self.outstanding = 0
        """Pieces that were passed on but not acknowledged."""
        self.parked = False
        """The message is the first of its tag, but an earlier one is still being sent on the other lane."""
        self.on_admitted: Callable[[], None] | None = None
        self.on_released: Callable[[], None] | None = None

    @property
    def finished(self) -> bool:
        """Whether every piece was passed on."""
        return self.started and self.offset == self.header.nbytes

    @property
    def released(self) -> bool:
        """Whether the sender's memory is no longer read."""
        return self.lost or self.cancelled or (self.finished and not self.outstanding)

    def __lt__(self, other: Outgoing) -> bool:
        return (-self.priority, self.order) < (-other.priority, other.order)


class Outbox:
    """Everything that is to be sent to one peer and has not been."""

    __slots__ = (
        "_beyond",
        "_heaps",
        "_numbers",
        "_orders",
        "_tokens",
        "_unacknowledged",
        "_waiting",
        "capacity",
        "chunk_bytes",
        "queued_bytes",
        "queues",
    )

    def __init__(self, capacity: int, chunk_bytes: int) -> None:
        self.capacity = capacity
        self.chunk_bytes = chunk_bytes
        self.queued_bytes = 0
        """Admitted bytes that were not passed on yet."""
        self.queues: dict[Tag, deque[Outgoing]] = {}
        """All messages that have not been sent completely, by tag; empty queues are not kept."""
        self._heaps: tuple[list[Outgoing], list[Outgoing]] = ([], [])
        self._beyond: tuple[list[Outgoing], list[Outgoing]] = ([], [])
        self._waiting = _EMPTY
        self._unacknowledged: dict[Tag, tuple[int, int]] = {}
        self._tokens: dict[Tag | str, int] = {}
        self._orders = self._numbers = 0  # of the last message

    def __bool__(self) -> bool:
        return bool(self.queues)

    def put(self, message: Outgoing) -> None:
        """Add a message. ``message.admitted`` says whether there was room; if not, ``on_admitted`` will be called."""
        message.order = self._orders = self._orders + 1
        tag = message.tag
        if message.lane == CONTROL and self._busy_lane(tag) == BULK:
            message.lane = BULK  # it must not overtake the tensor before it
        queue = self.queues.get(tag)
        if queue is None:
            self.queues[tag] = deque((message,))
        else:
            queue.append(message)
        if not self._waiting and self._fits(message):
            self._accept(message, 0)
        else:
            if self._waiting is _EMPTY:
                self._waiting = deque()
            self._waiting.append(message)
        if queue is None:
            self._offer(message)

    def cancel(self, message: Outgoing) -> bool:
        """Withdraw a message, if nothing of it has been sent. Returns whether that was so."""
        if message.started:
            return False
        message.cancelled = True
        queue = self.queues[message.tag]
        head = queue[0] is message
        queue.remove(message)
        self._withdraw(message)
        if not queue:
            del self.queues[message.tag]
        elif head:
            self._offer(queue[0])
        return True

    def want(self, key: Tag | str) -> None:
        """The receiver waits for one message with this tag, or of this topic: it needs no credit."""
        message = self._unwanted(key)
        if message is None:
            self._tokens[key] = self._tokens.get(key, 0) + 1
            return
        message.beyond = True
        message.wanted_by_topic = isinstance(key, str)
        self._offer_again(message)

    def unwant(self, key: Tag | str) -> None:
        """The receiver got a message that had not needed the demand."""
        if self._tokens.get(key):
            self._take_token(key)
            return
        for queue in self._of(key):
            for message in reversed(queue):
                if message.beyond and not message.exempt and message.wanted_by_topic == isinstance(key, str):
                    message.beyond = False
                    self._offer_again(message)
                    return

    def next(self, lane: int, *, credit: bool) -> Outgoing | None:
        """The message of which a piece should be sent next over the lane."""
        if not self._beyond[lane] and not self._heaps[lane]:
            return None
        best = _top(self._beyond[lane], beyond=True)
        if credit:
            other = _top(self._heaps[lane], beyond=False)
            if other is not None and (best is None or other < best):
                return other
        return best

    def cut(
        self, message: Outgoing, sequence: int, *, whole: bool = False, acks: tuple[int, ...] = ()
    ) -> tuple[Header, memoryview | None, int]:
        """Take the next piece of a message that `next` returned: its header, its bytes and its size. ``whole``: all that is
        left. ``acks``: acknowledgements that go with its beginning."""
        header = message.header
        left = header.nbytes - message.offset
        size = left if whole else min(self.chunk_bytes, left)
        kind, flags = CHUNK, BEYOND if message.beyond else 0
        if not message.started:
            message.started = True
            message.number = self._numbers = self._numbers + 1
            kind = header.kind
            if kind == PHANTOM and size < header.nbytes:
                flags, size = flags | FOLLOWS, 0
        if message.offset == 0 and kind != CHUNK:
            # Not by `_replace`, which takes as long as all the rest.
            tag, dtype, shape = header.tag, header.dtype, header.shape
            piece = Header(kind, tag, sequence, message.number, dtype, shape, 0, header.nbytes, flags, acks, header.meta)
        else:
            meta = size if header.kind == PHANTOM else None
            piece = Header(kind, (), sequence, message.number, "", (), message.offset, header.nbytes, flags, meta=meta)
        body = message.body[message.offset : message.offset + size] if message.body is not _NO_BODY and len(message.body) else None
        message.offset += size
        message.outstanding += 1
        busy = self._unacknowledged.get(message.tag)
        self._unacknowledged[message.tag] = (message.lane, 1 if busy is None else busy[1] + 1)
        if not message.admitted:
            self._waiting.remove(message)
            self._accept(message, size)
        else:
            self.queued_bytes -= size
        if message.offset == header.nbytes:
            self._finish(message)
        if self._waiting:
            self._admit()
        return piece, body, size

    def acknowledged(self, message: Outgoing) -> None:
        """One piece of the message has arrived."""
        message.outstanding -= 1
        lane, pieces = self._unacknowledged[message.tag]
        if pieces > 1:
            self._unacknowledged[message.tag] = (lane, pieces - 1)
        else:
            del self._unacknowledged[message.tag]
            queue = self.queues.get(message.tag)
            if queue and queue[0].parked:
                self._offer(queue[0])
        if message.released and message.on_released is not None:
            message.on_released()

    def messages(self) -> list[Outgoing]:
        """All messages that have not been sent completely."""
        return [message for queue in self.queues.values() for message in queue]

    def _busy_lane(self, tag: Tag) -> int | None:
        queue = self.queues.get(tag)
        if queue:
            return queue[-1].lane
        busy = self._unacknowledged.get(tag)
        return busy[0] if busy else None

    def _offer(self, message: Outgoing) -> None:
        """The message is the first of its tag: offer it to its lane, unless an earlier one is still being sent on the other
        lane."""
        if self._tokens and not message.beyond:
            self._redeem(message)
        busy = self._unacknowledged.get(message.tag)
        message.parked = busy is not None and busy[0] != message.lane
        if not message.parked:
            heapq.heappush((self._beyond if message.beyond else self._heaps)[message.lane], message)

    def _offer_again(self, message: Outgoing) -> None:
        if self.queues[message.tag][0] is message:
            self._offer(message)

    def _finish(self, message: Outgoing) -> None:
        queue = self.queues[message.tag]
        queue.popleft()
        if queue:
            self._offer(queue[0])
        else:
            del self.queues[message.tag]

    def _fits(self, message: Outgoing) -> bool:
        return not self.queued_bytes or self.queued_bytes + message.header.nbytes <= self.capacity

    def _admit(self) -> None:
        while self._waiting:
            message = self._waiting[0]
            if not self._fits(message):
                return
            self._waiting.popleft()
            self._accept(message, 0)

    def _accept(self, message: Outgoing, gone: int) -> None:
        message.admitted = True
        self.queued_bytes += message.header.nbytes - gone
        if message.on_admitted is not None:
            message.on_admitted()

    def _withdraw(self, message: Outgoing) -> None:
        if message.admitted:
            self.queued_bytes -= message.header.nbytes
            self._admit()
        else:
            self._waiting.remove(message)

    def _of(self, key: Tag | str) -> list[deque[Outgoing]]:
        if isinstance(key, str):
            return [queue for tag, queue in self.queues.items() if str(tag[0]) == key]
        return [self.queues[key]] if key in self.queues else []

    def _unwanted(self, key: Tag | str) -> Outgoing | None:
        """The message that a demand means: the first with the tag; of a topic, one that has begun, or else the most urgent."""
        if isinstance(key, str):
            heads = [queue[0] for queue in self._of(key) if not queue[0].beyond]
            return min(heads, key=lambda message: (not message.started, -message.priority, message.order), default=None)
        return next((message for queue in self._of(key) for message in queue if not message.beyond), None)

    def _redeem(self, message: Outgoing) -> None:
        """Use a demand that arrived before the message."""
        topic = str(message.tag[0])
        for key in (message.tag, topic):
            if not message.beyond and self._tokens.get(key):
                self._take_token(key)
                message.beyond = True
                message.wanted_by_topic = key is topic

    def _take_token(self, key: Tag | str) -> None:
        self._tokens[key] -= 1
        if not self._tokens[key]:
            del self._tokens[key]


def _top(heap: list[Outgoing], *, beyond: bool) -> Outgoing | None:
    """The first message of a heap that still belongs there."""
    while heap:
        message = heap[0]
        if not message.cancelled and not message.finished and message.beyond == beyond:
            return message
        heapq.heappop(heap)
    return None
