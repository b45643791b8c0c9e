"""Which ring is valid at which step, as members join and leave. Every peer has the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zmqtrain.data.partition import Indices
from zmqtrain.data.ring import Ring
from zmqtrain.net.endpoint import PeerId


class RingPlan:
    """The rings of a run, each valid from a step on. ``members``: the peers by position; the same on all peers."""

    def __init__(self, ring: Ring, members: Sequence[PeerId]) -> None:
        self._eras: list[tuple[Ring, tuple[PeerId, ...]]] = [(ring, tuple(members))]

    def change(self, step: int, members: Sequence[PeerId]) -> None:
        """These are the members from ``step`` on (`zmqtrain.exchange.members.Members.on_change`)."""
        ring, before = self._eras[-1]
        if tuple(members) != before:
            places = [before.index(peer) if peer in before else None for peer in members]
            self._eras.append((ring.changed(step, places), tuple(members)))

    def begin_at(self, step: int) -> None:
        """The first lap begins with ``step``, and not with step 0."""
        (ring, members), *changes = self._eras
        self._eras = [(replace(ring, since=step), members)]
        for later, others in changes:
            self.change(later.since, others)

    def begin(self, ring: Ring, members: Sequence[PeerId]) -> None:
        """Adopt the ring that another member announced, and discard the previous one."""
        self._eras = [(ring, tuple(members))]

    def at(self, step: int) -> tuple[Ring, tuple[PeerId, ...]]:
        """The ring of ``step``, and its members."""
        return next(era for era in reversed(self._eras) if era[0].since <= step)

    def before(self, step: int) -> tuple[Ring, tuple[PeerId, ...]]:
        """The ring before the one that begins at ``step``."""
        return next(era for era in reversed(self._eras) if era[0].since < step)

    def holders(self, step: int, own: PeerId, missing: Sequence[int], *, late: bool) -> list[tuple[PeerId, list[int]]]:
        """Which members the peer ``own`` asks, in order, and for which of the samples that it lacks when the ring of ``step``
        begins: first the member that held them in the previous ring, then that member's neighbours, which have copies. ``late``:
        ``own`` was not in that ring, and asks all the others for everything."""
        _, members = self.at(step)
        others = [peer for peer in members if peer != own]
        if late:
            return [(peer, list(missing)) for peer in others]
        ring, before = self.before(step)
        owner = {int(sample): place for place in range(len(before)) for sample in ring.held(step, place)}
        asked: dict[PeerId, list[int]] = {}
        for sample in missing:
            place = owner[sample]
            around = [before[place], before[place - 1], before[(place + 1) % len(before)], before[place - 2]]
            for peer in [each for each in dict.fromkeys(around) if each in others]:
                asked.setdefault(peer, []).append(sample)
        return list(asked.items())

    def indices(self, step: int, peer: PeerId) -> Indices:
        """The samples that ``peer`` trains on in ``step``."""
        ring, members = self.at(step)
        return ring.indices(step, members.index(peer))
