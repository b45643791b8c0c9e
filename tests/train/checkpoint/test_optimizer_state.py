"""`[job] optimizer_state = "kept"`: a training in two parts, of which each is a run, is that of one process in plain PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.train.world import Recipe, Run, data_of, network_of, run, topology_of
from zmqtrain.errors import CheckpointError, TopologyError
from zmqtrain.topology.load import parse_topology
from zmqtrain.train.checkpoint.weights import Weights

SAMPLES, BEFORE, AFTER = 24, 3, 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
}
#: The same classes with other settings, of which the second needs something that the first does not keep.
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rmsprop, momentum": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
}
SYNC = {"kind": "model_server", "staleness": "sync"}
#: Groups, workers of each, the grid, and the exchange, of the first part and of the second. Each step has all samples.
SHAPES: dict[str, tuple[tuple[int, int, str, dict[str, Any]], tuple[int, int, str, dict[str, Any]]]] = {
    "allreduce": ((2, 1, "1x1", {"kind": "allreduce"}), (1, 2, "1x2", {"kind": "allreduce"})),
    "a grid": ((1, 2, "2x1", {"kind": "allreduce"}), (2, 1, "1x1", {"kind": "allreduce"})),
    "another grid": ((2, 1, "1x1", {"kind": "allreduce"}), (1, 2, "2x1", {"kind": "allreduce"})),
    "servers": ((2, 1, "1x1", SYNC), (2, 1, "1x1", SYNC)),
    "other servers": (
        (1, 2, "1x2", {**SYNC, "shards": 2, "split_size": 256}),
        (3, 1, "1x1", {**SYNC, "shards": 3, "split_size": 512}),
    ),
    "a group": ((2, 1, "1x1", SYNC), (1, 1, "1x1", {"kind": "model_server", "staleness": "async"})),
    "averaging": ((2, 1, "1x1", {"kind": "averaging"}), (1, 2, "1x2", {"kind": "averaging"})),
    "more averaging": ((1, 1, "1x1", {"kind": "averaging"}), (2, 1, "1x1", {"kind": "averaging"})),
    "gossip": ((2, 1, "1x1", {"kind": "gossip"}), (2, 1, "1x1", {"kind": "gossip"})),
}
#: The mean of what groups do by themselves is what one does with the mean of gradients, but not with Adam, which divides.
APART = ("averaging", "more averaging", "gossip")


def topology(shape: tuple[int, int, str, dict[str, Any]], steps: int, *, bucket: int = 512, **job: Any) -> Any:
    groups, size, grid, exchange = shape
    return topology_of(
        job={"steps": steps, "checkpoint_every": steps, **job},
        compute={"groups": groups, "group_size": size, "grid": grid, "batch_size": SAMPLES // groups, "bucket_size": bucket},
        exchange=exchange,
        optimizer={"momentum": "task"},
    )


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return network_of()


def recipe(optimizer: str) -> Recipe:
    return Recipe(model=model, train_data=data_of(SAMPLES), eval_data=None, optimizer=(OPTIMIZERS | OTHERS)[optimizer])


def replaced(given: Recipe, **fields: Any) -> Recipe:
    return Recipe(**{**given.fields, **fields})


async def parts(
    name: str, first: str, second: str, folder: Path, *, state: str = "kept", elastic: bool = False
) -> tuple[Run, dict[str, Tensor]]:
    was, now = SHAPES[name]
    begun = await run(topology(was, BEFORE, elastic=elastic), recipe(first), folder=folder / "first")
    assert not begun.errors, begun.errors
    job = {"weights": str(folder / "first"), "optimizer_state": state, "seed": 2, "elastic": elastic}
    found = await run(topology(now, AFTER, bucket=900, **job), recipe(second), folder=folder / "second")
    return found, {} if found.errors else load_file(folder / "second" / "model.safetensors")


def plain(optimizer: str, *, anew: bool = False) -> dict[str, Tensor]:
    """One process; ``anew``: with another optimizer after the first part."""
    trained = model()
    inputs, targets = data_of(SAMPLES).tensors
    found = OPTIMIZERS[optimizer](trained.parameters())
    for step in range(BEFORE + AFTER):
        if anew and step == BEFORE:
            found = OPTIMIZERS[optimizer](trained.parameters())
        found.zero_grad()
        nn.functional.cross_entropy(trained(inputs), targets).backward()
        found.step()
    return {name: tensor.detach() for name, tensor in trained.named_parameters()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


@pytest.mark.parametrize(
    ("name", "optimizer"), [(name, each) for name in SHAPES for each in OPTIMIZERS if each == "sgd" or name not in APART]
)
async def test_two_parts_are_one_training(name: str, optimizer: str, tmp_path: Path) -> None:
    found, weights = await parts(name, optimizer, optimizer, tmp_path)
    assert not found.errors, found.errors
    assert [event["step"] for event in found.recorders["worker/0"].of("step")] == list(range(AFTER))
    assert distance(weights, plain(optimizer)) < 1e-12


@pytest.mark.parametrize("name", ["allreduce", "other servers", "gossip"])
async def test_they_are_in_elastic_runs(name: str, tmp_path: Path) -> None:
    found, weights = await parts(name, "sgd", "sgd", tmp_path, elastic=True)
    assert not found.errors, found.errors
    assert distance(weights, plain("sgd")) < 1e-12


async def test_by_default_it_begins_anew(tmp_path: Path) -> None:
    _, weights = await parts("servers", "sgd", "sgd", tmp_path, state="new")
    assert distance(weights, plain("sgd", anew=True)) < 1e-12 < 1e-3 < distance(weights, plain("sgd"))


async def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    found, _ = await parts("allreduce", "sgd", "adam", tmp_path)
    assert any("the checkpoint's optimizer is 'SGD', but this run's is 'Adam'" in str(each) for each in found.errors.values())


@pytest.mark.parametrize("name", ["allreduce", "servers"])
@pytest.mark.parametrize(
    ("first", "second", "lacks"), [("rmsprop", "rmsprop, momentum", "momentum_buffer"), ("adam", "amsgrad", "max_exp_avg_sq")]
)
async def test_so_is_one_that_lacks_what_the_second_run_needs(
    name: str, first: str, second: str, lacks: str, tmp_path: Path
) -> None:
    found, _ = await parts(name, first, second, tmp_path)
    said = rf"the checkpoint lacks {lacks} of .*or with settings that do not need it"
    assert any(re.search(said, str(each)) for each in found.errors.values())


@pytest.mark.parametrize("frozen", [0, 2, 4])
@pytest.mark.parametrize("kept", [False, True])
async def test_servers_had_nothing_of_layers_that_were_frozen(frozen: int, kept: bool, tmp_path: Path) -> None:
    def partly() -> nn.Module:
        built = model()
        built[frozen].requires_grad_(requires_grad=False)  # type: ignore[index]
        return built

    first = await run(topology(SHAPES["servers"][0], BEFORE), replaced(recipe("sgd"), model=partly), folder=tmp_path)
    assert not first.errors, first.errors
    job = {"weights": str(tmp_path), "optimizer_state": "kept"} if kept else {}
    second = topology(SHAPES["servers"][0], AFTER, **job)
    found = await run(second, recipe("sgd"), resume=None if kept else tmp_path)
    said = rf"servers had nothing of {frozen}\.(weight|bias): it was frozen there.* optimizer_state = \"new\""
    assert any(re.search(said, str(each)) for each in found.errors.values()), found.errors


async def test_what_has_no_such_state_is_refused(tmp_path: Path) -> None:
    found = await run(topology(SHAPES["allreduce"][0], BEFORE), recipe("sgd"), folder=tmp_path / "first")
    assert not found.errors, found.errors
    given = partial(topology, steps=AFTER, optimizer_state="kept")
    assert Weights.of_job(topology(SHAPES["allreduce"][0], AFTER)) is None
    weights = Weights.of_job(given(SHAPES["a grid"][0], weights=str(tmp_path / "first")))
    assert weights is not None
    assert (weights.step, weights.state) == (BEFORE, True)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no folder with checkpoints, and only these"):
        Weights.of_job(given(SHAPES["allreduce"][0], weights=str(tmp_path / "first" / "model.safetensors")))
    with pytest.raises(CheckpointError, match='has it as kind = "allreduce" keeps it'):
        Weights.of_job(given(SHAPES["servers"][0], weights=str(tmp_path / "first")))


def test_it_comes_with_weights_and_not_with_merged_layers() -> None:
    text = '[job]\ntask = "a:b"\noptimizer_state = "kept"\n[exchange]\nkind = "model_server"\nmerged_fc = true\n'
    with pytest.raises(TopologyError) as error:
        parse_topology(text)
    assert "optimizer_state is what comes with weights" in str(error.value)
    assert "FC servers begin with new optimizers" in str(error.value)
