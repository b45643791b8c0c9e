"""The order in which roles are shown."""

from __future__ import annotations

from functools import lru_cache

from zmqtrain.net.endpoint import PeerId


@lru_cache(maxsize=16384)  # thousands of peers are sorted once a second
def peer_order(peer: PeerId) -> tuple[str, int]:
    """A key to sort by: workers, model servers, FC servers, then all others; each kind by its numbers."""
    kind, _, index = peer.partition("/")
    return ({"worker": "0", "server": "1", "fc": "2"}.get(kind, kind), int(index) if index.isdigit() else 0)
