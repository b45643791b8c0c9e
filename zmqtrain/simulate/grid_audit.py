"""Checks what an elastic run on a grid of several rows says of itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from zmqtrain.net.endpoint import PeerId


class GridAudit:
    """Who has which part of the model, and who of them was lost since."""

    def __init__(self) -> None:
        self._number, self._rows = -1, 1
        self._workers: tuple[PeerId, ...] = ()
        self._lost: dict[PeerId, bool] = {}  # those that were lost: whether another process has come in their place

    def begins(self, number: int, rows: int, workers: Sequence[PeerId]) -> None:
        """Workers, by their positions, train on a grid, the newest of so many."""
        if number <= self._number:
            return
        self._number, self._rows, self._workers = number, rows, tuple(workers)
        for peer in workers:
            if self._lost.get(peer):
                del self._lost[peer]

    def lost(self, peers: Sequence[PeerId]) -> None:
        """These are gone, and what they had."""
        self._lost |= dict.fromkeys(peers, False)

    def joined(self, peer: PeerId) -> None:
        """A process has come; it has nothing yet."""
        if peer in self._lost:
            self._lost[peer] = True

    @property
    def may_give_up(self) -> bool:
        """Whether nobody could go on, as far as is known: before the first grid, all may be gone that have been there."""
        return not self._workers or self.a_row_is_gone

    @property
    def a_row_is_gone(self) -> bool:
        """Whether nobody is left who has some part of the model."""
        columns = [self._workers[start :: self._rows] for start in range(self._rows)]
        return bool(self._workers) and any(all(peer in self._lost for peer in row) for row in columns)
