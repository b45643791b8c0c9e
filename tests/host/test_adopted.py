"""Tensors whose pages others read where they lie: the sums are the same, and nothing else notices."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from tests.host.world import MIB, teams, together
from zmqtrain.arena import Arena
from zmqtrain.arena.region import PAGE
from zmqtrain.host import adopted, in_place
from zmqtrain.host.adopted import LEAST_BYTES, SETTING, USES, Adopted, Adoptions, pages_of
from zmqtrain.host.window import Window

NUMEL = LEAST_BYTES // 4 + 3 * PAGE
#: More than the allocator (glibc's) keeps for others: freed pages are gone.
MANY = 36 * MIB // 4

Make: TypeAlias = Callable[..., Adoptions]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes adoptions, with a limit. At the end all memory is ordinary again."""
    made: list[Adoptions] = []

    def make(limit: int | None = 256 * MIB) -> Adoptions:
        made.append(Adoptions(limit))
        return made[-1]

    yield make
    gc.collect()
    for each in made:
        each.sweep()
        assert each.nbytes == 0, "tensors that nobody has any more are given up"


def adopt(adoptions: Adoptions, flat: Tensor) -> Adopted | None:
    """Use a tensor as often as it takes to be adopted."""
    return [adoptions.use(flat) for _ in range(USES)][-1]


def shared_mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "zmqtrain-adopted" in line and " rw-s " in line]


