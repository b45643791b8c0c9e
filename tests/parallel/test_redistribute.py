"""Any placement becomes any other: the right elements, the adjoint gradient, and no message too many."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.parallel.by_hand import redistribute
from tests.parallel.model_world import part
from tests.parallel.test_placement import placements
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.model.traffic import Sent
from zmqtrain.parallel.placement import Placement, common, volume
from zmqtrain.parallel.redistribute import route
from zmqtrain.testing.threads import ThreadFabric, ThreadWorld, run_ranks

FORWARD, BACKWARD = Label("fc", "redistribute"), Label("fc", "redistribute", "backward")


def moved(whole: Tensor, gradient: Tensor, source: Placement, target: Placement) -> tuple[list[tuple[Tensor, Tensor]], ThreadWorld]:
    """Each rank's part in the target placement, and the gradient of its part in the source's."""

    def rank(fabric: ThreadFabric) -> tuple[Tensor, Tensor]:
        local = part(whole, source, fabric.rank).requires_grad_()
        result = redistribute(local, source, target, whole.shape, fabric, "fc")
        result.backward(part(gradient, target, fabric.rank))
        assert local.grad is not None
        return result.detach(), local.grad

    return run_ranks(source.grid.size, rank)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Placement, Placement]:
    """A shape and two placements, on grids of the same size."""
    rows, columns, sample_dimension = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 1))
    size = rows * columns
    other = draw(st.sampled_from([each for each in range(1, size + 1) if size % each == 0]))
    shape = draw(st.tuples(*[st.integers(1, 7)] * 3))
    source = draw(placements(shape, Grid(rows, columns), sample_dimension))
    return shape, source, draw(placements(shape, Grid(other, size // other), draw(st.integers(0, 1))))


@given(cases())
@settings(max_examples=50)
def test_all_elements_arrive_and_their_gradients_return(case: tuple[tuple[int, ...], Placement, Placement]) -> None:
    shape, source, target = case
    generator = torch.Generator().manual_seed(7)
    whole, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    found, world = moved(whole, gradient, source, target)
    for rank, (result, back) in enumerate(found):
        assert torch.equal(result, part(whole, target, rank))
        assert torch.equal(back, part(gradient, source, rank)), "the whole gradient, the same for all that hold a copy"
    there, back_again = route(source, target, shape), route(target, source, shape)
    for rank in range(source.grid.size):
        traffic = world.traffic[rank]
        assert set(traffic.messages) <= {FORWARD, BACKWARD}
        for label, way in ((FORWARD, there), (BACKWARD, back_again)):
            assert Sent(traffic.messages[label], traffic.nbytes[label]) == way.sent(rank, 8)


@given(cases())
def test_adjoint(case: tuple[tuple[int, ...], Placement, Placement]) -> None:
    """<Fx, y> = <x, F*y> for parts that have nothing to do with each other, each copy weighing its share."""
    shape, source, target = case
    generator = torch.Generator().manual_seed(8)
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    found, _ = moved(x, y, source, target)
    left = sum(float((result * part(y, target, rank)).sum()) for rank, (result, _) in enumerate(found)) / target.copies
    right = sum(float((part(x, source, rank) * back).sum()) for rank, (_, back) in enumerate(found)) / source.copies
    assert left == pytest.approx(right, rel=1e-12)
    assert left == pytest.approx(float((x * y).sum()), rel=1e-12)


@given(cases())
def test_each_missing_piece_is_sent_once_and_by_who_has_it(case: tuple[tuple[int, ...], Placement, Placement]) -> None:
    shape, source, target = case
    way = route(source, target, shape)
    for to in range(source.grid.size):
        needed = target.block(shape, to)
        pieces = [piece for piece in way.pieces if piece.to == to]
        assert sum(volume(piece.block) for piece in pieces) == volume(needed)
        own = common(source.block(shape, to), needed)
        assert [piece.block for piece in pieces if piece.source == to] == ([own] if own else []), "what is here is not sent"
        for piece in pieces:
            assert common(piece.block, needed) == piece.block
            assert common(piece.block, source.block(shape, piece.source)) == piece.block


def test_copies_share_the_work_of_sending() -> None:
    """Thirds of the batch on two rows each, wanted by three processes each: of the two that have a piece, the one that has sent
    less sends it."""
    way = route(Placement(Grid(2, 3)), Placement(Grid(3, 2)), (24, 8))
    sends = Counter(piece.source for piece in way.pieces if piece.source != piece.to and piece.block[0] in ((8, 12), (12, 16)))
    assert sends == {2: 2, 3: 2}
    own = route(Placement(Grid(2, 3)), Placement(Grid(1, 6)), (24, 8))
    assert all(own.sent(rank, 4) == Sent() for rank in range(6)), "all have theirs already"


def test_from_batch_to_model_is_an_all_gather_within_the_column() -> None:
    """Eq. 6: a process sends (Pr - 1) / Pr of its column's activation, and backward nothing."""
    grid, shape = Grid(4, 2), (16, 5)
    way = route(Placement(grid, "all"), Placement(grid), shape)
    assert way.gatherings is not None
    assert [each.members for each in way.gatherings] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    column_bytes = 8 * 5 * 4
    assert all(way.sent(rank, 4) == Sent(3, column_bytes * 3 // 4) for rank in range(8))
    back = route(Placement(grid), Placement(grid, "all"), shape)
    assert all(back.sent(rank, 4) == Sent() for rank in range(8))
    _, world = moved(torch.randn(shape), torch.randn(shape), Placement(grid, "all"), Placement(grid))
    assert all(traffic.messages == {FORWARD: 3} and traffic.nbytes == {FORWARD: 120} for traffic in world.traffic)


def test_strips_are_gathered_before_they_are_flattened() -> None:
    """Domain, flatten, model: one all-gather of the column's image, and backward each takes its strip of the gradient."""
    grid, shape = Grid(3, 2), (4, 2, 7, 3)
    source = Placement.over_rows(grid, 2, 7)
    way = route(source, source.whole(), shape)
    assert way.gatherings is not None
    assert [each.dimension for each in way.gatherings] == [2, 2]
    image = 2 * 2 * 7 * 3 * 4
    assert sum(way.sent(rank, 4).nbytes for rank in range(6)) == 2 * 2 * image, "each of two columns: twice its image"
    assert all(route(source.whole(), source, shape).sent(rank, 4) == Sent() for rank in range(6))


def test_from_divided_features_to_batch_costs_less_than_gathering_first() -> None:
    """The all-gather that a model-parallel layer would end with is left out: everyone gets its own samples' features only."""
    grid, shape = Grid(4, 1), (16, 8)
    way = route(Placement.over_rows(grid, 1, 8), Placement(grid, "all"), shape)
    assert way.gatherings is None
    assert all(way.sent(rank, 4) == Sent(3, 3 * 4 * 2 * 4) for rank in range(4)), "3 pieces of 4 samples and 2 features"


def test_the_same_blocks_need_no_message_and_no_copy() -> None:
    local = torch.randn(2, 3)

    def rank(fabric: ThreadFabric) -> bool:
        return redistribute(local, Placement(Grid(1, 2), "all"), Placement(Grid(1, 2)), (4, 3), fabric, "fc") is local

    results, world = run_ranks(2, rank)
    assert results == [True, True]
    assert not any(traffic.messages for traffic in world.traffic)


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="grids 2x2 and 1x3 have different numbers of processes"):
        route(Placement(Grid(2, 2)), Placement(Grid(1, 3)), (4, 4))
    with pytest.raises(UsageError, match=r"fc: rank \d has a part of shape \(4, 4\), and its placement \(2, 4\)"):
        run_ranks(
            2, lambda fabric: redistribute(torch.zeros(4, 4), Placement(Grid(1, 2)), Placement(Grid(2, 1)), (4, 4), fabric, "fc")
        )
