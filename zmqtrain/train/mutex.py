"""Mutual exclusion between workers that share a processor: one at a time, in the order of requests. Without I/O."""

from __future__ import annotations

from collections import deque

from zmqtrain.errors import ProtocolError
from zmqtrain.net.endpoint import PeerId


class Mutex:
    """Each of ``members`` may have one request at a time; it waits for its turn, and keeps the turn until it gives it back."""

    def __init__(self, members: tuple[PeerId, ...]) -> None:
        self._members = members
        self._waiting: deque[PeerId] = deque()
        self.holder: PeerId | None = None
        """The member whose turn it is, if any."""

    def asked(self, member: PeerId) -> PeerId | None:
        """``member`` requests a turn. Returns the member whose turn begins now, if any. Raises `ProtocolError` if it may not
        ask."""
        if member not in self._members or member == self.holder or member in self._waiting:
            raise ProtocolError(
                f"{member} may not ask for a turn: it already has it or waits for it, or is not one of {', '.join(self._members)}"
            )
        self._waiting.append(member)
        return self._next()

    def given_back(self, member: PeerId) -> PeerId | None:
        """``member`` ends its turn. Returns the member whose turn begins now, if any. Raises `ProtocolError` if it has no turn."""
        if member != self.holder:
            has_it = "no member has the turn" if self.holder is None else f"{self.holder} has it"
            raise ProtocolError(f"{member} gives back a turn that it does not have: {has_it}")
        self.holder = None
        return self._next()

    def _next(self) -> PeerId | None:
        if self.holder is not None or not self._waiting:
            return None
        self.holder = self._waiting.popleft()
        return self.holder