def shared_kib() -> int:
    """The memory of adopted pages that this process has mapped, its own and others'."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if not word.endswith(":"):
            ours = "zmqtrain-adopted" in line
        elif ours and word == "Rss:":
            found += int(line.split()[1])
    return found


def reduced(contents: Sequence[Sequence[Tensor]], adoptions: Sequence[Adoptions], combine: Callable[..., Tensor]) -> list[bool]:
    """All ranks reduce their tensors until those are adopted, and then once more. Returns whether they were, for each rank."""
    size = len(contents)
    region = Arena.create(size, 16 * MIB)
    members = teams(region, size)

    def work(rank: int) -> bool:
        window = Window(members[rank], chunk_bytes=MIB // 4, adoptions=adoptions[rank])
        for flat in contents[rank]:
            kept = flat.clone()
            for _ in range(USES + 1):
                flat.copy_(kept)
                window.all_reduce(flat, combine, "a sum")
        return adoptions[rank].nbytes > 0

    found = together(work, size)
    region.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int16])
def test_sums_have_the_bits_of_those_through_the_window(size: int, dtype: torch.dtype, make: Make) -> None:
    torch.manual_seed(1)
    numel = 2 * LEAST_BYTES // dtype.itemsize
    values = [[(10 * torch.randn(numel + extra)).to(dtype) for extra in (0, 777)] for _ in range(size)]
    # Each rank's tensors begin at another place of a page, and one begins a view of a longer tensor.
    here = [[torch.cat([value[: 5 * rank], value])[5 * rank :] for value in each] for rank, each in enumerate(values)]
    reduced(values, [make(0) for _ in range(size)], torch.add)
    assert reduced(here, [make() for _ in range(size)], torch.add) == [True] * size
    for through, summed in zip(values, here, strict=True):
        for one, other in zip(through, summed, strict=True):
            assert torch.equal(one, other)


def test_other_operations_and_a_rank_without_adopted_tensors(make: Make) -> None:
    def contents() -> list[list[Tensor]]:
        return [[torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))] for rank in range(3)]

    expected = torch.stack([each[0] for each in contents()]).amax(0)
    for limits in ([256 * MIB] * 3, [256 * MIB, 0, 256 * MIB]):
        found = contents()
        reduced(found, [make(limit) for limit in limits], torch.maximum)
        assert all(torch.equal(each[0], expected) for each in found)


def test_ranks_that_cannot_read_each_other_use_the_window(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def one_fails(process: int, file: int, nbytes: int) -> Tensor | None:
        refused.append(file)
        return pages_of(process, file, nbytes) if len(refused) > 1 else None

    monkeypatch.setattr(in_place, "pages_of", one_fails)
    found = [[torch.full((NUMEL,), rank + 1.0) for _ in range(2)] for rank in range(2)]
    reduced(found, [make() for _ in range(2)], torch.add)
    assert all(bool((flat == 3).all()) for each in found for flat in each)
    assert len(refused) == 2, "after the first tensor nobody offers another one"


def test_only_large_ordinary_memory_is_adopted(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adoptions = make()
    assert [adoptions.use(torch.ones(NUMEL)) for _ in range(9)] == [None] * 9, "a new tensor each time, though at one address"
    assert adopt(adoptions, torch.ones(LEAST_BYTES // 4 - 1)) is None
    assert adopt(adoptions, torch.ones(NUMEL).share_memory_()) is None
    assert adopt(adoptions, torch.from_file(str(tmp_path / "file"), shared=True, size=NUMEL)) is None
    assert adopt(adoptions, torch.from_file(str(tmp_path / "file"), shared=False, size=NUMEL)) is None
    assert adopt(adoptions, torch.frombuffer(mmap.mmap(-1, 4 * NUMEL), dtype=torch.float32)) is None
    assert adopt(make(4 * NUMEL - 2 * PAGE), torch.ones(NUMEL)) is None, "beyond the limit"
    monkeypatch.setenv(SETTING, "0")
    assert adopt(make(None), torch.ones(NUMEL)) is None
    monkeypatch.delenv(SETTING)
    assert adopt(make(None), torch.ones(NUMEL)) is not None
    flat = torch.arange(NUMEL, dtype=torch.float32)
    found = adopt(adoptions, flat)
    assert found is not None
    assert found.before < PAGE
    assert found.nbytes >= 4 * NUMEL - 2 * PAGE
    assert torch.equal(flat, torch.arange(NUMEL, dtype=torch.float32)), "the content stays"
    assert adopt(adoptions, flat[PAGE:]) is None, "a part of what is adopted"
    assert adoptions.use(flat) is found


def test_a_tensor_that_nobody_has_is_given_up_before_its_memory_is_given_back(make: Make) -> None:
    adoptions, before = make(), len(shared_mappings())
    flat = torch.ones(NUMEL)
    adopt(adoptions, flat)
    view = flat.view(2, -1)[1].numpy()
    del flat
    adoptions.sweep()
    assert adoptions.nbytes > 0, "a view of it is in use"
    assert len(shared_mappings()) == before + 1
    del view
    adoptions.sweep()
    assert adoptions.nbytes == 0
    assert len(shared_mappings()) == before
    again = torch.full((NUMEL,), 2.0)  # perhaps where it was
    assert bool((again == 2).all())


@pytest.mark.parametrize("change", [lambda flat: flat.untyped_storage().resize_(8 * MANY), lambda flat: flat.share_memory_()])
def test_a_storage_that_moves_is_given_up(change: Callable[[Tensor], object], make: Make) -> None:
    adoptions = make()
    flat = torch.arange(MANY, dtype=torch.float32)
    adopt(adoptions, flat)
    change(flat)
    assert torch.equal(flat[:MANY], torch.arange(MANY, dtype=torch.float32))
    adoptions.use(torch.ones(MANY))
    assert adoptions.nbytes == 0


def test_a_forked_process_has_its_own_copy(make: Make) -> None:
    adoptions = make()
    flat = torch.full((NUMEL,), 1.0)
    assert adopt(adoptions, flat) is not None
    to_child, from_parent = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.read(from_parent[0], 1)  # the parent has written 2 by now
            good = bool((flat == 1).all())
            flat.fill_(3.0)
            del flat
            os.write(to_child[1], b"y" if good and not shared_mappings() and adopt(make(), torch.ones(NUMEL)) else b"n")
            os.read(from_parent[0], 1)
            code = 0
        finally:
            os._exit(code)
    flat.fill_(2.0)
    os.write(from_parent[1], b"x")
    assert os.read(to_child[0], 1) == b"y"
    assert bool((flat == 2).all()), "the child has written to its own memory"
    os.write(from_parent[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    assert adoptions.use(flat) is not None
    for end in (*to_child, *from_parent):
        os.close(end)


def test_what_a_forked_process_maps_at_first_lies_elsewhere(make: Make) -> None:
    """Before the pages get their places in it, as an allocator may: it would take the first gap that is large enough."""
    mapped: list[mmap.mmap] = []
    forking = [True]
    gone = torch.full((MANY,), 2.0)
    adopt(make(), gone)

    def first() -> None:
        if forking:
            mapped.append(mmap.mmap(-1, 1 << 20))
            mapped[0][:4] = b"mine"

    os.register_at_fork(after_in_child=first)
    adoptions = make()
    tensors = [torch.full((1 << 22,), 1.0) for _ in range(4)]
    flat = next((each for each in tensors if adopt(adoptions, each) is not None), None)
    if flat is None:
        pytest.skip("no large tensor of this process lies in ordinary memory: moved storages may have left adopted pages")
    del gone  # its pages, of other adoptions, are given up as the process forks
    pid = os.fork()
    if pid == 0:
        os._exit(0 if mapped[0][:4] == b"mine" and bool((flat[:: 1 << 10] == 1).all()) else 1)
    forking.clear()
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(("gaps", "found"), [(0, True), (1, True), (9, False)])
def test_a_gap_in_the_kernels_list_is_looked_at_again(gaps: int, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = itertools.count()

    def mappings(source: str) -> Iterator[adopted._Mapping]:
        pages = [0, 1] if next(lists) < gaps else [0, 1, 2]
        return iter([adopted._Mapping(page * PAGE, (page + 1) * PAGE, "rw-p", "0", "") for page in [*pages, 7]])

    monkeypatch.setattr(adopted, "_mappings", mappings)
    assert adopted._ordinary(PAGE, 3 * PAGE) is found


@pytest.mark.parametrize("change", [lambda flat: flat.untyped_storage().resize_(8 * NUMEL), lambda flat: flat.share_memory_()])
def test_pages_that_a_storage_has_left_are_not_shared_with_what_is_forked(change: Callable[[Tensor], object]) -> None:
    """They are the allocator's: what a forked process allocates first may lie there. In a process that keeps them to itself."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            adoptions, flat = Adoptions(256 * MIB), torch.ones(NUMEL)
            seen = [adopt(adoptions, flat) is not None, len(shared_mappings())]
            change(flat)
            adoptions.sweep()
            code = 0 if seen == [True, 1] and not shared_mappings() else 2 if seen == [False, 0] else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 2:
        pytest.skip("this process has no ordinary memory for the tensor: moved storages may have left adopted pages")
    assert code == 0


