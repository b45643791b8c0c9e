"""Where a run and each of its members stand, and which changes are possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from zmqtrain.membership.view import Member


class State(Enum):
    """Where the run stands."""

    JOINING = "joining"
    RUNNING = "running"
    FINISHING = "finishing"
    FAILED = "failed"
    ENDED = "ended"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.JOINING: frozenset({State.RUNNING, State.FINISHING, State.FAILED}),
    State.RUNNING: frozenset({State.FINISHING, State.FAILED}),
    State.FINISHING: frozenset({State.FAILED, State.ENDED}),
    State.FAILED: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class Presence(Enum):
    """Where one member stands."""

    EXPECTED = "expected"
    HERE = "here"
    LEFT = "left"
    LOST = "lost"


@dataclass(slots=True)
class Entry:
    """What is known of one member."""

    member: Member
    presence: Presence = Presence.EXPECTED
    incarnation: int = 0
    exited: bool = False
    reason: str = ""

    @property
    def here(self) -> bool:
        """Whether it has joined and is still in the run."""
        return self.presence is Presence.HERE

    @property
    def gone(self) -> bool:
        """Whether it will never come (back)."""
        return self.presence in (Presence.LEFT, Presence.LOST)
