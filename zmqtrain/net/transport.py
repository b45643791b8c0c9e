"""The narrow interface below the endpoint: it moves frames, and loses them when a connection breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.trouble import Intrusion, Trouble
from zmqtrain.wire.message import Header

Frames = Sequence[bytes | memoryview]


class Receiver(Protocol):
    """What a transport calls, always from the event loop and never from inside one of its own methods."""

    def on_message(self, lane: int, route: bytes, frames: Frames, header: Header | None = None) -> None:
        """Frames have arrived from the process that connected under the name ``route``. A memoryview among them keeps its memory
        alive. ``header``: what the first frame contains, if that is known and need not be decoded."""

    def on_link_up(self, peer: PeerId) -> None:
        """The connection to the peer is established (on both lanes, if both are in use)."""

    def on_link_down(self, peer: PeerId) -> None:
        """The connection broke; the transport tries to renew it until `Transport.disconnect`."""

    def on_gone(self, peer: PeerId) -> None:
        """The connection broke, and nobody listens any more where the peer did. Not every transport finds out."""

    def on_trouble(self, peer: PeerId, trouble: Trouble | None) -> None:
        """An attempt to connect to the peer failed for this reason, or for one that this end did not see; the transport keeps
        trying."""

    def on_intruder(self, intrusion: Intrusion, origin: str) -> None:
        """A caller was not admitted. ``origin``: where it came from, or empty."""


class Transport(Protocol):
    """Moves frames to peers, in order on each lane while a connection lasts. What is in flight when it breaks may be lost."""

    @property
    def address(self) -> str: ...

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver messages to ``receiver``."""

    def find(self, peer: PeerId) -> str:
        """Return the address of a peer that was not announced; an empty string if the transport cannot know it."""
        ...

    def connect(self, peer: PeerId, address: str, route: bytes) -> None:
        """Connect, and keep trying. Raises `ValueError` for an address of another kind."""

    def disconnect(self, peer: PeerId) -> None:
        """Drop the connection at once. (A farewell that was just passed on may still be sent.)"""

    def send(self, peer: PeerId, lane: int, frames: Frames, nbytes: int, header: Header | None = None) -> bool:
        """Take frames without copying them; ``nbytes`` counts phantoms, too. ``header``: what the first frame encodes, for a
        transport within one process. False: not now, try again later."""
        ...

    def post(self, address: str, frames: Frames) -> None:
        """Try to send one small message on the control lane to a process that is not a peer. Delivery is not guaranteed."""

    async def close(self) -> None: ...
