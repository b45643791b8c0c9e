"""A run resumes with another number of groups, and with other batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from tests.pairwise import pairwise
from tests.train.world import Recipe, Run, data_of, network_of, run, topology_of
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.checkpoint_part import kept_payload
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import Checkpoint, find_latest
from zmqtrain.wire.compress.powersgd import RIGHTS

HALF = 3
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}


def topology(exchange: dict[str, Any], groups: int, batch: int, steps: int | None, **more: Any) -> Topology:
    job: dict[str, Any] = {"elastic": False, "checkpoint_every": 100, **more.pop("job", {})}
    if steps is not None:
        job["steps"] = steps
    compute = {"groups": groups, "batch_size": batch, **more.pop("compute", {})}
    return topology_of(job=job, compute=compute, exchange=exchange, **more)


async def done(*args: Any, **how: Any) -> Run:
    result = await run(*args, **how)
    assert not result.errors, result.errors
    return result


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    return tensors(folder, "model")


def tensors(folder: Path, part: str) -> dict[str, torch.Tensor]:
    return {name: payload.tensor for name, payload in Checkpoint(find_latest(folder)).part(part)[0].items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pairwise(
    {
        "exchange": {
            "allreduce": {"kind": "allreduce"},
            "sync": {"kind": "model_server", "staleness": "sync", "shards": 2},
            "merged": {"kind": "model_server", "staleness": "sync", "shards": 2, "merged_fc": True, "split": "2"},
        },
        "optimizer": list(OPTIMIZERS),
        "elastic": [False, True],
    }
)
async def test_groups_in_step_go_on_as_one_process(exchange: dict[str, Any], optimizer: str, elastic: bool, tmp_path: Path) -> None:
    """Twice, over the ends of epochs: four steps of 16 samples and 8 samples that are left out."""
    recipe, job = Recipe(train_data=data_of(72), optimizer=OPTIMIZERS[optimizer]), {"elastic": elastic}
    await done(topology(exchange, 1, 16, 10), recipe, folder=tmp_path / "whole")
    last = None
    for groups, steps in ((2, 3), (4, 6), (1, 10)):
        folder = tmp_path / str(groups)
        result = await done(topology(exchange, groups, 16 // groups, steps, job=job), recipe, folder=folder, resume=last)
        last = folder
        assert result.recorders["worker/0"].of("step")[-1]["epoch"] == (steps - 1) // 4
    assert_same(model_in(tmp_path / "1"), model_in(tmp_path / "whole"))


APART: dict[str, dict[str, Any]] = {
    "gossip": {"kind": "gossip"},
    "average": {"kind": "averaging", "every": 2},
    "elastic": {"kind": "averaging", "every": 2, "averaging": {"method": "elastic"}},
    "outer": {"kind": "averaging", "every": 2, "averaging": {"method": "outer"}},
}


@pairwise({"kind": list(APART), "was, groups": [(4, 2), (3, 2), (2, 3)], "optimizer": list(OPTIMIZERS), "grid": ["1x1", "2x1"]})
async def test_groups_with_models_of_their_own_begin_with_the_run_s(
    kind: str, was: int, groups: int, optimizer: str, grid: str, tmp_path: Path
) -> None:
    """All have the run's model, and of their optimizers' states the means of those that come together."""
    exchange, recipe = APART[kind], Recipe(optimizer=OPTIMIZERS[optimizer])
    first = topology(exchange, was, 8, HALF, compute={"grid": grid, "group_size": 2 if grid == "2x1" else 1})
    await done(first, recipe, folder=tmp_path / "half")
    await done(topology(exchange, groups, 12, HALF), recipe, folder=tmp_path / "rest", resume=tmp_path / "half")
    model = model_in(tmp_path / "half")
    assert_same(model_in(tmp_path / "rest"), model)
    before = [tensors(tmp_path / "half", f"group-{group}") for group in range(was)]
    for group in range(groups):
        found = tensors(tmp_path / "rest", f"group-{group}")
        joined = before[group::groups] if group < was else [before[group % was]]
        for name, tensor in found.items():
            if name.startswith("optimizer/"):
                expected = torch.stack([state[name] for state in joined]).mean(0)
            else:
                expected = model[name.removeprefix("parameter/")]
            torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12, msg=name)
    result = await done(topology(exchange, groups, 12, HALF + 2), recipe, resume=tmp_path / "half")
    assert [event["step"] for event in result.recorders["worker/0"].of("step")] == [HALF, HALF + 1]


@pytest.mark.parametrize("method", ["average", "outer"])
async def test_averages_that_had_arrived_are_applied(method: str, tmp_path: Path) -> None:
    """Nothing is learned after the checkpoint, so that the mean of models changes by what was under way alone."""
    exchange = {"kind": "averaging", "every": 3, "averaging": {"method": method, "overlap_steps": 2, "outer_momentum": 0.5}}
    if method == "average":
        del exchange["averaging"]["outer_momentum"]  # type: ignore[attr-defined]
    recipe = Recipe()
    await done(topology(exchange, 2, 8, 4), recipe, folder=tmp_path / "half")
    for groups in (2, 3, 4):
        still = topology(exchange, groups, 8, 5, optimizer={"lr": 1e-300})
        await done(still, recipe, folder=tmp_path / str(groups), resume=tmp_path / "half")
    for groups in (3, 4):
        assert_same(model_in(tmp_path / str(groups)), model_in(tmp_path / "2"))


SERVED: dict[str, dict[str, Any]] = {
    "sync": {"kind": "model_server", "staleness": "sync", "shards": 2},
    "bounded": {"kind": "model_server", "staleness": {"bound": 1}, "shards": 2},
    "async": {"kind": "model_server", "staleness": "async", "shards": 2},
    "merged": {"kind": "model_server", "staleness": "async", "shards": 2, "merged_fc": True, "split": "2"},
}


@pairwise({"kind": list(SERVED), "groups": [1, 3, 4], "optimizer": list(OPTIMIZERS)})
async def test_servers_go_on_with_what_they_have(kind: str, groups: int, optimizer: str, tmp_path: Path) -> None:
    exchange, recipe = SERVED[kind], Recipe(optimizer=OPTIMIZERS[optimizer])
    await done(topology(exchange, 2, 8, HALF), recipe, folder=tmp_path / "half")
    await done(topology(exchange, groups, 12, HALF), recipe, folder=tmp_path / "rest", resume=tmp_path / "half")
    for part in ("model", "server-0", "server-1"):
        assert_same(tensors(tmp_path / "rest", part), tensors(tmp_path / "half", part))
    again = await done(topology(exchange, groups, 12, HALF + 2), recipe, resume=tmp_path / "half")
    assert len(again.recorders["worker/0"].of("step")) == 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data_of(72))


class Numbered(nn.Module):
    """Notes the samples' numbers, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append([int(number) for number in x[:, 0]])
        return x[:, 1:]


