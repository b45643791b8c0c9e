"""Who may send when over network cards that several processes share: the arithmetic of reservations. Sans-IO.

A *card* carries so many bytes a second in one direction: what a host sends, what it gets, what leaves a rack. Bulk reserves a card
for as long as it takes, one piece after another in the order of asking. A piece asks for the sender's card when the one before it
is through, so flows take turns piece by piece; and it asks for the cards behind that one when it has left the sender's, as if a
switch between them kept what the next is too busy for. So a busy receiver holds up nobody but those who send to it.

Small urgent messages go between the packets of bulk, as they do on a network where each connection has a queue of its own: they
wait for each other only, and what bulk asks for next begins later by what they took.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Per card: until when it is reserved, and until when for urgent messages.
TIMES = 2


class Cards:
    """All cards of a network. Times in seconds, on one clock for all who share them."""

    def __init__(self, times: list[float] | memoryview[float], rates: Sequence[float]) -> None:
        """``times``: `TIMES` numbers a card, at first 0; they may lie in shared memory. ``rates``: bytes a second."""
        self._times = times
        self._rates = rates

    def reserve(self, card: int, nbytes: int, ready: float) -> tuple[float, float]:
        """From when to when ``nbytes`` that are ready since ``ready`` have the card.

        ``ready`` may lie in the past, so that nothing is lost to those who are a little late to ask.
        """
        start = max(self._times[TIMES * card], ready)
        end = start + nbytes / self._rates[card]
        self._times[TIMES * card] = end
        return start, end

    def follow(self, cards: Sequence[int], nbytes: int, start: float, end: float) -> float:
        """When the last of ``nbytes`` has passed ``cards``, one behind the other, after a card that carried them from ``start`` to
        ``end``.

        A card need not wait for the last byte before it begins; but a fast one begins so late that it never waits in between, and
        has time for others.
        """
        for card in cards:
            start, end = self.reserve(card, nbytes, max(start, end - nbytes / self._rates[card]))
        return end

    def slip(self, cards: Sequence[int], nbytes: int, now: float) -> float:
        """When a small urgent message that begins now has passed ``cards``."""
        end = now
        times = self._times
        for card in cards:
            took = nbytes / self._rates[card]
            own_end = max(now, times[TIMES * card + 1]) + took
            times[TIMES * card + 1] = own_end
            times[TIMES * card] = max(now, times[TIMES * card]) + took
            end = max(end, own_end)
        return end
