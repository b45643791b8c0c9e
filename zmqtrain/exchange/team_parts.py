"""A payload whose parts the workers of a group exchange with others, if some of the group may be missing."""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_gather, broadcast
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.waiting import together
from zmqtrain.wire.payload import Payload


def weight_in_mean(groups: Sequence[Sequence[PeerId]], worker: PeerId, there: Group) -> float:
    """What the model of ``worker`` counts in the mean over ``there``, in which each of the ``groups`` of which somebody is there
    counts as much as any other."""
    sizes = {group[0]: len(set(group).intersection(there.members)) for group in groups}
    own = next(sizes[group[0]] for group in groups if worker in group)
    return 1.0 / (own * sum(map(bool, sizes.values())))


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