def test_nothing_is_lost_that_is_written_while_pages_become_private(make: Make) -> None:
    flat = torch.frombuffer(mmap.mmap(-1, 4 * NUMEL, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.float32)
    found = adopt(make(), flat)
    assert found is not None
    began, stop, counts = threading.Event(), threading.Event(), []

    def write() -> None:
        while not stop.is_set():
            flat.add_(1)
            counts.append(1)
            began.set()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        assert began.wait(20)
        adopted._make_private(found.address, found.nbytes, found.file)
    finally:
        stop.set()
        thread.join()
    assert bool((flat == len(counts)).all())


def test_others_only_read(make: Make) -> None:
    adoptions = make()
    flat = torch.arange(NUMEL, dtype=torch.float32)
    found = adopt(adoptions, flat)
    assert found is not None
    pages = pages_of(os.getpid(), found.file, found.nbytes)
    assert pages is not None
    seen = pages.view(torch.float32)
    first = found.before // 4
    assert torch.equal(seen, flat[first : first + len(seen)])
    flat.fill_(7.0)
    assert bool((seen == 7).all()), "the same memory"
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "zmqtrain-adopted" in line]
    assert sorted(line.split()[1] for line in lines if line.split()[4] == str(os.fstat(found.file).st_ino)) == ["r--s", "rw-s"]
    assert pages_of(1, 0, PAGE) is None, "another user's process, or one that has no such file"


def test_ranks_whose_tensors_come_in_other_patterns_agree_when_pages_are_new(make: Make) -> None:
    """Rank 0 has one tensor, and rank 1 two in turn: for rank 0 it is the second's first time, for rank 1 nothing is new."""
    region = Arena.create(2, 16 * MIB)
    members = teams(region, 2, timeout_s=5.0)
    adoptions = [make(), make()]

    def work(rank: int) -> list[float]:
        window = Window(members[rank], chunk_bytes=MIB // 4, adoptions=adoptions[rank])
        tensors = [torch.empty(NUMEL) for _ in range(1 + rank)]
        found = []
        for step in range(6 * USES):
            flat = tensors[step % len(tensors)]
            flat.fill_(rank + step)
            window.all_reduce(flat, torch.add, "a sum")
            assert bool((flat == flat[0]).all())
            found.append(float(flat[0]))
        return found

    assert together(work, 2) == [[2.0 * step + 1 for step in range(6 * USES)]] * 2
    region.close()


def test_memory_that_others_have_read_is_free_once_it_is_given_up(make: Make) -> None:
    region = Arena.create(2, 16 * MIB)
    members = teams(region, 2)
    adoptions = [make(), make()]

    def work(rank: int) -> list[int]:
        window = Window(members[rank], chunk_bytes=MIB // 4, adoptions=adoptions[rank])
        kept = []
        for _ in range(4):
            flat = torch.ones(NUMEL)
            for _ in range(USES + 1):
                window.all_reduce(flat, torch.add, "a sum")
            del flat
            adoptions[rank].sweep()
            together_here.wait()
            kept.append(shared_kib() - before)
            together_here.wait()
        return kept

    together_here = threading.Barrier(2)
    before = shared_kib()
    assert together(work, 2) == [[0] * 4] * 2
    region.close()
