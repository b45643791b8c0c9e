"""A divided model begins with weights of a checkpoint, tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.exchange import checkpoint_part
from zmqtrain.wire.payload import Payload

WIDTH = 6


async def trained(outputs: int, grid: str, steps: int, **settings: Any) -> tuple[Run, Recipe]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(16, WIDTH, generator=generator, dtype=torch.float64)
    recipe = Recipe(
        model=lambda: nn.Linear(WIDTH, outputs).double(),
        train_data=TensorDataset(inputs, torch.randint(4, (16,), generator=generator)),
        eval_data=None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )
    folder = settings.pop("folder", None)
    topology = topology_of(
        job={"steps": steps, "elastic": False, "checkpoint_every": steps if folder else 0} | settings,
        compute={"groups": 1, "group_size": 2 if grid == "2x1" else 1, "batch_size": 8, "grid": grid},
        parallel={"verify": False},
        exchange={"kind": "allreduce"},
    )
    return await run(topology, recipe, folder=folder), recipe


async def test_each_tensor_is_cut_when_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await trained(8, "1x1", 1, folder=tmp_path)
    kept: list[tuple[int, ...]] = []
    original = checkpoint_part.fetch_part

    async def fetch(*arguments: Any, keep: Any = None, **named: Any) -> Any:
        def noted(name: str, received: Payload) -> Payload:
            found = keep(name, received)
            kept.append(tuple(found.tensor.shape))
            return found  # type: ignore[no-any-return]

        return await original(*arguments, keep=None if keep is None else noted, **named)

    monkeypatch.setattr("zmqtrain.train.checkpoint.saving.fetch_part", fetch)
    found, _ = await trained(8, "2x1", 1, weights=str(tmp_path))
    assert not found.errors, found.errors
    assert sorted(kept) == sorted([(4, WIDTH), (4,)] * 2)


async def test_a_narrower_model_whose_whole_is_as_large_as_a_part_is_refused(tmp_path: Path) -> None:
    await trained(4, "1x1", 1, folder=tmp_path)
    found, _ = await trained(8, "2x1", 1, weights=str(tmp_path))
    assert any("shape [4, 6], but the model's has [8, 6]" in str(error) for error in found.errors.values()), found.errors