async def test_a_stream_goes_on_where_a_step_takes_as_much_of_it(tmp_path: Path) -> None:
    exchange, recipe = {"kind": "allreduce"}, Recipe(train_data=Stream())
    await done(topology(exchange, 1, 16, 7), recipe, folder=tmp_path / "whole")
    await done(topology(exchange, 4, 4, 3), recipe, folder=tmp_path / "half")
    await done(topology(exchange, 2, 8, 7), recipe, folder=tmp_path / "rest", resume=tmp_path / "half")
    assert_same(model_in(tmp_path / "rest"), model_in(tmp_path / "whole"))


@pytest.mark.parametrize(("shuffle", "elastic"), [("global", False), ("global", True), ("ring", False)])
async def test_each_sample_of_an_epoch_is_trained_once(shuffle: str, elastic: bool, tmp_path: Path) -> None:
    """With other batches, too. The ring is divided anew after a lap, an order of all samples anywhere."""
    x, y = data_of(60).tensors
    data = TensorDataset(torch.cat([torch.arange(60, dtype=x.dtype)[:, None], x], 1), y)
    recipe = Recipe(train_data=data, eval_data=None, model=lambda: nn.Sequential(Numbered(), network_of()))
    more: dict[str, Any] = {"data": {"shuffle": shuffle}, "job": {"elastic": elastic}}
    half = 3 if shuffle == "ring" else 2
    await done(topology({"kind": "allreduce"}, 2, 10, half, **more), recipe, folder=tmp_path)
    first = trained_by(recipe)
    more["job"] = {"elastic": elastic, "epochs": 3}
    result = await done(topology({"kind": "allreduce"}, 3, 4, None, **more), recipe, resume=tmp_path)
    # After 40 of the first epoch's 60 samples there is one step of 12; after that each epoch has five.
    within = shuffle == "global"
    steps = result.recorders["worker/0"].of("step")
    assert [event["epoch"] for event in steps] == [0] * within + [1] * 5 + [2] * 5
    rest = trained_by(recipe)
    begun = [number for step in (*first, *rest[:within]) for number in step]
    assert len(set(begun)) == len(begun) == (52 if within else 60)
    for start in (within, within + 5):
        assert sorted(number for step in rest[start : start + 5] for number in step) == [*range(60)]


