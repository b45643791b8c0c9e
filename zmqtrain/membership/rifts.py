"""Roles that have lost touch with each other, although the coordinator sees both: their link is lost for good. Sans-IO.

An elastic run goes on if one of the two is replaced. Which one, follows from what all say: a role that stood still, or whose
network was away, is named by many others, and each of these only by it. So whoever has lost touch with the most others goes first,
until no rift is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from zmqtrain.net.endpoint import PeerId

#: A process: the name of its role, and which process of that name it is.
Life: TypeAlias = tuple[PeerId, int]


@dataclass(frozen=True, slots=True)
class Gone:
    """A role that is to be replaced."""

    peer: PeerId
    reason: str


@dataclass(slots=True)
class Rifts:
    """Those that are known. ``wait_s``: how long others may take to say with whom they have lost touch."""

    wait_s: float
    _between: dict[frozenset[Life], str] = field(default_factory=dict)  # -> why, in words
    _deadline: float | None = None

    def note(self, one: Life, other: Life, why: str, now: float) -> None:
        """``one`` says that its link to ``other`` is lost."""
        self._between.setdefault(frozenset((one, other)), why)
        if self._deadline is None:
            self._deadline = now + self.wait_s

    def deadlines(self) -> list[float]:
        """When `settle` must be called at the latest."""
        return [] if self._deadline is None else [self._deadline]

    def settle(
        self,
        now: float,
        here: Callable[[Life], bool],
        last: Callable[[PeerId], tuple[bool | int, ...]],
        may_go: Callable[[Life, Life], bool] = lambda one, other: True,
    ) -> list[Gone]:
        """Decide who goes, once everybody has had time to say what is lost. ``here``: whether a process still takes part.
        ``may_go(one, other)``: whether ``one`` may go because it has lost touch with ``other``.
        ``last``: of roles with equally many rifts the one with the largest of these goes."""
        if self._deadline is None or now < self._deadline:
            return []
        between, may = dict[frozenset[Life], str](), dict[frozenset[Life], list[Life]]()
        for lives, why in self._between.items():
            may[lives] = [one for one in lives if all(may_go(one, other) for other in lives if other != one)]
            if all(map(here, lives)) and may[lives]:
                between[lives] = why
        self._between, self._deadline = {}, None
        found = []
        while between:
            of_life = {life: [pair for pair in between if life in may[pair]] for pair in between for life in may[pair]}
            gone = max(of_life, key=lambda life: (len(of_life[life]), *last(life[0])))
            others = sorted(peer for pair in of_life[gone] for peer, _ in pair if peer != gone[0])
            why = between[of_life[gone][0]]
            found.append(Gone(gone[0], f"it and {_named(others)} have lost touch with each other: {why}"))
            for pair in of_life[gone]:
                del between[pair]
        return found


def _named(peers: list[PeerId]) -> str:
    return peers[0] if len(peers) == 1 else f"{len(peers)} others"
