"""Gradients of several workers are summed in memory."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.host.world import MIB, teams, together
from zmqtrain.arena import Arena, Region
from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.host.accumulator import Accumulator
from zmqtrain.host.member import ArenaMember
from zmqtrain.host.team import Team
from zmqtrain.wire.tensor import TensorPayload

SIZES = (1000, 1, 50, 7)


@pytest.fixture
def shared() -> Iterator[Region]:
    made = Arena.create(8, 4 * MIB)
    yield made
    made.close()


class Worker:
    """A replica's side of it: writes gradients, and reads the sums when they are there."""

    def __init__(self, team: Team, **settings: object) -> None:
        self.team = team
        blocks = [team.arena.allocate(4 * size) for size in SIZES]
        self.gradients = [torch.frombuffer(block.memory, dtype=torch.float32) for block in blocks]
        self.member = ArenaMember(team)
        self.accumulator = Accumulator(self.member, **settings)  # type: ignore[arg-type]
        self.summed: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self.sums: list[Tensor] = []

    def start(self) -> None:
        payloads = [TensorPayload.of(each) for each in self.gradients]
        sums = self.member.complete(self.accumulator.start(payloads, lambda *what: self.summed.put(what)))
        self.sums = [each.tensor for each in sums if isinstance(each, TensorPayload)]

    def step(self, step: int, *, change: Callable[[Tensor], object] = lambda sums: None) -> list[Tensor]:
        """Copies of what was summed."""
        self.member.complete(self.accumulator.writable())
        for index, gradient in enumerate(self.gradients):
            gradient.copy_(gradient_of(self.team.rank, step, index))
            self.accumulator.produced(index)
        found: dict[int, Tensor] = {}
        for _ in SIZES:
            index, error = self.summed.get(timeout=20)
            if error is not None:
                raise error
            found[index] = self.sums[index].clone()
            change(self.sums[index])
            self.accumulator.taken()
        return [found[index] for index in range(len(SIZES))]


def gradient_of(rank: int, step: int, index: int) -> Tensor:
    return torch.randn(SIZES[index], generator=torch.Generator().manual_seed(1000 * rank + 10 * step + index))


def expected(size: int, step: int, index: int, scale: float = 1.0) -> Tensor:
    result = gradient_of(0, step, index)
    for rank in range(1, size):
        result = result + gradient_of(rank, step, index)
    return result * scale


def life(worker: Worker, steps: int, **more: Callable[[Tensor], object]) -> list[list[Tensor]]:
    worker.start()
    result = [worker.step(step, **more) for step in range(steps)]
    worker.member.close(10)
    return result


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_all_read_the_same_sums_step_after_step(size: int, in_place: bool, shared: Region) -> None:
    workers = [Worker(team, in_place=in_place) for team in teams(shared, size)]
    results = together(lambda rank: life(workers[rank], 20), size)
    for step in range(20):
        for index in range(len(SIZES)):
            wanted = expected(size, step, index)
            assert all(torch.equal(result[step][index], wanted) for result in results)  # to the bit: the order is that of ranks


def test_sums_are_scaled_once(shared: Region) -> None:
    workers = [Worker(team, scale=0.5) for team in teams(shared, 3)]
    for result in together(lambda rank: life(workers[rank], 2), 3):
        assert torch.equal(result[1][0], expected(3, 1, 0, 0.5))


def test_a_copy_of_ones_own_may_be_changed(shared: Region) -> None:
    workers = [Worker(team, in_place=False) for team in teams(shared, 3)]
    for result in together(lambda rank: life(workers[rank], 10, change=lambda sums: sums.mul_(rank)), 3):
        assert all(torch.equal(result[step][0], expected(3, step, 0)) for step in range(10))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_slices_are_summed_with_other_hosts_before_anybody_reads_them(slices: int, in_place: bool, shared: Region) -> None:
    """The other hosts add 100 to everything, and answer in another order."""
    held: list[Callable[[], None]] = []

    def between(operation: int, index: int, part: TensorPayload, done: Callable[[], None]) -> None:
        part.tensor.add_(100)
        if index % 2:
            held.append(done)
        else:
            done()
            while held:
                held.pop()()

    workers = [Worker(team, slices=slices, between=between, in_place=in_place) for team in teams(shared, 3)]

    # Bucket 3 is held back until bucket 0 of the next step; so the last step's needs somebody who lets it go.
    def run(rank: int) -> list[Tensor]:
        worker = workers[rank]
        worker.start()
        worker.member.complete(worker.accumulator.writable())
        for index in range(len(SIZES) - 1):
            worker.gradients[index].copy_(gradient_of(rank, 0, index))
            worker.accumulator.produced(index)
        got = dict(worker.summed.get(timeout=20) for _ in range(len(SIZES) - 1))
        assert set(got.values()) == {None}
        return [worker.sums[index].clone() for index in range(len(SIZES) - 1)]

    for result in together(run, 3):
        for index in range(len(SIZES) - 1):
            assert torch.equal(result[index], expected(3, 0, index) + 100)
    for worker in workers:
        worker.member.close(10)


def test_a_worker_that_leaves_is_told_to_who_waits_for_it(shared: Region) -> None:
    workers = [Worker(team) for team in teams(shared, 2)]
    together(lambda rank: workers[rank].start(), 2)
    workers[1].member.close(10)
    with pytest.raises(PeerLostError, match="lost worker/1 while waiting for the gradients of bucket 0: it has left"):
        workers[0].step(0)
    workers[0].member.close(10)


def test_a_worker_that_stands_still_is_named(shared: Region) -> None:
    workers = [Worker(team) for team in teams(shared, 2, timeout_s=0.1)]
    together(lambda rank: workers[rank].start(), 2)
    with pytest.raises(PeerTimeoutError, match=r"worker/1 did not answer within 0.1 s while waiting for the gradients of bucket 0"):
        workers[0].step(0)
    for worker in workers:
        worker.member.close(10)


def test_giving_up_is_told_as_well(shared: Region) -> None:
    workers = [Worker(team) for team in teams(shared, 2)]
    together(lambda rank: workers[rank].start(), 2)
    why = PeerLostError("worker/7", "gone")
    workers[0].accumulator.produced(0)
    workers[0].member.abort(why)
    assert workers[0].summed.get(timeout=20) == (0, why)
    for worker in workers:
        worker.member.close(10)