@pairwise(
    {
        "kind": [kind for kind in (*SERVED, *APART) if kind != "merged"],
        "was, groups": [(2, 3), (3, 2), (2, 1), (1, 2)],
        "elastic": [False, True],
    }
)
async def test_each_sample_is_trained_once_in_every_exchange(
    kind: str, was: int, groups: int, elastic: bool, tmp_path: Path
) -> None:
    """24 of 60 samples before, the other 36 after that, and 54 of the next epoch; whoever of the groups is ahead."""
    x, y = data_of(60).tensors
    data, exchange = TensorDataset(torch.cat([torch.arange(60, dtype=x.dtype)[:, None], x], 1), y), (SERVED | APART)[kind]
    runs: list[list[int]] = []
    for number, samples, length in ((was, 12, {"steps": 2}), (groups, 18, {"epochs": 2})):
        recipe = Recipe(train_data=data, eval_data=None, model=lambda: nn.Sequential(Numbered(), network_of()))
        shape = topology(exchange, number, samples // number, None, job={"elastic": elastic, **length})
        await done(shape, recipe, folder=tmp_path, resume=tmp_path if runs else None)
        models: Any = recipe.models.values()
        runs.append([sample for model in models for step in model[0].seen for sample in step])
    first, rest = runs
    times = Counter(first) + Counter(rest)
    assert (len(first), len(set(first)), len(rest)) == (24, 24, 36 + 54)
    assert Counter(times.values()) == {2: 54, 1: 6}


def trained_by(recipe: Recipe) -> list[list[int]]:
    """The samples of each step, by all workers."""
    numbered = [model[0] for model in recipe.models.values()]  # type: ignore[index]
    return [[number for part in parts for number in part] for parts in zip(*(each.seen for each in numbered), strict=True)]


TOP: dict[str, Any] = {"compression": "topk", "compression_ratio": 0.3}
COMPRESSED: dict[str, dict[str, Any]] = {
    "allreduce topk": {"kind": "allreduce", **TOP},
    "allreduce int8": {"kind": "allreduce", "compression": "int8"},
    "allreduce powersgd": {"kind": "allreduce", "compression": "powersgd", "compression_rank": 1},
    "sync topk": {"kind": "model_server", "staleness": "sync", "shards": 2, **TOP},
    "sync powersgd": {"kind": "model_server", "staleness": "sync", "compression": "powersgd", "compression_rank": 1},
    "async sign": {"kind": "model_server", "staleness": "async", "compression": "sign"},
    "outer int8": {"kind": "averaging", "averaging": {"method": "outer", "deltas": "int8"}},
}


_HALVES: dict[str, Path] = {}


async def half_of(name: str, groups: int, folders: pytest.TempPathFactory) -> Path:
    """What the first steps leave: the same for all tests, which only read it."""
    if name not in _HALVES:
        folder = folders.mktemp("half")
        await done(topology(COMPRESSED[name], groups, 8, HALF), Recipe(), folder=folder)
        _HALVES[name] = folder
    return _HALVES[name]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", COMPRESSED)
async def test_what_was_not_sent_is_shared_by_others(
    name: str, groups: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Altogether they have as much of it."""
    exchange, recipe, was = COMPRESSED[name], Recipe(), 3
    if groups == 1 and exchange["kind"] != "model_server":
        pytest.skip("one worker has nobody to send to")
    half = await half_of(name, was, tmp_path_factory)
    await done(topology(exchange, groups, 8, HALF), recipe, folder=tmp_path / "rest", resume=half)
    before, after = unsent(half, was), unsent(tmp_path / "rest", groups)
    if exchange.get("staleness") == "async":
        before, after = ({key: each * n for key, each in of.items()} for of, n in ((before, was), (after, groups)))
    assert any(each.abs().max() > 0 for each in before.values())
    assert before.keys() == after.keys()
    for key, tensor in after.items():
        torch.testing.assert_close(tensor, before[key], rtol=1e-10, atol=1e-14)
    again = await done(topology(exchange, groups, 8, HALF + 2), recipe, resume=half)
    assert len(again.recorders["worker/0"].of("step")) == 2


def unsent(folder: Path, groups: int) -> dict[str, torch.Tensor]:
    """The mean over groups, by bucket or piece."""
    parts = [Checkpoint(find_latest(folder)).part(f"worker-{rank}")[1]["exchange"] for rank in range(groups)]
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        whole: dict[str, list[torch.Tensor]] = {}
        for name, value in part.get("residuals", part).items():
            kind, _, number = name.removeprefix("lost/").rpartition("/")
            if name.startswith("right/") or name.endswith(RIGHTS) or kind in ("last", "momentum", "mean"):
                continue
            whole.setdefault(kind.removeprefix("sent/") or number, []).append(kept_payload(name, value).tensor)
        for key, tensors in whole.items():
            found[key] = found.get(key, torch.zeros(())) + torch.cat(tensors) / groups
    for key in found:
        means = [kept_payload("", value).tensor for part in parts for name, value in part.items() if name.endswith(f"mean/{key}")]
        if means:
            found[key] = found[key] + torch.cat(means)
    return found


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", ["allreduce topk", "sync topk"])
async def test_and_counts_as_much_as_before(name: str, groups: int, tmp_path: Path) -> None:
    """All of it is sent with the first step."""
    exchange, recipe = COMPRESSED[name], Recipe()
    if groups == 1 and exchange["kind"] == "allreduce":
        pytest.skip("one worker has nobody to send to")
    await done(topology(exchange, 2, 8, HALF), recipe, folder=tmp_path / "half")
    for number in (2, groups):
        all_sent = topology({**exchange, "compression_ratio": 1.0}, number, 16 // number, HALF + 1)
        await done(all_sent, recipe, folder=tmp_path / str(number), resume=tmp_path / "half")
    assert_same(model_in(tmp_path / str(groups)), model_in(tmp_path / "2"))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "added up": ({"kind": "allreduce", "every": 2}, {}, {}, "each worker has added up its own"),
    "under way": (
        {"kind": "averaging", "every": 3, "averaging": {"method": "elastic", "overlap_steps": 2}},
        {},
        {},
        "averages that were under way",
    ),
    "ring": (
        {"kind": "allreduce"},
        {"data": {"shuffle": "ring"}},
        {},
        r"within a lap .* 2 groups with batch_size = 8.*every 6 steps",
    ),
    "stream": ({"kind": "allreduce"}, {}, {"train_data": Stream()}, "16 samples a step, where it is 24 now"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_each_group_s_own_is_not_given_to_others(name: str, tmp_path: Path) -> None:
    exchange, more, fields, said = REFUSED[name]
    await done(topology(exchange, 2, 8, HALF, **more), Recipe(**fields), folder=tmp_path)
    rest = await run(topology(exchange, 3, 8, 5, **more), Recipe(**fields), resume=tmp_path)
    errors = [error for error in rest.errors.values() if isinstance(error, CheckpointError)]
    assert errors, rest.errors
    with pytest.raises(CheckpointError, match=said):
        raise errors[0]
    again = await run(topology(exchange, 2, 8, 5, **more), Recipe(**fields), resume=tmp_path)
    assert not again.errors, again.errors


async def test_one_worker_alone_never_sends_what_it_has_kept(tmp_path: Path) -> None:
    exchange = COMPRESSED["allreduce topk"]
    await done(topology(exchange, 2, 8, HALF), Recipe(), folder=tmp_path)
    rest = await run(topology(exchange, 1, 16, 5), Recipe(), resume=tmp_path)
    with pytest.raises(CheckpointError, match="which one worker alone never does"):
        raise rest.errors["worker/0"]
