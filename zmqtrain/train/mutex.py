"""Mutual exclusion between workers that share something to compute on: one at a time, in the order of asking. Without I/O."""

from __future__ import annotations

from collections import deque

from zmqtrain.errors import ProtocolError
from zmqtrain.net.endpoint import PeerId


class Mutex:
    """Each of ``members`` may ask once, waits for its turn, and has it until it gives it back."""

    def __init__(self, members: tuple[PeerId, ...]) -> None:
        self._members = members
        self._waiting: deque[PeerId] = deque()
        self.holder: PeerId | None = None
        """Whose turn it is."""

    def asked(self, member: PeerId) -> PeerId | None:
        """Returns who has the turn from now on, if that is new. Raises `ProtocolError` for who may not ask now."""
        if member not in self._members or member == self.holder or member in self._waiting:
            raise ProtocolError(
                f"{member} may not ask for a turn: it has it, waits for it, or is none of {', '.join(self._members)}"
            )
        self._waiting.append(member)
        return self._next()

    def given_back(self, member: PeerId) -> PeerId | None:
        """Returns who has the turn from now on, if anybody. Raises `ProtocolError` for who has it not."""
        if member != self.holder:
            raise ProtocolError(f"{member} gives back a turn that {self.holder or 'nobody'} has")
        self.holder = None
        return self._next()

    def _next(self) -> PeerId | None:
        if self.holder is not None or not self._waiting:
            return None
        self.holder = self._waiting.popleft()
        return self.holder
