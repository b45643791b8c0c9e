"""Workers of a grid make their parts of the model, and train what the ordinary model trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.train.world import Recipe, Run, data_of, run, topology_of


def network() -> nn.Module:
    """Of which one weight is large enough to be made later."""
    return nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 400), nn.Tanh(), nn.Linear(400, 3)).double()


def kept_in_a_list() -> nn.Module:
    model = network()
    model.own = [model[2].weight]  # type: ignore[index, assignment]
    return model


async def trained(recipe: Recipe) -> Run:
    topology: Any = topology_of(
        job={"steps": 2},
        compute={"group_size": 2, "batch_size": 8, "grid": "2x1"},
        parallel={"verify": True},
        exchange={"kind": "allreduce"},
    )
    result = await run(topology, recipe)
    assert not result.errors, result.errors
    return result


async def test_a_model_made_in_parts_is_the_one_that_is_made_whole() -> None:
    parts, first = Recipe(model=network, train_data=data_of()), Recipe(model=kept_in_a_list, train_data=data_of())
    results = [await trained(recipe) for recipe in (parts, first)]
    for peer in parts.models:
        assert parts.models[peer].get_parameter("2.weight").numel() == 200 * 200
        for ours, theirs in zip(parts.models[peer].parameters(), first.models[peer].parameters(), strict=True):
            assert torch.equal(ours, theirs)
    said = [[event for recorder in result.recorders.values() for event in recorder.of("made whole")] for result in results]
    assert [len(events) for events in said] == [0, 2]
    assert "elsewhere than in its modules' parameters" in str(said[1][0]["reason"])
    assert all(recorder.of("verified") for result in results for recorder in result.recorders.values())


async def test_a_buffer_in_a_large_parameters_memory_is_refused() -> None:
    def shown() -> nn.Module:
        model = network()
        model.register_buffer("first", model[2].weight.detach())  # type: ignore[union-attr, operator]
        return model

    recipe = Recipe(model=shown, train_data=data_of())
    with pytest.raises(AssertionError, match=r"'first' of the model Sequential shares its memory with the parameter '2.weight'"):
        await trained(recipe)
