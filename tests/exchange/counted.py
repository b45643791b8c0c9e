"""An endpoint that notes what is sent over it."""

from __future__ import annotations

from typing import Any

from zmqtrain.net.endpoint import Endpoint, PeerId, Sent, Tag
from zmqtrain.wire.payload import Payload


class CountedEndpoint:
    """Another endpoint, and for each receiver and tag the sizes of what went there."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.sizes: dict[tuple[PeerId, Tag], list[int]] = {}

    async def send(
        self, to: PeerId, tag: Tag, payload: Payload, *, priority: int = 0, lasting: bool = False, control: bool = False
    ) -> Sent:
        self.sizes.setdefault((to, tag), []).append(payload.nbytes)
        return await self.endpoint.send(to, tag, payload, priority=priority, lasting=lasting, control=control)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.endpoint, name)
