"""What processes must have alike, compared where all of them meet. Sans-IO.

Each process says of itself what it has, in items of text. The first to say so is the measure for all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import zip_longest
from typing import TypeAlias

from zmqtrain.errors import ProtocolError
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value

#: What is compared, by its name: its items, in their order.
Facts: TypeAlias = Mapping[str, Sequence[str]]

#: The most that a process may say at once: things, items of each, and characters of an item.
MOST_THINGS, MOST_ITEMS, MOST_CHARACTERS = 300, 300, 200
#: The most subjects of which facts are kept.
MOST_SUBJECTS = 16


@dataclass(frozen=True, slots=True)
class Difference:
    """Two processes differ in something."""

    what: str
    first: PeerId
    """The one that said it first."""
    host: str
    """Where that one is."""
    theirs: str
    """The first item that differs; empty: it has no more."""
    ours: str

    def to_value(self) -> Value:
        """Encode the difference as plain values, for `from_value`."""
        return [self.what, self.first, self.host, self.theirs, self.ours]

    @classmethod
    def from_value(cls, value: Value) -> Difference:
        """Decode what `to_value` returned. Raises `ProtocolError` for anything else."""
        match value:
            case [str(what), str(first), str(host), str(theirs), str(ours)]:
                return cls(what, first, host, theirs, ours)
        raise ProtocolError(f"the coordinator answered with {value!r:.60}, which is no difference")


@dataclass(slots=True)
class Alike:
    """Keeps what was said first of each thing of each subject."""

    _first: dict[str, dict[str, tuple[PeerId, str, Sequence[str]]]] = field(default_factory=dict)

    def compare(self, subject: str, peer: PeerId, host: str, facts: Facts) -> list[Difference]:
        """In what ``peer`` differs from the first to say something of the same things of this subject."""
        if subject not in self._first and len(self._first) >= MOST_SUBJECTS:
            return []
        known = self._first.setdefault(subject, {})
        found = []
        for what, items in facts.items():
            if what not in known and len(known) < MOST_THINGS:
                known[what] = peer, host, items
            first, there, theirs = known.get(what, (peer, host, items))
            for one, other in zip_longest(theirs, items, fillvalue=""):
                if one != other:
                    found.append(Difference(what, first, there, one, other))
                    break
        return found


def facts_of(value: Value) -> Facts | None:
    """Facts that came over the wire; ``None`` if they are none, or too many."""
    if not isinstance(value, dict) or len(value) > MOST_THINGS:
        return None
    for items in value.values():
        if not isinstance(items, list) or len(items) > MOST_ITEMS:
            return None
        if not all(isinstance(item, str) and len(item) <= MOST_CHARACTERS for item in items):
            return None
    return {str(what): [str(item) for item in items] for what, items in value.items()}  # type: ignore[union-attr]


def bounded(items: Sequence[str]) -> list[str]:
    """The items, as many and as long as may be said; what that leaves out is in a digest, so that it is compared, too."""
    short = [item if len(item) <= MOST_CHARACTERS else f"{item[: MOST_CHARACTERS - 20]}... {_digest(item)}" for item in items]
    if len(short) <= MOST_ITEMS:
        return short
    rest = short[MOST_ITEMS - 1 :]
    return [*short[: MOST_ITEMS - 1], f"{len(rest)} more, {_digest(*rest)}"]


def _digest(*items: str) -> str:
    return blake2b("\n".join(items).encode(), digest_size=6).hexdigest()
