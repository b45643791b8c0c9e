"""Who trains on which grid after losses: tables, and what holds for any of them."""

from __future__ import annotations

import random

import pytest

from zmqtrain.train.grid_plan import Era, Shapes, Standing, next_era


def living(*ranks: int) -> dict[str, int]:
    return {f"worker/{rank}": 0 for rank in ranks}


def peers(*ranks: int) -> tuple[str, ...]:
    return tuple(f"worker/{rank}" for rank in ranks)


#: Who is left of each row, by rank; who is there; the columns of the job's grid; and who is in the next grid, by position.
CASES = [
    ([(0, 2), (3,)], (0, 2, 3), 2, (0, 3)),  # worker 1 is lost: worker 2 is a spare
    ([(0, 2), (3,)], (0, 1, 2, 3), 2, (0, 3, 2, 1)),  # and comes back into its row
    ([(2, 4), (1, 3, 5)], (1, 2, 3, 4, 5), 3, (2, 1, 4, 3)),
    ([(4,), (1, 3, 5)], (1, 3, 4, 5), 3, (4, 1, 5, 3)),  # one moves to the row that lacks a worker
    ([(0, 2), (1, 3)], (0, 1, 2, 3, 4, 5), 3, (0, 1, 2, 3, 4, 5)),
    ([(0, 2), (1, 3)], (0, 1, 2, 3, 4, 5), 2, (0, 1, 2, 3)),  # never more columns than the job's
]


@pytest.mark.parametrize(("left", "there", "most", "found"), CASES)
def test_the_largest_grid_of_those_that_are_left(
    left: list[tuple[int, ...]], there: tuple[int, ...], most: int, found: tuple[int, ...]
) -> None:
    standing = Standing(3, 2, tuple(peers(*row) for row in left))
    era = next_era(standing, living(*there), Shapes(2, most))
    assert era == Era(4, 2, tuple((peer, 0) for peer in peers(*found)))


def test_the_first_era_is_of_all_by_rank() -> None:
    standing = Standing(-1, 0, ())
    assert standing.broken
    assert standing.givers == standing.gone == ()
    assert next_era(standing, living(0, 1, 2, 3), Shapes(2, 2)) == Era(0, 2, tuple((peer, 0) for peer in peers(0, 1, 2, 3)))
    assert next_era(standing, living(7), Shapes(2, 2)) is None


def test_when_it_is_broken_and_when_it_grows() -> None:
    whole = Standing(0, 2, (peers(0, 2), peers(1, 3)))
    assert not whole.broken
    assert not whole.over
    assert whole.givers == peers(0, 1)
    assert not whole.grows(5, Shapes(2, 3))
    assert whole.grows(6, Shapes(2, 3))
    assert not whole.grows(6, Shapes(2, 2))
    assert Standing(0, 2, (peers(0, 2), peers(1, 3)), ended=True).over
    lost = Standing(0, 2, (peers(0, 2), ()))
    assert lost.broken
    assert lost.gone == (1,)


def test_whoever_is_lost_each_row_has_one_that_had_it() -> None:
    draw = random.Random(1)
    for _ in range(300):
        rows, most = draw.randint(2, 4), draw.randint(1, 5)
        era = next_era(Standing(-1, 0, ()), living(*range(rows * most)), Shapes(rows, most))
        assert era is not None
        for number in range(4):
            there = living(*sorted(draw.sample(range(rows * most), draw.randint(rows, rows * most))))
            standing = Standing(
                number, era.columns, tuple(tuple(p for p in era.holders(r, era.peers) if p in there) for r in range(rows))
            )
            if standing.gone:
                break
            following = next_era(standing, there, Shapes(rows, most))
            assert following is not None
            assert len(set(following.peers)) == len(following.peers) == rows * min(most, len(there) // rows)
            for row, giver in enumerate(standing.givers):
                assert giver in {peer for peer, _ in following.row(row)}
            era = following


def test_other_grids_take_in_those_who_would_be_spares() -> None:
    shapes = Shapes(2, 2, ((1, 2), (3, 1), (1, 3)))
    assert [shapes.largest(workers) for workers in range(5)] == [None, None, (1, 2), (3, 1), (2, 2)]
    lost = Standing(0, 2, (peers(0, 2), peers(3)))
    assert next_era(lost, living(0, 2, 3), shapes) == Era(1, 3, tuple((peer, 0) for peer in peers(0, 2, 3)))
    three = Standing(1, 1, (peers(0), peers(2), peers(3)))
    assert three.grows(4, shapes)
    assert not Standing(1, 1, (peers(0), peers(3))).grows(3, Shapes(2, 2))
    assert Standing(1, 1, (peers(0), peers(3))).grows(3, shapes)
    assert Shapes(2, 2, ((3, 1),)).largest(2) == (2, 1)
    assert next_era(three, living(0, 1, 2, 3), shapes) == Era(2, 2, tuple((peer, 0) for peer in peers(0, 1, 2, 3)))
