"""An event as a line of ``events.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zmqtrain.net.endpoint import PeerId
from zmqtrain.world import wall_s


def line_of(peer: PeerId, event: Mapping[str, Any], host_of: Mapping[PeerId, str]) -> dict[str, Any]:
    """The line of an event of a peer. ``host_of``: where the roles are placed; what has no time has happened now."""
    role, _, rank = peer.partition("/")
    time = event.get("time")
    return {
        "time": wall_s() if time is None else time,
        "host": host_of.get(peer, rank if role == "agent" else ""),
        "role": role,
        "rank": int(rank) if rank.isdigit() else None,
        "step": event.get("step"),
        "kind": str(event.get("kind")),
        "values": event.get("values") or {},
    }
