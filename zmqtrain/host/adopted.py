"""Memory of tensors that other processes of the host may read where it lies.

A tensor that goes through a collective again and again, like a bucket of gradients, need not be copied into shared memory each
time: its whole pages are moved into a file without a name (``memfd_create``), which is mapped over the same addresses, with the
same content. Other processes open that file, and read. What remains to be copied are the edges, less than a page on each side.

Nothing else may notice, so this is done for ordinary memory only (private, anonymous pages), and:

* As long as pages are adopted, a reference keeps their storage alive, so the allocator never gets them back: once nobody else
  refers to it, ordinary pages take their place, and the reference goes (`Adoptions.sweep`, before each use).
* A storage that gets other memory (``resize_``, ``share_memory_``) is noticed by its address. The pages are then the allocator's;
  other processes do not read them any more. Other threads may be writing there, so they cannot be copied; they are mapped privately
  in place of shared, which loses nothing (`_make_private`). A forked process must not share them: the first thing that it allocates
  may lie there, and would be written into this process's heap. A tensor that the allocator places there later is never adopted: its
  sums go through the window. (Storages that have mappings of their own, in glibc from 32 MiB on at the latest, leave nothing
  behind.)
* A forked process gets ordinary pages with the content at the time of the fork. Pages that are shared would show it what this
  process writes, and this process what the child writes. What forks without Python's knowledge, and runs on without ``exec``, has
  no such pages at all, and ends when it touches them.
* Other processes map the file for reading only: one that fails cannot change anything here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zmqtrain.arena.region import PAGE, available_bytes

#: The variable with the most bytes that a process adopts; 0 turns it off. By default a quarter of the memory that is available.
SETTING = "ZMQTRAIN_ADOPT_BYTES"
#: Smaller tensors go through the window, which waits less often.
LEAST_BYTES = 512 * 1024
#: The pages are adopted when a tensor is used this often.
USES = 3
#: Tensors whose uses are counted, the newest.
_MOST_COUNTED = 256
_NAME = "zmqtrain-adopted"
_MOST_READS = 3
_FIXED = 0x10  # MAP_FIXED and advice to madvise of Linux, which Python's mmap does not have
_POPULATE = 0x8000
_DONTFORK, _DOFORK = 10, 11
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(slots=True)
class Adopted:
    """The whole pages of a tensor's memory."""

    number: int
    """Of this process's adopted ranges; from 1, never used again."""
    before: int
    """Bytes of the tensor before the first page."""
    nbytes: int
    """Bytes of the pages."""
    file: int
    """The file's descriptor in this process."""
    storage: torch.UntypedStorage
    address: int
    """Where the first page lies."""
    origin: int
    """Where the storage lay."""

    def in_place(self) -> bool:
        """Whether the storage still has this memory."""
        return self.storage.data_ptr() == self.origin and self.origin + self.storage.nbytes() >= self.address + self.nbytes


