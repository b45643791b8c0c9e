"""What an auditor compares the model of a grid with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.simulate.test_grids_of_several_rows import STEPS, network, of_one_process, require_equal, task, topology
from zmqtrain.simulate.one_process import comparable, difference, trained_alone


@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
def test_it_is_a_plain_loop(clip_norm: float) -> None:
    given = topology("2x2", clip_norm)
    alone = trained_alone(given, STEPS, task())
    assert alone is not None
    assert comparable(given)
    require_equal(alone, of_one_process(clip_norm))
    assert difference(alone, of_one_process(clip_norm)) is None


def test_it_says_what_differs() -> None:
    model = network().state_dict()
    other = {name: tensor.clone() for name, tensor in model.items()}
    other["3.bias"][1] += 1e-6
    assert difference(other, model) == "3.bias of the run's model differs by up to 1e-06 from that of one process"
    del other["3.bias"]
    assert "the run's model has" in str(difference(other, model))
    assert "shape" in str(difference({**model, "3.bias": torch.zeros(4)}, model))


def test_random_numbers_are_others_in_a_run() -> None:
    dropping = replace(task(), model=lambda: nn.Sequential(network(), nn.Dropout(0.5)))
    assert trained_alone(topology("2x2"), STEPS, dropping) is None
    given = topology("2x2")
    local = given.model_copy(update={"parallel": given.parallel.model_copy(update={"statistics": "local"})})
    assert not comparable(local)
