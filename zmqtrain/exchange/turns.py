"""Who takes turns at the batches (`zmqtrain.data.slots`), if groups have models of their own: workers, or groups of several. Pure.

A group goes on as long as somebody of it is there who was there before, and has left nothing: its workers have one model, which
contains all that any of them has trained. Once nobody is, it is lost, and what comes to it later is another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from zmqtrain.data.slots import Era, Life, SlotPlan, lives_after
from zmqtrain.net.endpoint import PeerId


@dataclass(frozen=True, slots=True)
class Turns:
    """Others take turns, from a step on."""

    version: int
    """Of the view that says so."""
    since: int
    here: Sequence[tuple[PeerId, int | None]]
    """Those that do (`zmqtrain.data.slots.lives_after`)."""
    counted: Sequence[tuple[int, bool]]
    """What counts of those that are lost (`SlotPlan.go_on_without`)."""

    def begin(self, slots: SlotPlan) -> None:
        """Change the plan to that."""
        slots.go_on_without(self.since, lives_after(slots.eras[-1].members, self.here), self.counted)


class Takers:
    """Groups of several workers that take turns. Each is named by its first worker, whether that is there or not."""

    def __init__(self, groups: Sequence[Sequence[PeerId]]) -> None:
        self._groups = {peer: tuple(group) for group in groups for peer in group}
        self._asked: tuple[Era, Mapping[PeerId, int]] | None = None  # the era that was asked about last, and its members

    def group(self, peer: PeerId) -> tuple[PeerId, ...]:
        """All workers of the group of ``peer``."""
        return self._groups[peer]

    def name(self, peer: PeerId) -> PeerId:
        """The group of ``peer``."""
        return self._groups[peer][0]

    def first(self, present: Collection[PeerId]) -> list[Life]:
        """The groups with which a run begins."""
        return [(name, 0) for name in dict.fromkeys(map(self.name, present))]

    def here(self, living: Collection[PeerId], there: Collection[PeerId], version: int) -> list[tuple[PeerId, int | None]]:
        """Those of which somebody is ``living``: another one than before, if nobody of it was ``there`` then. ``version``: of the
        view that says so, and larger than that of all earlier changes."""
        goes_on = set(map(self.name, there))
        return [(name, None if name in goes_on else version) for name in dict.fromkeys(map(self.name, living))]

    def life(self, peer: PeerId, era: Era) -> Life:
        """The group of ``peer`` in an era in which somebody of it takes part."""
        name = self.name(peer)
        return name, self._lives(era)[name]

    def has_part(self, peer: PeerId, era: Era) -> bool:
        """Whether the group of ``peer`` takes part."""
        return self.name(peer) in self._lives(era)

    def _lives(self, era: Era) -> Mapping[PeerId, int]:
        if self._asked is None or self._asked[0] is not era:
            self._asked = era, dict(era.members)
        return self._asked[1]
