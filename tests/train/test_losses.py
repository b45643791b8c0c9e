"""Losses on a device whose memory is apart: read late, and yet nothing bad leaves the worker or changes a parameter."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.local_exchange import LocalExchange
from tests.train.staged import CopyStaging, StagedDevice
from tests.train.test_replica import batches
from tests.train.test_worker import KINDS, spoiled
from tests.train.world import Recipe, run, topology_of
from zmqtrain.data.loader import Batch
from zmqtrain.errors import NonFiniteLossError
from zmqtrain.events import NullRecorder
from zmqtrain.exchange.base import Optimize
from zmqtrain.train.checkpoint.folder import Checkpoint
from zmqtrain.train.losses import Losses
from zmqtrain.train.replica import ReplicaSettings, TorchReplica
from zmqtrain.train.step import StepSettings, TrainStep


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


@pytest.mark.parametrize("when", Optimize)
@pytest.mark.parametrize("overlap", [True, False])
async def test_after_a_bad_loss_nothing_leaves_and_nothing_changes(when: Optimize, overlap: bool) -> None:
    """Copies take longer than a backward, so all of it has run before anybody can know."""
    device, exchange = StagedDevice(delay_s=0.002), LocalExchange(when)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = TorchReplica(model, optimizer, device, ReplicaSettings(bucket_bytes=100, overlap=overlap))
    bad = False

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target) * (math.nan if bad else 1.0)

    await exchange.start(replica)
    replica.connect(exchange.bucket_ready)
    step = TrainStep(replica, loss, device, StepSettings(rank=0, group_batch=8, accumulate=2), NullRecorder())
    for number, (x, y) in enumerate(batches(3)):
        bad = number == 2
        exchange.begin_step(number)
        if not bad:
            await device.run(lambda number=number, x=x, y=y: step(number, Batch((x,), y, len(x))))
            await exchange.end_step()
            continue
        await device.run(replica.take_all)
        before = {name: each.clone() for name, each in [*model.state_dict().items(), *momenta(optimizer).items()]}
        with pytest.raises(NonFiniteLossError):
            await device.run(lambda number=number, x=x, y=y: step(number, Batch((x,), y, len(x))))
    await device.run(device.staging.synchronize)
    await asyncio.sleep(0)  # what a copy's end has asked of the loop
    assert not exchange.order, "a bucket was handed over"
    await device.run(replica.take_all)
    for name, each in [*model.state_dict().items(), *momenta(optimizer).items()]:
        assert torch.equal(each, before[name]), name
    await device.close(5)


def momenta(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {f"momentum {number}": state["momentum_buffer"] for number, state in optimizer.state_dict()["state"].items()}


STAGED: dict[str, dict[str, Any]] = {
    "allreduce": KINDS["allreduce"],
    "servers": KINDS["servers"],
    "async": {"kind": "model_server", "staleness": "async"},
    "gossip": {"kind": "gossip"},
    "averaging": KINDS["averaging"],
}


@pytest.mark.parametrize(
    ("kind", "overlap"), [*((kind, number % 2 == 1) for number, kind in enumerate(STAGED)), ("allreduce", True)]
)
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
