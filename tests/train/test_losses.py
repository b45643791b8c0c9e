"""Losses on a device whose memory is apart: read late, and yet nothing bad leaves the worker or changes a parameter."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.staged import CopyStaging, StagedDevice
from tests.train.test_worker import KINDS, spoiled
from tests.train.world import Recipe, run, topology_of
from zmqtrain.errors import NonFiniteLossError
from zmqtrain.train.checkpoint import Checkpoint
from zmqtrain.train.losses import Losses


def test_on_a_cpu_a_bad_loss_is_known_at_once() -> None:
    losses = Losses(None, 2, 1, stop=True).of_step(7)
    losses.add(torch.tensor(3.0), 4)
    assert losses.mean() == 3.0
    with pytest.raises(NonFiniteLossError, match="step 7") as raised:
        losses.add(torch.tensor(math.inf), 4)
    assert (raised.value.rank, raised.value.step) == (2, 7)


def test_the_mean_is_over_samples() -> None:
    for staging in (None, CopyStaging()):
        losses = Losses(staging, 0, 3, stop=True)
        assert losses.of_step(0).mean() is None
        each = losses.of_step(1)
        for value, samples in ((1.0, 3), (4.0, 1), (0.0, 0)):
            each.add(torch.tensor([value], dtype=torch.float32), samples)
        assert (each.mean(), each.samples) == (1.75, 4)


def test_elsewhere_nobody_waits_before_the_end() -> None:
    staging = CopyStaging()
    held = threading.Event()
    staging.before_each_copy = lambda: held.wait(20)  # type: ignore[assignment,return-value]
    losses = Losses(staging, 0, 2, stop=True)
    first, second = losses.of_step(0), losses.of_step(1)
    first.add(torch.tensor(math.nan), 1)  # returns although nothing can have been copied
    second.add(torch.tensor(1.0), 1)
    held.set()
    staging.synchronize()
    assert not first.sound(arrived=True)
    assert second.sound(arrived=True)
    with pytest.raises(NonFiniteLossError):
        first.mean()
    with pytest.raises(NonFiniteLossError):
        losses.of_step(2).add(torch.tensor(math.nan), 1, wait=True)


def test_who_goes_on_regardless_is_told_the_mean_of_what_there_is() -> None:
    losses = Losses(CopyStaging(), 0, 2, stop=False).of_step(0)
    losses.add(torch.tensor(math.nan), 1)
    assert losses.sound()
    assert math.isnan(losses.mean() or 0.0)


STAGED: dict[str, dict[str, Any]] = {
    "allreduce": KINDS["allreduce"],
    "servers": KINDS["servers"],
    "async": {"kind": "model_server", "staleness": "async"},
    "gossip": {"kind": "gossip"},
    "averaging": KINDS["averaging"],
}


@pytest.mark.parametrize("kind", STAGED)
@pytest.mark.parametrize("overlap", [True, False])
async def test_a_bad_loss_stops_the_run_and_keeps_the_last_good_step(kind: str, overlap: bool, tmp_path: Path) -> None:
    """Copies take longer than a backward, so the loss is far from being known when the first buckets are complete."""
    size = 1 if kind == "gossip" else 2
    compute = {"groups": 2, "group_size": size, "batch_size": 12, "accumulate": 2, "overlap": overlap}
    topology = topology_of(job={"steps": 10}, compute=compute, exchange=STAGED[kind])
    result = await run(topology, spoiled(1, 6), folder=tmp_path, make_device=lambda _role: StagedDevice(delay_s=0.003))
    assert list(result.errors) == ["worker/1"]
    error = result.errors["worker/1"]
    assert isinstance(error, NonFiniteLossError)
    assert error.step == 3
    assert Checkpoint(tmp_path / "step-00000003").step == 3
    kept = Checkpoint(tmp_path / "step-00000003").part("model")[0]
    ours = torch.cat([payload.tensor.reshape(-1) for payload in kept.values()])
    assert ours.isfinite().all()
    if kind != "async":
        good = Recipe()
        await run(topology_of(job={"steps": 3}, compute=compute, exchange=STAGED[kind]), good)
        if kind not in ("gossip", "averaging"):
            torch.testing.assert_close(ours, good.parameters("worker/0"), rtol=1e-12, atol=1e-14)
