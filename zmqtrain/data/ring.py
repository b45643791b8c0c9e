"""The sample ring (GossipGraD, Daily et al. 2018, section 5): which peer trains on which samples at which step. Pure.

The samples are divided into parts, one per peer. In a *lap* every peer goes once through the part that it holds, in batches. Each
batch moves to the next peer on the ring when it has been used, so in the next lap each peer has the part of the peer before it::

    lap 0    peer 0: part 0    peer 1: part 1    peer 2: part 2
    lap 1    peer 0: part 2    peer 1: part 0    peer 2: part 1

The following always holds, even if the number of samples is not a multiple of the number of peers:

- A lap uses each sample exactly once, over all peers.
- A peer sees a sample again only when all others have seen it: after as many laps as there are peers.
- All peers take the same number of steps in a lap, and their batches of a lap differ by at most one sample in size, as do parts.

When the members change, the ring closes around lost members and opens for new ones: parts are evened out with as few samples moved
as possible, and a new lap begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zmqtrain.data.partition import Indices, even_bounds, shuffled
from zmqtrain.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """The ring between two changes of its members. Positions on it count from 0."""

    parts: tuple[Indices, ...]
    """The samples that each position holds when the first lap begins."""
    batch_size: int
    """The size of the largest batch."""
    since: int = 0
    """The step at which the first lap begins."""

    @classmethod
    def of(cls, samples: int, peers: int, batch_size: int, seed: int) -> Ring:
        """All samples in a seeded order, divided evenly. Raises `UsageError` if there are fewer samples than peers."""
        if samples < peers:
            raise UsageError(f"the training data has {samples} samples, too few for a ring of {peers} groups")
        order = shuffled(samples, seed, 0)
        return cls(tuple(order[slice(*even_bounds(samples, peers, peer))] for peer in range(peers)), batch_size)

    @property
    def peers(self) -> int:
        """The number of positions on the ring."""
        return len(self.parts)

    @property
    def steps(self) -> int:
        """The number of steps in a lap."""
        return max(1, -(-max(len(part) for part in self.parts) // self.batch_size))

    def place(self, step: int) -> tuple[int, int]:
        """The lap of ``step``, and the number of its batch in that lap."""
        return divmod(step - self.since, self.steps)

    def indices(self, step: int, peer: int) -> Indices:
        """The samples that ``peer`` trains on in ``step``."""
        lap, slot = self.place(step)
        return self._batch((peer - lap) % self.peers, slot)

    def samples_at(self, step: int) -> int:
        """The number of samples of all peers in a step."""
        _, slot = self.place(step)
        return sum(len(self._batch(part, slot)) for part in range(self.peers))

    def spread(self, samples: list[int]) -> list[list[int]]:
        """Divide a position's samples evenly into the batches of a lap; if there are too few, a batch gets the first sample."""
        bounds = [even_bounds(len(samples), self.steps, slot) for slot in range(self.steps)]
        return [samples[start:stop] or samples[:1] for start, stop in bounds]

    def held(self, step: int, peer: int) -> Indices:
        """What a peer has when ``step`` begins: the samples that it has not used in this lap, and those received for the next
        one."""
        lap, slot = self.place(step)
        now, then = (peer - lap) % self.peers, (peer - lap - 1) % self.peers
        ahead = [self._batch(now, each) for each in range(slot, self.steps)]
        return np.concatenate([*(self._batch(then, each) for each in range(slot)), *ahead])

    def changed(self, step: int, members: Sequence[int | None]) -> Ring:
        """The ring from ``step`` on with these members: the old position of each, or ``None`` for a new one, in their new order.

        Samples of lost members go to the nearest remaining member before them, which has copies. Then each member with more than an
        even share gives its last samples to those who have less.
        """
        held = [list(self.held(step, peer)) for peer in range(self.peers)]
        left = [before for before in members if before is not None]
        for peer in range(self.peers):
            if peer not in left:
                heir = next(each for back in range(1, self.peers + 1) if (each := (peer - back) % self.peers) in left)
                held[heir] += held[peer]
        shares = [[] if before is None else held[before] for before in members]
        total, count = sum(map(len, shares)), len(members)
        sizes = [stop - start for start, stop in (even_bounds(total, count, place) for place in range(count))]
        spare = [sample for share, size in zip(shares, sizes, strict=True) for sample in share[size:]]
        parts = []
        for share, size in zip(shares, sizes, strict=True):
            missing = max(0, size - len(share))
            parts.append(np.array([*share[:size], *spare[:missing]], np.int64))
            del spare[:missing]
        return Ring(tuple(parts), self.batch_size, step)

    def _batch(self, part: int, slot: int) -> Indices:
        held = self.parts[part]
        return held[slice(*even_bounds(len(held), self.steps, slot))]
