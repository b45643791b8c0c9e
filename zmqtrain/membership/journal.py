"""The journal of a run's coordinator: what it has decided, so that another process can go on with it.

What must not be forgotten is a *ledger*: a flat table of names and plain values. The journal is a file of records, each the change
from one ledger to the next; a reader that applies all records has the newest ledger. From time to time the file is replaced by one
record with the whole ledger, so that it stays small. A record that was cut off by the end of its process or machine counts as not
written.

The process that holds the file's lock leads the run. The lock ends with the process. A later leader replaces the file; one that
finds its file replaced leads no more (`JournalFile.superseded`). The file holds the run's secrets, and only its owner may read it.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgpack

from zmqtrain.durable import sync_folder
from zmqtrain.errors import JournalError
from zmqtrain.wire.payload import Value

#: Names and plain values.
Ledger: TypeAlias = dict[str, Value]
#: The file's name in the run directory.
NAME = "journal"
#: A record begins with its length and its CRC, four bytes each.
_FRAME = 8
#: A journal is replaced by its ledger when it is larger than this, and than twice its size after the last time.
SMALL_BYTES = 1 << 20


def change(before: Mapping[str, Value], after: Mapping[str, Value]) -> dict[str, Value]:
    """The values that differ; ``None`` for names that are gone."""
    different = {name: value for name, value in after.items() if name not in before or before[name] != value}
    return {**different, **dict.fromkeys(before.keys() - after.keys())}


def apply(ledger: Ledger, changes: Mapping[str, Value]) -> None:
    """Make the changes: ``None`` removes a name."""
    for name, value in changes.items():
        if value is None:
            ledger.pop(name, None)
        else:
            ledger[name] = value


def encode(changes: Mapping[str, Value]) -> bytes:
    """Encode changes of the ledger as a record: its length, its checksum, and the changes in msgpack."""
    body: bytes = msgpack.packb(dict(changes))
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def replay(data: bytes) -> tuple[Ledger, int]:
    """The ledger after all records, and the number of bytes that they take. A record at the end that is not whole is left out.

    Raises `JournalError` if a record before the last one is damaged."""
    ledger: Ledger = {}
    at = 0
    while len(data) - at > _FRAME:
        length, crc = int.from_bytes(data[at : at + 4], "little"), int.from_bytes(data[at + 4 : at + _FRAME], "little")
        end = at + _FRAME + length
        body = data[at + _FRAME : end]
        if len(body) < length:
            break
        if not length or zlib.crc32(body) != crc:
            if any(data[end:]):  # a machine that lost power leaves zeros, and nothing else, behind what it has written
                raise JournalError(f"the record at byte {at} is damaged")
            break
        changes: Any = msgpack.unpackb(body, strict_map_key=False)
        if not isinstance(changes, dict):
            raise JournalError(f"the record at byte {at} holds no changes")
        apply(ledger, changes)
        at = end
    return ledger, at


class Journal(Protocol):
    """The record of the coordinator's decisions, from which another coordinator can continue."""

    ledger: Ledger
    """What was written so far."""

    @property
    def superseded(self) -> bool:
        """Whether another process keeps the journal now."""

    def stage(self, changes: Mapping[str, Value]) -> None:
        """Have these changes written with the next ones, in one record."""

    def write(self, changes: Mapping[str, Value], *, durable: bool) -> None:
        """Write changes, ``None`` for what is removed. ``durable``: they survive the end of the machine."""


class JournalFile:
    """A journal on disk, locked by this process. Make it by `create` or `take_over`, and `close` it."""

    def __init__(self, path: Path, file: int, ledger: Ledger) -> None:
        self.path, self.ledger = path, ledger
        self.failure = ""
        """Why nothing can be written any more; empty while it can."""
        self._file = file
        self._staged: dict[str, Value] = {}
        self._bytes = self._least = 0

    @classmethod
    def create(cls, path: Path, ledger: Ledger) -> JournalFile:
        """A new journal. Raises ``OSError``, and `JournalError` if another process holds one there."""
        if path.exists():
            cls._locked(path).close()
        journal = cls(path, -1, ledger)
        journal._replace()
        return journal

    @classmethod
    def take_over(cls, path: Path) -> JournalFile:
        """The journal that a leader has left.

        Raises `JournalError` if there is none, if it cannot be read, or if its leader still runs."""
        journal = cls._locked(path)
        file = journal._file
        with os.fdopen(os.dup(file), "rb") as whole:
            journal.ledger, good = replay(whole.read())
        os.ftruncate(file, good)
        journal._bytes = journal._least = good
        if not journal.ledger:
            journal.close()
            raise JournalError(f"{path} holds nothing: the run had not begun")
        return journal

    @staticmethod
    def read(path: Path) -> Ledger:
        """The ledger, without a lock. Raises `JournalError`."""
        try:
            return replay(path.read_bytes())[0]
        except OSError as error:
            raise JournalError(f"{path} cannot be read: {error.strerror or error}") from error

    @classmethod
    def _locked(cls, path: Path) -> JournalFile:
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise JournalError(f"{path} cannot be read: {error.strerror or error}") from error
        journal = cls(path, file, {})
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            journal.close()
            raise JournalError(f"another launcher leads this run: it holds {path}") from error
        if journal.superseded:
            journal.close()
            raise JournalError(f"another launcher has just taken over this run: it has replaced {path}")
        return journal

    @property
    def superseded(self) -> bool:
        """Whether another process has replaced the file: it leads the run."""
        try:
            there, mine = os.stat(self.path), os.fstat(self._file)
        except OSError:
            return False  # the whole directory may be gone, which others report
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def stage(self, changes: Mapping[str, Value]) -> None:
        """Have these changes written with the next ones, in one record."""
        self._staged.update(changes)

    def write(self, changes: Mapping[str, Value], *, durable: bool) -> None:
        """Append a record. ``durable``: it survives the end of the machine, too, and not only that of this process.

        A disk that fails is noted in `failure`: the journal is then removed, since it does not tell the truth any more."""
        new = {name: value for name, value in {**self._staged, **changes}.items() if self.ledger.get(name) != value}
        self._staged.clear()
        if not new or self.failure:
            return
        apply(self.ledger, new)
        record = encode(new)
        try:
            if self._bytes > max(SMALL_BYTES, 2 * self._least):
                self._replace()
                return
            _write_all(self._file, record)
            self._bytes += len(record)
            if durable:
                os.fdatasync(self._file)
        except OSError as error:
            self.failure = error.strerror or str(error)
            if not self.superseded:
                self.path.unlink(missing_ok=True)

    def _replace(self) -> None:
        """Write the whole ledger to a new file, which takes the place of the old one."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.unlink(missing_ok=True)
        file = os.open(temporary, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            record = encode(self.ledger)
            _write_all(file, record)
            os.fsync(file)
            if self._file >= 0 and self.superseded:
                raise OSError("another launcher has replaced it")
            os.replace(temporary, self.path)
            sync_folder(self.path.parent)
        except OSError:
            os.close(file)
            temporary.unlink(missing_ok=True)
            raise
        before, self._file = self._file, file
        if before >= 0:
            os.close(before)
        self._bytes = self._least = len(record)

    def begin_epoch(self, changes: Mapping[str, Value]) -> None:
        """This process leads the run from now on: replace the file, so that the leader before finds that it leads no more. Raises
        ``OSError``."""
        apply(self.ledger, changes)
        self._replace()

    def remove(self) -> None:
        """The run is over: nothing is left to go on with."""
        if not self.superseded:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the lock. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write_all(file: int, data: bytes) -> None:
    written = 0
    while written < len(data):
        written += os.write(file, data[written:])
