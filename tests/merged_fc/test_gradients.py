"""Gradients of groups: summed in the order of groups, in as few sets of memory as can be."""

from __future__ import annotations

import itertools

import pytest
import torch

from zmqtrain.merged_fc.gradients import GroupGradients


def write(gradients: GroupGradients, group: int, value: float) -> None:
    for place in gradients.of(group):
        place.fill_(value) if not gradients.begun(group) else place.add_(value)
    gradients.written(group)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_mean_does_not_depend_on_who_was_first(order: tuple[int, ...]) -> None:
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1."""
    gradients = GroupGradients([torch.empty(2, dtype=torch.float64)])
    for _ in range(2):  # sets are used again
        for group in order:
            write(gradients, group, 0.1 * (group + 1))
            gradients.complete(group, range(3))
        (mean,) = gradients.mean()
        assert mean.tolist() == [((0.1 + 0.2) + 0.1 * 3) * (1.0 / 3)] * 2
        gradients.release()


def test_a_group_by_itself_needs_one_set() -> None:
    gradients = GroupGradients([torch.empty(3), torch.empty(2, 2)])
    seen = set()
    for group in (0, 1, 0, 2):
        write(gradients, group, 1.0)
        write(gradients, group, 1.0)  # another micro-batch
        seen.add(gradients.of(group)[0].data_ptr())
        gradients.complete(group, (group,))
        first, second = gradients.mean()
        assert first.tolist() == [2.0] * 3
        assert second.shape == (2, 2)
        gradients.release()
    assert len(seen) == 1


def test_a_group_that_left_is_not_waited_for() -> None:
    gradients = GroupGradients([torch.empty(1)])
    for group in (0, 2):
        write(gradients, group, float(group))
        gradients.complete(group, range(3))
    assert gradients.mean()[0].tolist() == [1.0]


def test_a_set_that_is_not_needed_changes_nothing() -> None:
    gradients = GroupGradients([torch.zeros(2)])
    write(gradients, 0, 1.0)
    gradients.complete(0, [0, 1])
    write(gradients, -1, 5.0)
    gradients.discard(-1)
    assert not gradients.begun(-1)
    write(gradients, 1, 3.0)
    gradients.complete(1, [0, 1])
    assert gradients.mean()[0].tolist() == [2.0, 2.0]
