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

    def settle(self, now: float, here: Callable[[Life], bool], last: Callable[[PeerId], tuple[bool | int, ...]]) -> list[Gone]:
        """Decide who goes, once everybody has had time to say what is lost. ``here``: whether a process still takes part.
        ``last``: of roles with equally many rifts the one with the largest of these goes."""
        if self._deadline is None or now < self._deadline:
            return []
        between = {lives: why for lives, why in self._between.items() if all(map(here, lives))}
        self._between, self._deadline = {}, None
        found = []
        while between:
            lives = {life: [pair for pair in between if life in pair] for pair in between for life in pair}
            gone = max(lives, key=lambda life: (len(lives[life]), *last(life[0])))
            others = sorted(peer for pair in lives[gone] for peer, _ in pair if peer != gone[0])
            why = between[lives[gone][0]]
            found.append(Gone(gone[0], f"it and {_named(others)} have lost touch with each other: {why}"))
            for pair in lives[gone]:
                del between[pair]
        return found


def _named(peers: list[PeerId]) -> str:
    return peers[0] if len(peers) == 1 else f"{len(peers)} others"
