"""Who takes which samples: each at most once an epoch, whatever the shape of the run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.data.partition import Partition, Since, even_bounds
from zmqtrain.errors import UsageError


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.integers(0, 40), st.integers(0, 2**40), st.booleans())
def test_an_epoch_takes_each_sample_at_most_once(groups: int, size: int, more: int, rest: int, seed: int, shuffled: bool) -> None:
    batch = size + more
    samples = groups * batch + rest
    partition = Partition(samples, groups, size, batch, seed, "global" if shuffled else "none")
    for epoch in range(2):
        taken = []
        for place in range(partition.steps_per_epoch):
            step = epoch * partition.steps_per_epoch + place
            parts = [[partition.indices(step, g, i) for i in range(size)] for g in range(groups)]
            assert all(len(np.concatenate(group)) == batch for group in parts)
            assert all(abs(len(a) - len(b)) <= 1 and len(a) > 0 for group in parts for a in group for b in group)
            taken.append(np.concatenate([part for group in parts for part in group]))
        everything = np.concatenate(taken)
        assert len(np.unique(everything)) == len(everything) == partition.steps_per_epoch * groups * batch
        assert everything.min() >= 0
        assert everything.max() < samples
        assert samples - len(everything) < groups * batch
        if not shuffled:
            assert np.array_equal(everything, np.arange(len(everything)))


def test_a_step_of_all_groups_is_one_process_s_step_on_the_whole_batch() -> None:
    divided, alone = Partition(100, 3, 2, 8, seed=7), Partition(100, 1, 1, 24, seed=7)
    for step in range(9):
        parts = [divided.indices(step, group, position) for group in range(3) for position in range(2)]
        assert np.array_equal(np.concatenate(parts), alone.indices(step, 0, 0))


def test_the_order_is_that_of_the_seed_and_the_epoch_and_never_changes() -> None:
    partition = Partition(10, 1, 1, 10, seed=1)
    assert partition.indices(0, 0, 0).tolist() == Partition(10, 1, 1, 10, seed=1).indices(0, 0, 0).tolist()
    orders = {tuple(partition.indices(epoch, 0, 0)) for epoch in range(5)} | {tuple(Partition(10, 1, 1, 10, 2).indices(0, 0, 0))}
    assert len(orders) == 6
    # A resumed run, perhaps with another numpy, must go on with this very order.
    assert partition.indices(0, 0, 0).tolist() == [3, 5, 2, 9, 7, 0, 8, 6, 1, 4]


def test_even_bounds_cover_everything() -> None:
    assert [even_bounds(11, 4, part) for part in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [even_bounds(2, 3, part) for part in range(3)] == [(0, 1), (1, 2), (2, 2)]


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(UsageError, match="has 31 samples, but one step of 4 groups with batch_size = 8 takes 32"):
        Partition(31, 4, 2, 8, seed=1)
    with pytest.raises(UsageError, match="batch_size = 2 is smaller than group_size = 3"):
        Partition(100, 1, 3, 2, seed=1)


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 12)), min_size=1, max_size=4))
def test_other_groups_go_on_where_the_last_ones_were(more: int, runs: list[tuple[int, int, int]]) -> None:
    """Each sample at most once an epoch, and an epoch ends only where fewer are left than a step takes."""
    samples = 20 + more
    since, trained, epochs = Since(), 0, 0
    left: set[int] = set(range(samples))
    for groups, batch, steps in runs:
        partition = Partition(samples, groups, 1, batch, seed=1, since=since)
        stop = since.step + steps
        for step in range(since.step, stop + 1):
            if len(left) < groups * batch:
                epochs, left = epochs + 1, set(range(samples))
                assert partition.end(epochs) == step
            assert partition.end(epochs + 1) > step
            assert partition.place(step) == (epochs, samples - len(left))
            assert partition.trained(step) == trained
            if step < stop:
                mine = partition.run(step, 0, groups * batch).tolist()
                assert len(mine) == groups * batch
                assert left >= set(mine)
                left -= set(mine)
                trained += len(mine)
        since = partition.going_on(stop)
        assert (since.step, since.trained) == (stop, trained)
