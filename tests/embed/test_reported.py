"""What a loop reports: numbers, and what holds one number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zmqtrain.embed.reported import plain_values
from zmqtrain.errors import UsageError


@pytest.mark.parametrize(
    "value", [0.5, torch.tensor(0.5, requires_grad=True), torch.tensor([0.5]), np.float32(0.5), np.float64(0.5), np.array([[0.5]])]
)
def test_what_holds_one_number_is_this_number(value: object) -> None:
    """As events are sent later, from elsewhere, anything else would end the run there."""
    (found,) = plain_values("step", {"loss": value}).values()
    assert type(found) is float
    assert found == 0.5


def test_numbers_texts_and_truth_values_are_kept() -> None:
    assert plain_values("eval", {"n": np.int64(3), "name": "a", "best": np.bool_(True)}) == {"n": 3, "name": "a", "best": True}


@pytest.mark.parametrize("value", [None, torch.ones(2), [1.0], 1j, np.ones(3)])
def test_other_values_are_refused_where_they_are_reported(value: object) -> None:
    with pytest.raises(UsageError, match=r"session.report\(loss=...\) takes a number, text or truth value, not a value of"):
        plain_values("step", {"loss": value})


@pytest.mark.parametrize(("kind", "name"), [("step", "step"), ("step", "samples"), ("eval", "step")])
def test_names_of_the_run_are_refused(kind: str, name: str) -> None:
    """The record of the step would have the script's value in place of the run's."""
    with pytest.raises(UsageError, match=f"the run itself records '{name}'"):
        plain_values(kind, {name: 3})
