"""What is kept of each group, for other groups."""

from __future__ import annotations

import pytest
import torch

from zmqtrain.errors import CheckpointError
from zmqtrain.train.checkpoint.regroup import mean_state


def test_states_have_a_mean_and_steps_the_largest_number() -> None:
    one = {"optimizer/exp_avg/w": torch.tensor([1.0, 3.0]), "optimizer/step/w": torch.tensor(4.0)}
    other = {"optimizer/exp_avg/w": torch.tensor([2.0, -3.0]), "optimizer/step/w": torch.tensor(6.0)}
    more = {"optimizer/exp_avg/v": torch.tensor([8.0])}  # a parameter that only this group has reached
    found = mean_state([one, {**other, **more}])
    assert found["optimizer/exp_avg/w"].tolist() == [1.5, 0.0]
    assert found["optimizer/step/w"].item() == 6
    assert found["optimizer/exp_avg/v"].tolist() == [8.0]
    assert one["optimizer/exp_avg/w"].tolist() == [1.0, 3.0]


def test_states_of_another_kind_have_none() -> None:
    with pytest.raises(CheckpointError, match="optimizer/k/w in different shapes"):
        mean_state([{"optimizer/k/w": torch.zeros(2)}, {"optimizer/k/w": torch.zeros(3)}])
