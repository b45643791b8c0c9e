"""The distance between two workers' parameters."""

from __future__ import annotations

import pytest
import torch

from zmqtrain.exchange.clip import squares_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_squares_are_summed_of_every_type_that_a_model_may_have(dtype: torch.dtype) -> None:
    values = torch.tensor([3.0, 4.0]).to(dtype) * (1j if dtype.is_complex else 1)
    assert squares_of(values) == pytest.approx(25.0)