class Adoptions:
    """The adopted ranges of a process. Any thread may call it."""

    def __init__(self, most_bytes: int | None = None) -> None:
        """``most_bytes``: in all; None: by the environment, or a quarter of the memory available when a range is adopted."""
        self._most = most_bytes
        self._lock = threading.Lock()
        self._uses: OrderedDict[tuple[int, int, int], tuple[Any, int]] = OrderedDict()
        self._ranges: dict[tuple[int, int, int], Adopted] = {}
        self._count = 0

    @property
    def nbytes(self) -> int:
        """How much memory is adopted."""
        return sum(each.nbytes for each in self._ranges.values())

    def use(self, flat: Tensor) -> Adopted | None:
        """The pages of a flat tensor on the CPU, if they are adopted. Counts the use, and adopts them in time.

        The caller holds ``flat``, and nobody writes to it during this call.
        """
        nbytes = flat.numel() * flat.element_size()
        if nbytes < LEAST_BYTES or not hasattr(torch._C, "_storage_Use_Count"):
            return None
        storage = flat.untyped_storage()
        key = storage._cdata, flat.data_ptr(), nbytes
        with self._lock:
            self._sweep()
            found = self._ranges.get(key)
            if found is None and self._counted(key, storage) == USES and not _pinned(flat):
                found = self._adopt(key, storage)
            return found

    def sweep(self) -> None:
        """Give up the ranges of storages that nobody else refers to."""
        with self._lock:
            self._sweep()

    def _counted(self, key: tuple[int, int, int], storage: torch.UntypedStorage) -> int:
        """The uses of the same memory of the same storage, this one included."""
        from torch.multiprocessing.reductions import StorageWeakRef

        weak, count = self._uses.pop(key, (None, 0))
        if weak is None or weak.expired():  # another storage at an address that was free
            weak, count = StorageWeakRef(storage), 0  # type: ignore[no-untyped-call]
        self._uses[key] = weak, count + 1
        while len(self._uses) > _MOST_COUNTED:
            self._uses.popitem(last=False)
        return count + 1

    def _adopt(self, key: tuple[int, int, int], storage: torch.UntypedStorage) -> Adopted | None:
        _, start, nbytes = key
        first, last = -(-start // PAGE) * PAGE, (start + nbytes) // PAGE * PAGE
        if self.nbytes + last - first > self._limit() or not _ordinary(first, last):
            return None
        try:
            file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        except OSError:
            return None
        try:
            _write(file, first, last - first)
            _FORKS.watch(self)
            _map(first, last - first, mmap.MAP_SHARED | _POPULATE, file)
        except OSError:  # no memory, or a limit: it goes through the window
            os.close(file)
            return None
        _libc.madvise(first, last - first, _DONTFORK)
        self._count += 1
        self._ranges[key] = Adopted(self._count, first - start, last - first, file, storage, first, storage.data_ptr())
        return self._ranges[key]

    def _limit(self) -> int:
        if self._most is not None:
            return self._most
        given = os.environ.get(SETTING, "")
        return int(given) if given.isdecimal() else (available_bytes() + self.nbytes) // 4

    def _sweep(self) -> None:
        for key, each in list(self._ranges.items()):
            if not each.in_place():
                with suppress(OSError):
                    _make_private(each.address, each.nbytes, each.file)
                self._drop(key)
            elif torch._C._storage_Use_Count(each.storage._cdata) == 1:
                with suppress(OSError):  # no memory for now
                    _map(each.address, each.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
                    _empty(each.file, each.nbytes)
                    self._drop(key)

    def _drop(self, key: tuple[int, int, int]) -> None:
        os.close(self._ranges.pop(key).file)
        self._uses.pop(key, None)

    # Forks, for `_Forks`.

    def before_fork(self) -> None:
        """Give up what nobody has any more, and let no thread adopt or give up anything until the fork is over."""
        self._lock.acquire()
        self._sweep()

    def after_in_parent(self) -> None:
        self._lock.release()

    def after_in_child(self) -> None:
        """The pages are ordinary ones now."""
        for each in self._ranges.values():
            os.close(each.file)
        self._ranges.clear()
        self._uses.clear()
        self._lock.release()


class _Forks:
    """Gives forked processes ordinary pages in place of this process's adopted ones, those of all `Adoptions` at once.

    Were it done for one after another, the next could give memory back whose pages the first has copied: the child would map its
    own there, and lose it to the copy.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Adoptions] = weakref.WeakSet()
        self._held: list[Adoptions] = []
        self._copies: list[tuple[int, mmap.mmap]] = []
        self._lock = threading.Lock()
        self._hooked = False

    def watch(self, adoptions: Adoptions) -> None:
        """Do it for these, too, from now on."""
        with self._lock:
            self._watched.add(adoptions)
            if not self._hooked:
                self._hooked = True
                os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def _before(self) -> None:
        with self._lock:
            self._held = list(self._watched)
        for each in self._held:
            each.before_fork()
        for mapping in list(_mappings("maps")):
            if mapping.adopted:
                nbytes = mapping.end - mapping.start
                copy = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                ctypes.memmove((ctypes.c_char * nbytes).from_buffer(copy), mapping.start, nbytes)
                # The child inherits them, until `_in_child`: what it maps before that would lie in their place, and be lost.
                _libc.madvise(mapping.start, nbytes, _DOFORK)
                self._copies.append((mapping.start, copy))

    def _in_parent(self) -> None:
        for address, copy in self._copies:
            _libc.madvise(address, len(copy), _DONTFORK)
            copy.close()
        self._copies.clear()
        for each in self._held:
            each.after_in_parent()
        self._held = []

    def _in_child(self) -> None:
        for address, copy in self._copies:
            _map(address, len(copy), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            ctypes.memmove(address, (ctypes.c_char * len(copy)).from_buffer(copy), len(copy))
        self._copies.clear()
        for each in self._held:
            each.after_in_child()
        self._held = []


_FORKS = _Forks()
ADOPTIONS = Adoptions()
"""Those of this process."""


def pages_of(process: int, file: int, nbytes: int) -> Tensor | None:
    """The bytes of a range that another process of the host has adopted, for reading. None if this process may not."""
    try:
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_only(mmap.mmap(opened, nbytes, mmap.MAP_SHARED | _POPULATE, mmap.PROT_READ))
        finally:
            os.close(opened)
    except (OSError, ValueError):
        return None


def _pinned(flat: Tensor) -> bool:
    """Whether a GPU knows the pages by their physical addresses."""
    return bool(torch.cuda.is_initialized()) and flat.is_pinned()  # type: ignore[no-untyped-call]


def _read_only(memory: mmap.mmap) -> Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no tensors that cannot be written; the pages cannot be
        return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass(slots=True)
class _Mapping:
    """A piece of this process's address space, as in ``/proc/self/smaps``."""

    start: int
    end: int
    access: str
    inode: str
    name: str
    flags: frozenset[str] = frozenset()

    @property
    def adopted(self) -> bool:
        """Whether these are adopted pages of this process, and not another's that it reads."""
        return self.access == "rw-s" and self.name.startswith(f"/memfd:{_NAME}")

    @property
    def ordinary(self) -> bool:
        """Private memory without a file, to read and write, that no device reads by itself and nobody has asked anything of."""
        nameless = self.name in ("", "[heap]") or self.name.startswith("[anon")
        return nameless and self.inode == "0" and self.access == "rw-p" and not self.flags & _SPECIAL


#: Flags of memory that must stay where it is: not inherited (as for RDMA), locked, of a device, huge pages.
_SPECIAL = frozenset(("dc", "lo", "io", "pf", "ht"))


def _mappings(source: str) -> Iterator[_Mapping]:
    """All of them, in order. ``source``: ``maps``, or ``smaps``, which also has the flags and takes longer."""
    found = None
    for line in Path("/proc/self", source).read_text().splitlines():
        words = line.split(maxsplit=5)
        if words[0] == "VmFlags:" and found is not None:
            found.flags = frozenset(line.split()[1:])
        elif not words[0].endswith(":"):
            if found is not None:
                yield found
            start, end = words[0].split("-")
            found = _Mapping(int(start, 16), int(end, 16), words[1], words[4], words[5] if len(words) > 5 else "")
    if found is not None:
        yield found


def _ordinary(first: int, last: int) -> bool:
    """Whether all these pages are ordinary memory."""
    # The kernel's list is not of one moment: what is mapped while it is read, as the memory for the list is, may leave a gap in it.
    found = (_covered(first, last) for _ in range(_MOST_READS))
    return next((each for each in found if each is not None), False)


def _covered(first: int, last: int) -> bool | None:
    """Whether ordinary memory covers all these pages; ``None`` if nothing does somewhere."""
    reached = first
    for each in _mappings("smaps"):
        if each.end <= reached:
            continue
        if each.start > reached:
            return None
        if not each.ordinary:
            return False
        reached = each.end
        if reached >= last:
            return True
    return None


def _map(address: int, nbytes: int, flags: int, file: int, offset: int = 0) -> None:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, nbytes, access, flags | _FIXED, file, offset) == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _make_private(address: int, nbytes: int, file: int) -> None:
    """Map the pages of ``file`` privately that are mapped shared there, if they still are. Any thread may write to them meanwhile.

    What was written before is in the file's pages, of which a private mapping copies one when it is written to the next time. So
    each write is seen afterwards, whether it came before or after."""
    inode = str(os.fstat(file).st_ino)
    for mapping in list(_mappings("maps")):
        first, last = max(mapping.start, address), min(mapping.end, address + nbytes)
        if first < last and mapping.adopted and mapping.inode == inode:
            _map(first, last - first, mmap.MAP_PRIVATE, file, first - address)


def _empty(file: int, nbytes: int) -> None:
    """Free a file's memory at once: others may have it mapped for long. Its length stays, so that nobody ends by touching it."""
    _libc.fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, 0, nbytes)


def _write(file: int, address: int, nbytes: int) -> None:
    source = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    done = 0
    while done < nbytes:
        done += os.pwrite(file, source[done : done + (1 << 30)], done)
