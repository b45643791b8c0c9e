"""Which peers exchange models at which step: a pure function of step, rank, world size and seed.

GossipGraD (Daily et al. 2018, section 4) has peers at positions 0 to p - 1. In a period of ceil(log2 p) steps, the partners of step
k are at distance 2^k, so what a peer knows has reached all others, directly or not, at the end of the period. Then the peers take
new positions (*partner rotation*). A step has one set of partners for everything that is exchanged in it, and a period has one
order: a rotation in its middle would undo what the distances add up to.

The paper rotates by random shuffles, which leave it to chance which peers meet. Here all orders come from one seeded shuffle, read
along the zigzag 0, 1, -1, 2, -2, ... modulo n, which is shifted by one from period to period. For even n, no difference between
neighbours occurs twice, so in n periods each peer comes directly after each other one: a row-complete Latin square (Williams 1949).
For odd p one peer keeps its position, in front of a zigzag of the others. On a hypercube the pairs of first steps are those of a
tournament in p - 1 rounds (the circle method). So all pairs meet directly within p periods, for any seed.

=============  ============================  ============================  ===================================================
topology       sends to                      receives from                 guarantee
=============  ============================  ============================  ===================================================
dissemination  i + 2^k                       i - 2^k                       all are reached in ceil(log2 p) steps, for any p
hypercube      i xor 2^k                     the same                      the same, in pairs; p must be a power of two
ring           i + 1                         i - 1                         all are reached in p - 1 steps
random         i + 1 of an order of its own  i - 1 of it                   only on average; Jin et al. (2016)
... a choice   any peer, chosen by itself    those that chose it, or none  not even the mean is preserved; Blot et al. (2016)
=============  ============================  ============================  ===================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Ranks = npt.NDArray[np.int64]
Shape = Literal["dissemination", "hypercube", "random", "ring"]

#: Names of random streams, so that the shuffles and the draws of a step never use the same numbers.
_SHUFFLE, _STEP = 1, 2


@dataclass(frozen=True, slots=True)
class Partners:
    """The partners of a peer in a step, as ranks."""

    to: int
    sources: tuple[int, ...]
    """The ranks that it receives from: one, except with unbalanced random partners."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The partners of ``world`` peers at every step."""

    world: int
    seed: int
    shape: Shape = "dissemination"
    rotation: bool = True
    balanced: bool = True
    """For random partners: whether every peer receives from exactly one."""

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"a world of {self.world} peers; there must be at least one")
        if self.shape == "hypercube" and not is_power_of_two(self.world):
            raise ValueError(
                f'gossip on a hypercube needs a power of two as the number of peers, not {self.world}: use "dissemination"'
            )

    @property
    def period(self) -> int:
        """Steps after which the data of a peer has reached all others (dissemination and hypercube): ceil(log2 world)."""
        return (self.world - 1).bit_length()

    def partners(self, step: int, rank: int) -> Partners | None:
        """The partners of ``rank`` at ``step``; ``None`` if there is no other peer."""
        if not 0 <= rank < self.world:
            raise ValueError(f"there is no rank {rank} in a world of {self.world}")
        if self.world == 1:
            return None
        if self.shape == "random":
            return self._random(step, rank)
        positions, ranks = self._places(step)
        here, world = int(positions[rank]), self.world
        distance = 1 << step % self.period
        if self.shape == "hypercube":
            to = source = here ^ distance
        elif self.shape == "dissemination":
            to, source = (here + distance) % world, (here - distance) % world
        else:
            to, source = (here + 1) % world, (here - 1) % world
        return Partners(int(ranks[to]), (int(ranks[source]),))

    def _places(self, step: int) -> tuple[Ranks, Ranks]:
        """The position of each rank, and the rank at each position."""
        if not self.rotation:
            return _in_order(self.world)
        return _rotated(self.world, self.seed, step // self.period % self.rounds, self._fixed)

    @property
    def rounds(self) -> int:
        """The number of periods until the first order recurs and, with rotation, all pairs have met: p, or p - 1."""
        return self.world - self._fixed

    @property
    def _fixed(self) -> int:
        """The number of peers that keep their position: 0 or 1."""
        return 1 if self.shape == "hypercube" else self.world % 2

    def _random(self, step: int, rank: int) -> Partners:
        key = (self.seed, _STEP, step)
        if self.balanced:  # around a circle of all peers in random order: each has one neighbour on either side
            positions, ranks = _shuffle(self.world, key)
            here = int(positions[rank])
            return Partners(int(ranks[(here + 1) % self.world]), (int(ranks[here - 1]),))
        chosen = _choices(self.world, key)
        return Partners(int(chosen[rank]), tuple(int(other) for other in np.flatnonzero(chosen == rank)))


def is_power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, ..."""
    return number > 0 and number & (number - 1) == 0


@lru_cache(maxsize=64)
def _shuffle(world: int, key: tuple[int, int, int]) -> tuple[Ranks, Ranks]:
    ranks = np.argsort(_numbers(world, key), kind="stable").astype(np.int64, copy=False)
    return _inverse(ranks), _frozen(ranks)


@lru_cache(maxsize=64)
def _rotated(world: int, seed: int, turn: int, fixed: int) -> tuple[Ranks, Ranks]:
    """The shuffle in the order of one round: the first ``fixed`` peers stay, and the others follow the zigzag, shifted."""
    base, others = _shuffle(world, (seed, _SHUFFLE, 0))[1], world - fixed
    half = (np.arange(others, dtype=np.int64) + 1) // 2
    zigzag = np.where(np.arange(others) % 2, half, -half)
    ranks = np.concatenate([base[:fixed], base[fixed:][(zigzag + turn) % others]])
    return _inverse(ranks), _frozen(ranks)


@lru_cache(maxsize=8)
def _in_order(world: int) -> tuple[Ranks, Ranks]:
    ranks = _frozen(np.arange(world, dtype=np.int64))
    return ranks, ranks


@lru_cache(maxsize=64)
def _choices(world: int, key: tuple[int, int, int]) -> Ranks:
    """The partner that each peer chooses, never itself."""
    others = (_numbers(world, key) % np.uint64(world - 1)).astype(np.int64)
    own = np.arange(world)
    return _frozen(others + (others >= own))


def _numbers(count: int, key: tuple[int, int, int]) -> npt.NDArray[np.uint64]:
    """Random numbers of a stream. numpy guarantees a bit generator's raw stream for all releases, and nothing else."""
    seed, stream, number = key
    return np.random.Philox(key=seed, counter=[0, 0, number, stream]).random_raw(count)


def _inverse(ranks: Ranks) -> Ranks:
    positions = np.empty_like(ranks)
    positions[ranks] = np.arange(len(ranks))
    return _frozen(positions)


def _frozen(ranks: Ranks) -> Ranks:
    ranks.flags.writeable = False
    return ranks
