"""What a group's model contains of the others' batches, with gossip: partners tell each other. Sans-IO.

At each step a model takes in its partner's: all that the partner has trained up to that step, and what the partner's model
contained before. Only models that have arrived completely count.
"""

from __future__ import annotations

from collections.abc import Mapping

from zmqtrain.data.slots import Life
from zmqtrain.exchange.contents import known_of, merge, rows_of
from zmqtrain.wire.payload import Value

#: A message tells of at most so many groups: older batches have been passed on four times and more.
MOST_TOLD = 16


class MixedContents:
    """Implements `Contents`. Steps are exchanged in order, but two may be under way at a time."""

    def __init__(self) -> None:
        self._known: dict[Life, int] = {}
        self._news: dict[int, dict[Life, int]] = {}  # what the last steps have added, by step
        self._parts: dict[tuple[int, Life], tuple[int, dict[Life, int]]] = {}  # step, partner: parts that came, and what they told
        self._told: tuple[int, Value] | None = None  # step, and what partners are told in it as long as nothing new comes

    def got(self, life: Life) -> int:
        return max(known.get(life, 0) for known in (self._known, *self._news.values()))

    def known(self) -> Mapping[Life, int]:
        return self._before(None)

    def begin_with(self, known: Mapping[Life, int]) -> None:
        merge(self._known, known)
        self._told = None

    def begin(self, step: int) -> None:
        """``step`` is about to be exchanged; the one before may still be under way."""
        for old in [old for old in self._news if old < step - 1]:
            merge(self._known, self._news.pop(old))
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] >= step - 1}

    def told(self, step: int) -> Value:
        """What to tell a partner with each part of the model as it is before the exchange of ``step``."""
        if self._told is None or self._told[0] != step:
            self._told = step, rows_of(self._before(step), MOST_TOLD)
        return self._told[1]

    def came(self, source: Life, step: int, told: Value, *, of: int) -> None:
        """A part of the partner's model has come, one ``of`` so many, and what it `told`. Raises `ProtocolError`."""
        count, known = self._parts.pop((step, source), (0, {}))
        merge(known, known_of(told))
        if count + 1 < of:
            self._parts[step, source] = count + 1, known
        else:
            merge(self._news.setdefault(step, {}), {**known, source: step + 1})
            self._told = None

    def _before(self, step: int | None) -> dict[Life, int]:
        known = dict(self._known)
        for earlier, news in self._news.items():
            if step is None or earlier < step:
                merge(known, news)
        return known
