"""A payload whose parts the workers of a group exchange with others, if some of the group may be missing."""

from __future__ import annotations

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_gather, broadcast
from zmqtrain.net.endpoint import Tag
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Payload


async def gather_parts(team: Group, payload: Payload, tag: Tag, *, size: int, priority: int = 0) -> None:
    """As `all_gather` over a group of ``size`` workers, of which ``team`` is there: part ``position`` comes from
    `zmqtrain.data.teams.owner_of`."""
    if team.size == size:
        await all_gather(team, payload, tag, priority=priority)
        return
    parts = enumerate(bounds(payload.numel, size))
    await together(
        *(
            broadcast(team, payload.part(start, stop), (*tag, position), root=position % team.size, priority=priority)
            for position, (start, stop) in parts
            if start < stop
        )
    )
