"""Servers of asynchronous groups take back a learning rate that they have lowered, where steps are too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_norm_limit import model_of, plain, trained
from zmqtrain.exchange.rate_recovery import WAIT

STEPS = WAIT + 10


@pytest.mark.parametrize("exchange", [{"snapshot": True}, {"shards": 2}], ids=str)
async def test_a_resumed_run_goes_on_with_the_same_rate(exchange: dict[str, Any], tmp_path: Path) -> None:
    """On a slope steps are too small at any rate. Where the groups' order makes no difference a resumed run has the same bits as
    one that was not interrupted."""
    times = [1.0] * STEPS
    await trained(tmp_path / "straight", STEPS, {"bound": 0}, times, **exchange)
    await trained(tmp_path / "first", WAIT + 5, {"bound": 0}, times, **exchange)
    await trained(tmp_path / "second", STEPS, {"bound": 0}, times, resume=tmp_path / "first", **exchange)
    assert torch.equal(model_of(tmp_path / "second"), model_of(tmp_path / "straight"))
    fitted, _ = plain(1.5, times)
    assert bool((model_of(tmp_path / "straight") / fitted > 1.1).all())
