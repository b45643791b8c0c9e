"""What stands for a large tensor in a comparison: another tensor has another, however small or regular the difference."""

from __future__ import annotations

import pytest
import torch

from zmqtrain.parallel.verify.sketch import SMALL, pattern, sketch


def test_small_tensors_and_whole_numbers_are_compared_as_they_are() -> None:
    for tensor in (torch.randn(SMALL), torch.arange(2 * SMALL)):
        assert torch.equal(sketch(tensor), tensor)


@pytest.mark.parametrize("shape", [(40, 30, 5), (2, 4000), (9000,)])
@pytest.mark.parametrize("change", ["one element", "two that cancel", "two exchanged", "all"])
def test_any_change_is_seen(shape: tuple[int, ...], change: str) -> None:
    tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    other, size = tensor.clone(), 1e-3
    flat = other.view(-1)
    if change == "one element":
        flat[-7] += size
    elif change == "two that cancel":
        flat[10] += size
        flat[11] -= size
    elif change == "two exchanged":
        flat[10:12] = flat[10:12].flip(0).clone()
    else:
        flat += size
    apart = (sketch(other) - sketch(tensor)).abs().max()
    assert apart > 1e-7
    if change == "all":
        assert size / 100 < apart < size * 5  # of a row, chance may make it small, but not of all


def test_the_sketch_of_a_sum_is_the_sum_of_sketches() -> None:
    one, other = torch.randn(2, 60, 90, dtype=torch.float64).unbind()
    torch.testing.assert_close(sketch(one + other), sketch(one) + sketch(other), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_a_part_of_a_pattern_is_that_part_of_it(dimension: int) -> None:
    whole, ranges = pattern((30, 40, 25), 3), ((2, 5), (11, 20))
    part = torch.cat([whole.narrow(dimension, start, stop - start) for start, stop in ranges], dimension)
    assert torch.equal(pattern((30, 40, 25), 3, dimension, ranges), part)
    assert not torch.equal(whole[0], whole[1])
