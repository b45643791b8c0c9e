"""What must be acknowledged before what, if another server has a copy of a shard. A state machine without I/O.

The server of a shard numbers the operations that change it, and sends them to its backup, which carries out the same ones in the
same order (chain replication with two links: van Renesse and Schneider 2004). Nothing that the server tells anybody may be
forgotten when it is lost, so what follows from an operation is let out only once the backup has it, too.

::

               fill                  has the state              has all before          told to the coordinator
    ALONE ──────────────▶ FILLING ─────────────────▶ JOINING ───────────────────▶ COMPLETE ───────────────────▶ JOINED
      ▲   outputs: free             free                       held back                     held back            held back
      └───────────── a view of the members says that the backup is lost, or that another one is in its place ──────┘

While a backup is filled, training goes on, and nothing is held back for it: the chain does not have it yet. From JOINING on
everything is held back until it is acknowledged; when what had been let out before is, too, the backup has all that anybody may
have seen. Only then does the coordinator learn of it, and only a view says that a backup is gone: a server that has merely lost
touch with it must not go on alone, since it may be the one that everybody else counts as lost.

A backup can be replaced: the next one is filled while the present one still acknowledges, so that no moment has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zmqtrain.net.endpoint import PeerId


class Stage(Enum):
    """How far a backup of a shard has got."""

    ALONE = "alone"
    FILLING = "filling"
    JOINING = "joining"
    COMPLETE = "complete"
    JOINED = "joined"


@dataclass(slots=True)
class _Backup:
    stage: Stage
    acknowledged: int = 0
    joins_at: int = 0


class Replication:
    """At the server of one shard."""

    def __init__(self, last: int = 0, *, joined: PeerId | None = None) -> None:
        """``last``: the number of the last operation so far. ``joined``: a backup that has them all."""
        self.last = last
        self._backups: dict[PeerId, _Backup] = {}
        if joined is not None:
            self._backups[joined] = _Backup(Stage.JOINED, last)

    @property
    def backup(self) -> PeerId | None:
        """The backup that the coordinator knows of."""
        return next((peer for peer, backup in self._backups.items() if backup.stage is Stage.JOINED), None)

    def stage(self, backup: PeerId) -> Stage:
        """How far this one has got."""
        found = self._backups.get(backup)
        return Stage.ALONE if found is None else found.stage

    def log(self) -> int:
        """The number of the next operation."""
        self.last += 1
        return self.last

    def fill(self, backup: PeerId) -> None:
        """``backup`` is sent the state as it is now, and then all operations."""
        assert backup not in self._backups, f"{backup} is a backup already"
        assert all(each.stage is Stage.JOINED for each in self._backups.values()), "one at a time"
        self._backups[backup] = _Backup(Stage.FILLING)

    def acknowledge(self, backup: PeerId, number: int) -> None:
        """``backup`` has carried out all operations up to this number (or has the state that contains them)."""
        found = self._backups.get(backup)
        if found is None or number > self.last:
            return
        found.acknowledged = max(found.acknowledged, number)
        if found.stage is Stage.FILLING:
            found.stage, found.joins_at = Stage.JOINING, self.last
        if found.stage is Stage.JOINING and found.acknowledged >= found.joins_at:
            found.stage = Stage.COMPLETE

    def join(self, backup: PeerId) -> PeerId | None:
        """The coordinator knows of the backup. Returns the one in whose place it is, which is none any more."""
        assert self.stage(backup) is Stage.COMPLETE, self.stage(backup)
        before = self.backup
        if before is not None:
            del self._backups[before]
        self._backups[backup].stage = Stage.JOINED
        return before

    def lose(self, backup: PeerId) -> None:
        """A view of the members says that this one is gone, or is not to be a backup any more."""
        self._backups.pop(backup, None)

    def has_all(self, backup: PeerId) -> bool:
        """Whether this one has carried out all operations so far."""
        found = self._backups.get(backup)
        return found is not None and found.stage is Stage.JOINED and found.acknowledged == self.last

    def is_out(self, number: int) -> bool:
        """Whether what follows from the operation of this number may be told."""
        return all(each.stage is Stage.FILLING or number <= each.acknowledged for each in self._backups.values())
