"""An arriving message: its pieces are stored until a receive asks for it, and then go to their place in memory. Sans-IO.

A message of one piece is never copied: its payload aliases the frame. A longer one stays in its frames until it is *claimed* (a
receive waits for it, or a subscriber takes it). From then on every piece goes directly to its place, ``into`` if that fits, and
returns its credit at once.
"""

from __future__ import annotations

import numpy as np

from zmqtrain.errors import WireError
from zmqtrain.net.credit import Window
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.wire.limits import Limits
from zmqtrain.wire.message import PHANTOM, TENSOR, VALUE, Header, open_body
from zmqtrain.wire.payload import Payload

Buffer = bytes | bytearray | memoryview


class Incoming:
    """One message from one peer."""

    __slots__ = (
        "_body",
        "_chunks",
        "_target",
        "_window",
        "arrival",
        "claimed",
        "header",
        "held",
        "into",
        "limits",
        "payload",
        "received",
        "source",
        "wanted",
    )

    def __init__(self, source: PeerId, header: Header, window: Window, limits: Limits) -> None:
        if header.kind not in (TENSOR, PHANTOM, VALUE):
            raise WireError(f"a message of the unknown kind {header.kind!r:.60}")
        if header.kind == VALUE and header.nbytes > limits.value_bytes:
            raise WireError(f"a value of {header.nbytes:,} bytes was announced; the limit is {limits.value_bytes:,}")
        if not header.tag:
            raise WireError("a message without a tag")
        self.source = source
        self.header = header
        self.limits = limits
        self.received = 0
        self.held = 0
        self.claimed = False
        self.wanted = False
        """Whether some of it was sent beyond the window, because it was asked for."""
        self.arrival = 0
        self.into: Payload | None = None
        self.payload: Payload | None = None
        self._window = window
        self._chunks: list[Buffer] = []
        self._target: memoryview | None = None
        self._body: memoryview | None = None

    @property
    def tag(self) -> Tag:
        return self.header.tag

    @property
    def complete(self) -> bool:
        return self.received == self.header.nbytes

    def add(self, body: Buffer, size: int, cost: int, *, beyond: bool, borrowed: bool = False) -> None:
        """Add a piece of ``size`` bytes (phantoms have no ``body``), which took ``cost`` bytes of credit unless ``beyond``.

        ``borrowed``: the body must not be used after this call."""
        if self.received + size > self.header.nbytes:
            raise WireError(f"{self.received + size:,} bytes arrived for a message of {self.header.nbytes:,}")
        if beyond:
            self.wanted = True
        else:
            self._window.arrive(cost)
            if self.claimed:
                self._window.consume(cost)
            else:
                self.held += cost
        if len(body):
            if self._target is None and self.claimed and self.header.kind == TENSOR and (size < self.header.nbytes or borrowed):
                self._place(_memory(self.into, self.header) if borrowed else None)
            if self._target is not None:
                self._target[self.received : self.received + size] = body
            else:
                self._chunks.append(bytearray(body) if borrowed else body)
        self.received += size
        if self.complete and self.header.kind != TENSOR:
            self.payload = open_body(self.header, self._joined(), self.limits)
            self._chunks.clear()

    def claim(self, into: Payload | None = None) -> None:
        """A receive asks for the message: return the credit, and write further pieces directly to their place."""
        self.claimed = True
        self.into = into
        self._window.consume(self.held)
        self.held = 0
        if self.header.kind == TENSOR:
            target = _memory(into, self.header)
            if target is not None or len(self._chunks) > 1 or (self._chunks and not self.complete):
                self._place(target)

    def unclaim(self) -> None:
        """The receive was cancelled. Pieces that have arrived move out of its memory."""
        self.claimed = False
        self.into = None
        if self._target is not None:
            self._chunks = [bytes(self._target[: self.received])] if self.received else []
            self._target = self._body = None

    def drop(self) -> None:
        """No receive will ever ask for the message."""
        self._window.consume(self.held)
        self.held = 0
        self._chunks.clear()

    def finish(self) -> Payload:
        """The payload of a complete, claimed message. Raises the error of ``into.copy_`` if ``into`` does not fit."""
        assert self.complete
        into = self.into
        if self.payload is not None:
            payload = self.payload
        elif self._target is not None and self._body is None:
            assert into is not None
            into.meta = self.header.meta
            return into
        else:
            payload = open_body(self.header, self._joined(), self.limits)
        if into is None:
            return payload
        into.copy_(payload)
        into.meta = payload.meta
        return into

    def _place(self, target: memoryview | None) -> None:
        """Write further pieces to ``target``, or to new memory, and move earlier ones there."""
        if target is None:
            target = self._body = np.empty(self.header.nbytes, np.uint8).data
        self._target = target
        position = 0
        for chunk in self._chunks:
            target[position : position + len(chunk)] = chunk
            position += len(chunk)
        self._chunks.clear()

    def _joined(self) -> Buffer:
        if self._body is not None:
            return self._body
        if len(self._chunks) == 1:
            return self._chunks[0]
        return b"".join(self._chunks)


def _memory(into: Payload | None, header: Header) -> memoryview | None:
    """The bytes of ``into``, if the message can be written there unchanged."""
    if into is None or into.dtype != header.dtype or into.nbytes != header.nbytes:
        return None
    frames = into.frames()
    if len(frames) != 1 or frames[0].readonly:
        return None
    return frames[0]
