"""What must be acknowledged before what, if another server has a copy of a shard. A state machine without I/O.

The server of a shard numbers the operations that change it, and sends them to its backup, which carries out the same ones in the
same order (chain replication with two links: van Renesse and Schneider 2004). Nothing that the server tells anybody may be
forgotten when it is lost, so what follows from an operation is let out only once the backup has it, too.

::

               fill                  has the state              has all before          told to the coordinator
    ALONE ──────────────▶ FILLING ─────────────────▶ JOINING ───────────────────▶ COMPLETE ───────────────────▶ JOINED
      ▲   outputs: free             free                       held back                     held back            held back
      └─────────────────────────────────── the backup is lost, says a view of the members ───────────────────────────┘

While a backup is filled, training goes on, and nothing is held back: the chain has one link still. From JOINING on everything is
held back until it is acknowledged; when what had been let out before is, too, the backup has all that anybody may have seen. Only
then does the coordinator learn of it, and only a view says that a backup is gone: a server that has merely lost touch with it
must not go on alone, since it may be the one that everybody else counts as lost.
"""

from __future__ import annotations

from enum import Enum

from zmqtrain.net.endpoint import PeerId


class Stage(Enum):
    """How far the backup of a shard has got."""

    ALONE = "alone"
    FILLING = "filling"
    JOINING = "joining"
    COMPLETE = "complete"
    JOINED = "joined"


class Replication:
    """At the server of one shard."""

    def __init__(self, last: int = 0) -> None:
        """``last``: the number of the last operation so far."""
        self.last = last
        self.stage = Stage.ALONE
        self.backup: PeerId | None = None
        self._acknowledged = 0
        self._joins_at = 0

    def log(self) -> int:
        """The number of the next operation."""
        self.last += 1
        return self.last

    def fill(self, backup: PeerId) -> None:
        """``backup`` is sent the state as it is now, and then all operations."""
        assert self.stage is Stage.ALONE, f"{self.backup} is the backup"
        self.stage, self.backup, self._acknowledged = Stage.FILLING, backup, 0

    def acknowledge(self, backup: PeerId, number: int) -> None:
        """``backup`` has carried out all operations up to this number (or has the state that contains them)."""
        if backup != self.backup or number > self.last:
            return
        self._acknowledged = max(self._acknowledged, number)
        if self.stage is Stage.FILLING:
            self.stage, self._joins_at = Stage.JOINING, self.last
        if self.stage is Stage.JOINING and self._acknowledged >= self._joins_at:
            self.stage = Stage.COMPLETE

    def join(self) -> None:
        """The coordinator knows of the backup."""
        assert self.stage is Stage.COMPLETE, self.stage
        self.stage = Stage.JOINED

    def lose(self) -> None:
        """A view of the members says that the backup is gone."""
        self.stage, self.backup = Stage.ALONE, None

    def is_out(self, number: int) -> bool:
        """Whether what follows from the operation of this number may be told."""
        return self.stage in (Stage.ALONE, Stage.FILLING) or number <= self._acknowledged
