"""What every communicator promises, on threads and on endpoints; and that both count the same messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.parallel.worlds import Outcome, on_endpoints, on_threads
from tests.precision import close
from zmqtrain.errors import ConnectivityError, PeerTimeoutError, ProtocolError
from zmqtrain.parallel.communicator import Expected, Fabric, Label

WORLDS = [on_threads, on_endpoints]
SIZES = [1, 2, 3, 4]
LABEL = Label("layer", "halo")
Run = Callable[..., Outcome]


@pytest.mark.parametrize("run", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_of_uneven_parts(run: Run, size: int) -> None:
    shapes = [(2, 3 * rank % 4, 5) for rank in range(size)]

    def work(fabric: Fabric) -> list[torch.Tensor]:
        group = fabric.among(tuple(range(size)))
        return group.all_gather(torch.full(shapes[fabric.rank], float(fabric.rank)), shapes, LABEL).wait()

    for parts in run(size, work).results:
        assert [tuple(part.shape) for part in parts] == shapes
        assert all((part == rank).all() for rank, part in enumerate(parts))


@pytest.mark.parametrize("run", WORLDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [0, 5, 20_000])  # statistics: none, a few for all at once, and many around a ring
@pytest.mark.parametrize("label", [LABEL, Label("norm", "statistics")])
def test_all_gather_of_even_parts(run: Run, size: int, numel: int, label: Label) -> None:
    def work(fabric: Fabric) -> list[list[torch.Tensor]]:
        group = fabric.among(tuple(range(size)))
        parts = [torch.full((numel,), float(10 * turn + fabric.rank)) for turn in range(3)]
        pending = [group.all_gather(part, [(numel,)] * size, label) for part in parts]
        return [each.wait() for each in pending]

    for turns in run(size, work).results:
        for turn, parts in enumerate(turns):
            assert [each.tolist() for each in parts] == [[10.0 * turn + rank] * numel for rank in range(size)]


@pytest.mark.parametrize("run", WORLDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [0, 1, 5, 1000])
def test_all_reduce_gives_all_the_same_bits(run: Run, size: int, numel: int) -> None:
    contents = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]

    def work(fabric: Fabric) -> torch.Tensor:
        (total,) = fabric.among(tuple(range(size))).all_reduce(contents[fabric.rank].view(1, numel), LABEL).wait()
        return total

    results = run(size, work).results
    assert all(torch.equal(each, results[0]) for each in results)
    whole = torch.stack(contents)
    close(results[0].view(-1), whole.sum(0), exact=whole.double().sum(0))


@pytest.mark.parametrize("run", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_of_uneven_parts(run: Run, size: int) -> None:
    def work(fabric: Fabric) -> torch.Tensor:
        parts = [torch.full((to, 2), float(10 * fabric.rank + to), dtype=torch.float64) for to in range(size)]
        return fabric.among(tuple(range(size))).reduce_scatter(parts, LABEL).wait()[0]

    for rank, total in enumerate(run(size, work).results):
        assert tuple(total.shape) == (rank, 2)
        assert (total == sum(10 * source + rank for source in range(size))).all()


@pytest.mark.parametrize("run", WORLDS)
def test_tensors_between_two_come_in_the_order_of_sending(run: Run) -> None:
    """Strided ones, empty ones, several at once; and another pair of the group is not needed for it."""

    def work(fabric: Fabric) -> list[list[float]]:
        group = fabric.among((0, 1, 2))
        if fabric.rank == 2:
            return []
        other = 1 - fabric.rank
        columns = torch.arange(12.0).view(3, 4)[:, 1:3] + 100 * fabric.rank
        sends = [(other, columns), (other, torch.empty(0, 3)), (other, columns.t())]
        due = [
            Expected(other, (3, 2), torch.float32),
            Expected(other, (0, 3), torch.float32),
            Expected(other, (2, 3), torch.float32),
        ]
        begun = [group.exchange(sends, due, LABEL) for _ in range(3)]
        return [[part.sum().item() for part in each.wait()] for each in begun]

    outcome = run(3, work)
    mine = float((torch.arange(12.0).view(3, 4)[:, 1:3]).sum())
    assert outcome.results == [[[mine + 600, 0.0, mine + 600]] * 3, [[mine, 0.0, mine]] * 3, []]
    assert [each[LABEL] for each in outcome.messages] == [6, 6, 0]
    assert [each[LABEL] for each in outcome.nbytes] == [6 * 24, 6 * 24, 0]


@pytest.mark.parametrize("run", WORLDS)
def test_operations_end_in_any_order(run: Run) -> None:
    def work(fabric: Fabric) -> list[float]:
        everybody, pair = fabric.among((0, 1, 2, 3)), fabric.among((fabric.rank % 2, fabric.rank % 2 + 2))
        begun = [
            group.all_reduce(torch.full((3,), float(place + fabric.rank)), Label("layer", "dx", "backward"))
            for place in range(3)
            for group in (everybody, pair)
        ]
        return [each.wait()[0][0].item() for each in reversed(begun)]

    for rank, found in enumerate(run(4, work).results):
        together = 2.0 * (rank % 2) + 2
        assert found == [x for place in (2, 1, 0) for x in (together + 2 * place, 6.0 + 4 * place)]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_both_worlds_count_the_same(size: int) -> None:
    def work(fabric: Fabric) -> None:
        group = fabric.among(tuple(range(size)))
        for numel in (1, 7, 40_000, 400_000):
            group.all_reduce(torch.zeros(numel), Label("reduced", "dw", "backward")).wait()
        shapes = [(rank, 3) for rank in range(size)]
        group.all_gather(torch.zeros(shapes[fabric.rank]), shapes, Label("gathered", "all_gather")).wait()
        for even in (5, 20_000):
            group.all_gather(torch.zeros(even), [(even,)] * size, Label("even", "all_gather")).wait()
        group.reduce_scatter([torch.zeros(shape) for shape in shapes], Label("scattered", "dx", "backward")).wait()

    one, other = on_threads(size, work), on_endpoints(size, work)
    assert one.messages == other.messages
    assert one.nbytes == other.nbytes


@pytest.mark.parametrize("run", WORLDS)
def test_members_that_expect_another_shape_are_told(run: Run) -> None:
    def work(fabric: Fabric) -> Any:
        part = torch.zeros(3 + fabric.rank)
        other = 1 - fabric.rank
        return fabric.among((0, 1)).exchange([(other, part)], [Expected(other, (3,), torch.float32)], LABEL).wait()

    with pytest.raises(ProtocolError, match="halo of layer"):
        run(2, work)


def test_a_member_that_does_not_come_is_named() -> None:
    def work(fabric: Fabric) -> Any:
        if fabric.rank == 0:
            return None
        return fabric.among((0, 1)).all_reduce(torch.zeros(3), LABEL).wait()

    with pytest.raises(PeerTimeoutError, match=r"worker/0 .*halo of layer"):
        on_endpoints(2, work, timeout_s=0.05)


def test_a_member_that_fails_ends_the_wait_of_others() -> None:
    caught: list[BaseException] = []

    def work(fabric: Fabric) -> Any:
        if fabric.rank == 0:
            raise ValueError("mine")
        try:
            return fabric.among((0, 1)).all_reduce(torch.zeros(3), LABEL).wait()
        except ConnectivityError as error:
            caught.append(error)
            raise

    with pytest.raises(ValueError, match="mine"):
        on_endpoints(2, work)
