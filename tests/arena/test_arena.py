"""Shared memory: places, words, and what becomes of it when processes die."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from zmqtrain.arena import Arena, Place, Region, region, shared_memory_missing
from zmqtrain.arena.arena import STARTS
from zmqtrain.arena.region import PAGE
from zmqtrain.arena.words import LINE
from zmqtrain.errors import HostMemoryError

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
MIB = 1 << 20


@pytest.fixture
def shared() -> Iterator[Region]:
    made = Arena.create(3, 4 * MIB)
    yield made
    made.close()


def test_others_see_what_is_written(shared: Region) -> None:
    one, other = Arena(shared, 0), Arena.join(shared.path, 1)
    block = one.allocate(1000)
    block.memory[:5] = b"hello"
    assert bytes(other.memory(block.place)[:5]) == b"hello"
    other.memory(block.place)[:5] = b"there"
    assert bytes(block.memory[:5]) == b"there"


def test_each_allocates_in_its_own_slot(shared: Region) -> None:
    arenas = [Arena(shared, slot) for slot in range(3)]
    places = [arena.allocate(2 * MIB).place for arena in arenas for _ in range(2)]
    spans = sorted((place.start, place.start + place.nbytes) for place in places)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert [arena.taken_bytes for arena in arenas] == [4 * MIB] * 3


def test_the_place_of_memory_is_found_again(shared: Region) -> None:
    arena = Arena(shared, 2)
    block = arena.allocate(100)
    assert arena.place_of(0, 1) is None
    address = np.frombuffer(block.memory, np.uint8).ctypes.data
    assert arena.place_of(address, 100) == block.place
    assert arena.place_of(np.zeros(8).ctypes.data, 8) is None


def test_places_outside_all_heaps_are_refused(shared: Region) -> None:
    arena = Arena(shared, 0)
    good = arena.allocate(64).place
    for place in (Place(0, 8), Place(PAGE, 8), Place(good.start, 1 << 40), Place(good.start, -1), Place(1 << 50, 8), Place(-64, 8)):
        with pytest.raises(ValueError, match="is outside all processes' parts"):
            arena.memory(place)


def test_memory_is_real_only_when_it_is_taken(shared: Region) -> None:
    before = shared.resident_bytes()
    arena = Arena(shared, 0)
    assert shared.resident_bytes() - before < MIB
    arena.allocate(2 * MIB)
    assert shared.resident_bytes() - before >= 2 * MIB


def test_a_process_that_takes_a_slot_again_finds_it_empty(shared: Region) -> None:
    first = Arena(shared, 1)
    first.allocate(2 * MIB).memory[:4] = b"left"
    first.words(1).set(5, 7)
    resident = shared.resident_bytes()
    second = Arena.join(shared.path, 1)
    assert resident - shared.resident_bytes() >= 2 * MIB - 2 * PAGE
    assert second.words(1).get(5) == 0
    assert second.words(1).get(STARTS) == 2
    assert bytes(second.allocate(4).memory) == b"\0" * 4


def test_what_does_not_fit_is_said_with_its_figure(shared: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(shared, 0)
    arena.allocate(MIB)
    with pytest.raises(HostMemoryError, match=r"a bucket needs 8.0 MB of contiguous shared memory; .* already uses 1.0 MB"):
        arena.allocate(8_000_000, "a bucket")
    monkeypatch.setattr(region, "available_bytes", lambda: 1_000_000)
    with pytest.raises(HostMemoryError, match=r"a bucket needs 2.0 MB of shared memory, but only 1.0 MB are left on this host"):
        arena.allocate(2_000_000, "a bucket")
    monkeypatch.undo()
    arena.allocate(2_000_000, "a bucket")  # nothing of what was refused is taken


def test_the_control_groups_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/sys/fs/cgroup/memory.max": "1000000", "/sys/fs/cgroup/memory.current": "400000"}
    monkeypatch.setattr(region, "Path", lambda name: _file(tmp_path, texts, name))
    assert region.available_bytes() == 600_000
    texts["/sys/fs/cgroup/memory.max"] = "max"
    assert region.available_bytes() > 600_000


def _file(folder: Path, texts: dict[str, str], name: str) -> Path:
    path = folder / name.replace("/", "_")
    if name in texts:
        path.write_text(texts[name])
    return path


@pytest.mark.parametrize("path", ["/proc/1/fd/999", "/proc/999999999/fd/3"])
def test_a_region_that_is_gone_is_named(path: str) -> None:
    with pytest.raises(HostMemoryError, match="cannot open the host's shared memory at /proc/"):
        Region.open(path)


def test_something_else_is_no_region(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * PAGE)
    with pytest.raises(HostMemoryError, match="is not a region of this release"):
        Arena.join(str(tmp_path / "file"), 0)


def test_a_slot_beyond_the_last_is_refused(shared: Region) -> None:
    with pytest.raises(ValueError, match="there is no slot 3: the region has 3"):
        Arena(shared, 3)


SCRIPT = """
import sys, time
from zmqtrain.arena import Arena
region = Arena.create(2, 256 << 20)
Arena(region, 0).allocate(192 << 20)
print(region.path, flush=True)
time.sleep(60)
"""


def test_the_kernel_frees_it_when_the_last_process_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout is not None
            mine = Region.open(maker.stdout.readline().strip())
            assert mine.resident_bytes() >= 192 << 20
        finally:
            os.kill(maker.pid, signal.SIGKILL)
        maker.wait()
    # The maker is gone, and its memory is still there: this process has it open.
    assert mine.resident_bytes() >= 192 << 20
    before = _shared_kib()
    mine.close()
    assert before - _shared_kib() >= 128 << 10  # other processes of this machine come and go meanwhile


def _shared_kib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Shmem:")))


class TestWords:
    def test_counters_wrap_around(self, shared: Region) -> None:
        words = Arena(shared, 0).words(0)
        words.set(3, 2**32 - 2)
        assert words.reached(3, 2**32 - 3)
        assert not words.reached(3, 2**32 - 1)
        words.set(3, 2**32 + 5)
        assert words.get(3) == 5
        assert words.reached(3, 2**32 - 1)

    def test_words_lie_apart(self, shared: Region) -> None:
        words = Arena(shared, 0).words(0)
        for index in range(2, len(words)):
            words.set(index, index)
        assert [words.get(index) for index in range(2, len(words))] == list(range(2, len(words)))
        assert LINE >= 64

    def test_a_wait_ends_when_another_thread_writes(self, shared: Region) -> None:
        arena = Arena(shared, 0)
        words, reached = arena.words(0), []
        waiting = threading.Thread(target=lambda: reached.append(words.wait(4, 1, 30.0) or words.wait(4, 1, 30.0)))
        waiting.start()
        arena.words(0).set(4, 1)
        waiting.join(10)
        assert reached == [True]

    def test_a_wait_ends_with_its_time(self, shared: Region) -> None:
        assert not Arena(shared, 0).words(0).wait(4, 1, 0.01)

    def test_a_wait_ends_when_another_process_writes(self, shared: Region) -> None:
        words = Arena(shared, 0).words(1)
        code = f"from zmqtrain.arena import Arena; Arena.join({shared.path!r}, 1).words(1).set(6, 9)"
        with subprocess.Popen([sys.executable, "-c", code]) as other:
            while not words.wait(6, 9, 30.0):
                assert other.poll() in (None, 0)


def test_limits_that_are_too_small_are_named() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(HostMemoryError, match=r"File too large\); raise the limit on the size of files \(ulimit -f\), or set"):
            Region.create(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
