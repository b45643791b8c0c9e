"""Checkpoints written on one kind of device and taken up on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.test_training import device_of
from tests.precision import close
from tests.train.world import Recipe, run, topology_of

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),  # counts its steps on the CPU
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),  # keeps tensors of other shapes than the parameters'
}
KINDS: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "server": {"kind": "model_server", "staleness": "sync", "shards": 2},
    "averaging": {"kind": "averaging"},
}
#: Both ways with every exchange, whose states differ, and every optimizer one way: what is read goes to where its parameter is.
CASES = [(kind, "adam", first) for kind in KINDS for first in ("device", "cpu")]
CASES += [("allreduce", "momentum", "device"), ("allreduce", "amsgrad", "cpu"), ("allreduce", "adafactor", "device")]
#: What six steps on the CPU give, by exchange and optimizer.
WHOLE: dict[tuple[str, str], torch.Tensor] = {}


@pytest.mark.parametrize(("kind", "optimizer", "first"), CASES)
async def test_a_run_goes_on_elsewhere(kind: str, optimizer: str, first: str, device: torch.device, tmp_path: Path) -> None:
    """Three steps here and three there are six anywhere."""

    async def train(steps: int, where: str, folder: Path, resume: Path | None = None) -> torch.Tensor:
        recipe = Recipe(optimizer=OPTIMIZERS[optimizer])
        groups = 2 if kind == "averaging" else 1
        compute = {"batch_size": 24 // groups, "groups": groups, "group_size": 2}
        topology = topology_of(job={"steps": steps, "checkpoint_every": 3}, compute=compute, exchange=KINDS[kind])
        make = (lambda _role: device_of(device)) if where == "device" else None
        result = await run(topology, recipe, folder=folder, resume=resume, make_device=make)
        assert not result.errors, result.errors
        return recipe.parameters("worker/0").cpu()

    second = "cpu" if first == "device" else "device"
    await train(3, first, tmp_path / "first")
    found = await train(6, second, tmp_path / "second", resume=tmp_path / "first" / "step-00000003")
    if (kind, optimizer) not in WHOLE:
        WHOLE[kind, optimizer] = await train(6, "cpu", tmp_path / "whole")
    close(found, WHOLE[kind, optimizer])
    if first == "cpu":
        return
    # And once more on the same device: random states of its own kind are there, too.
    again = await train(6, first, tmp_path / "again", resume=tmp_path / "first" / "step-00000003")
    close(again, found)
