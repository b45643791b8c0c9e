"""A checkpoint whose parts are arriving: which it has, which it waits for, and when it is complete. Blocking; no network.

It is complete when every role that took part in its step has sent its parts. In an elastic run some workers may be missing: each
worker sends, with its parts, the list of workers it knows of, and a worker that is known to be gone is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.checkpoint_part import MEMBERS, Mark, unpack_manifest
from zmqtrain.net.endpoint import PeerId
from zmqtrain.train.checkpoint.folder import CheckpointWriter, PartWriter, RunShape
from zmqtrain.wire.payload import Payload, Value


def shape_on(shape: RunShape, mark: Mark) -> RunShape:
    """The run's shape while its workers are on the grid with this mark."""
    return replace(shape, group_size=mark[1]) if mark else shape


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part that is on disk."""

    sender: PeerId
    files: Mapping[str, tuple[int, int]]
    """Size and CRC of each file."""
    members: tuple[int, ...] | None
    """The workers that the senders so far agree on; ``None``: all."""

    def to_value(self) -> Value:
        files: Value = {name: list(each) for name, each in self.files.items()}
        return [self.sender, files, None if self.members is None else list(self.members)]

    @classmethod
    def from_value(cls, value: Any) -> WrittenPart:
        sender, files, members = value
        return cls(sender, {name: (size, crc) for name, (size, crc) in files.items()}, None if members is None else tuple(members))


class IncomingCheckpoint:
    """One checkpoint until it is committed or abandoned."""

    def __init__(
        self,
        checkpoints: Path,
        step: int,
        shape: RunShape,
        began_s: float,
        parts: Mapping[str, WrittenPart] | None = None,
        mark: Mark = (),
        *,
        whole_groups: bool = False,
    ) -> None:
        """``parts``: those that another process has left on disk; it goes on from there. ``mark``: of the grid whose workers write
        it, if that may be another one than the job's, of which ``shape`` is. ``whole_groups``: parts of only some of a group are of
        no use."""
        shape = shape_on(shape, mark)
        self.mark, self._whole_groups = mark, whole_groups
        files = None if parts is None else {name: each for part in parts.values() for name, each in part.files.items()}
        self._writer = CheckpointWriter(checkpoints, step, shape, files)
        self.step, self.began_s = step, began_s
        self.newest: WrittenPart | None = None
        """The part that was written last."""
        self.overdue = False
        """Whether an event has said that it takes too long."""
        self._shape = shape
        self._parts: dict[str, tuple[PeerId, PartWriter]] = {}
        self._members: frozenset[int] | None = None
        self._written: dict[str, PeerId] = {}
        self._all = shape.parts()
        self._left = frozenset(parts or ())  # parts of which more messages may arrive, from senders that had no answer
        for name, part in (parts or {}).items():
            self._written[name] = part.sender
            if part.members is not None:
                self._hear_of_members({MEMBERS: list(part.members)})

    @property
    def names(self) -> Collection[str]:
        """The parts of which at least one message has arrived."""
        return self._parts.keys() | self._written.keys()

    def take(self, sender: PeerId, name: str, payload: Payload) -> bool:
        """Take the next message of a part. Returns whether the part is on disk now. Raises `CheckpointError` and `OSError`."""
        if name in self._written:
            if name in self._left:
                return False
            if self._written[name] == sender:
                raise CheckpointError(f"part {name} of checkpoint {self.step} arrived twice")
            return False  # a second worker sent it, in the belief that the first one is gone
        began, part = self._parts.get(name, (sender, None))
        if part is not None and began != sender:  # its first sender is gone, and another begins again
            part.discard()
            part = None
        if part is None:
            listed, sidecar = unpack_manifest(payload)
            self._hear_of_members(sidecar)
            part = self._writer.part(name, listed, sidecar)
            self._parts[name] = (sender, part)
        else:
            part.write(payload.frames(), payload.dtype, payload.numel)
        if not part.complete:
            return False
        files = part.close()
        self._writer.add(files)
        del self._parts[name]
        self._written[name] = sender
        self.newest = WrittenPart(sender, files, None if self._members is None else tuple(sorted(self._members)))
        return True

    def missing(self, nothing: Collection[str], there: Callable[[int], bool]) -> list[str]:
        """The names of the parts still to come.

        ``nothing``: parts that are always empty. ``there(rank)``: whether a worker is present."""
        present = self._present(there)
        parts = self._all if present is None else self._shape.parts(present)
        return [part for part in parts if part not in self._written and part not in nothing]

    def has_lost(self, there: Callable[[int], bool]) -> bool:
        """Whether a worker is gone whose part was waited for."""
        return self._members is not None and self._members != self._present(there)

    def commit(self, nothing: Mapping[str, Mapping[str, Any]], there: Callable[[int], bool]) -> Path:
        """Called when nothing is `missing`: write the empty parts, and commit the checkpoint. Returns its folder."""
        for _, part in self._parts.values():  # of workers that were lost while they sent it
            part.discard()
        self._parts.clear()
        for name, sidecar in nothing.items():
            if name not in self._written:
                self._writer.add(self._writer.part(name, [], {**sidecar, "step": self.step}).close())
        return self._writer.commit(self._present(there))

    def leave(self) -> None:
        """Leave what is on disk to another process."""
        for _, part in self._parts.values():
            part.leave()

    def discard(self) -> None:
        self.leave()
        self._writer.discard()

    def _hear_of_members(self, sidecar: Mapping[str, Any]) -> None:
        match sidecar.get(MEMBERS):
            case list() as ranks:
                said = frozenset(ranks)
                self._members = said if self._members is None else self._members & said
            case _:
                return

    def _present(self, there: Callable[[int], bool]) -> frozenset[int] | None:
        """The workers whose parts belong to the checkpoint; ``None``: all workers of the run."""
        if self._members is None:
            return None
        present = frozenset(rank for rank in self._members if f"worker-{rank}" in self._written or there(rank))
        if not self._whole_groups:
            return present
        size = self._shape.group_size
        lacking = {rank // size for rank in range(self._shape.world_size) if rank not in present}
        return frozenset(rank for rank in present if rank // size not in lacking)
