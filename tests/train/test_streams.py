"""Streams: every kind of end is the same on all workers, and a resumed run goes on with the very next sample."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

from tests.pairwise import pairwise
from tests.train.world import Recipe, Run, run, topology_of
from zmqtrain.errors import CheckpointError, TaskError, UsageError

PAIRS = [(torch.full((6,), float(i), dtype=torch.float64) / 100, i % 3) for i in range(40)]


class Numbers(IterableDataset[Any]):
    """Remembers what it gave, and can be divided."""

    def __init__(self, count: int, start: int = 0, every: int = 1) -> None:
        self.count, self.start, self.every = count, start, every

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        start, every = self.start, self.every
        if info is not None:
            start, every = start + every * info.id, every * info.num_workers
        for number in range(start, self.count, every):
            yield torch.full((6,), number / 100, dtype=torch.float64), number % 3


class Shuffled(IterableDataset[Any]):
    """Draws from all global generators as it goes, and keeps a buffer that no state knows of."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for number in range(40):
            buffer.append(number)
            if len(buffer) > 5:
                at = random.randrange(len(buffer))
                yield PAIRS[buffer.pop(at)][0] + np.random.rand() * 0.01 + torch.rand(6, dtype=torch.float64) * 0.01, number % 3
        random.shuffle(buffer)
        for number in buffer:
            yield PAIRS[number]


class Stateful(IterableDataset[Any]):
    """Says where it is; reading again would be noticed."""

    def __init__(self) -> None:
        self.at = self.resume = self.read = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.resume = self.resume, 0
        while self.at < len(PAIRS):
            self.at, self.read = self.at + 1, self.read + 1
            yield PAIRS[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "more": (torch.tensor([1.5]), np.arange(3), 1 << 100)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["more"][0], torch.tensor([1.5]))
        assert state["more"][1].tolist() == [0, 1, 2]
        assert state["more"][2] == 1 << 100
        self.resume = state["at"]


class Watched(nn.Module):
    """Remembers the numbers that it was trained on."""

    def __init__(self, seen: list[list[int]]) -> None:
        super().__init__()
        self.seen, self.layer = seen, nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append((x[:, 0] * 100).round().int().tolist())
        return self.layer(x)


class Trained:
    """A recipe that knows what each worker was trained on."""

    def __init__(self, data: Any, **fields: Any) -> None:
        self.seen: dict[str, list[list[int]]] = {}
        self.made: dict[str, Any] = {}
        self.data, self.fields = data, fields

    def __call__(self, peer: str) -> Any:
        self.made[peer] = self.data()
        seen = self.seen.setdefault(peer, [])
        self.recipe = Recipe(model=lambda: Watched(seen), train_data=self.made[peer], **{"eval_data": None} | self.fields)
        self.last = self.recipe(peer)
        return self.last

    def all(self) -> list[int]:
        return sorted(number for steps in self.seen.values() for step in steps for number in step)


def divided(data: Numbers, rank: int, world: int) -> Numbers:
    return Numbers(data.count, rank, world)


async def train(recipe: Any, groups: int = 2, size: int = 1, *, batch: int = 4, kind: str = "allreduce", **job: Any) -> Run:
    folder, resume = job.pop("folder", None), job.pop("resume", None)
    exchange = job.pop("exchange", {"kind": kind})
    topology = topology_of(
        job={"elastic": False, **job}, compute={"groups": groups, "group_size": size, "batch_size": batch}, exchange=exchange
    )
    return await run(topology, recipe, folder=folder, resume=resume)


@pytest.mark.parametrize("kind", ["allreduce", "model_server", "gossip", "averaging"])
@pytest.mark.parametrize("count", [16, 19, 23, 24])
async def test_an_epoch_ends_for_all_when_a_step_is_not_full(kind: str, count: int) -> None:
    recipe = Trained(lambda: Numbers(count))
    exchange = {"kind": kind, **({"staleness": "sync"} if kind == "model_server" else {})}
    # Whether the run may be elastic is known only when its data is.
    result = await train(recipe, epochs=2, exchange=exchange, elastic=None if kind == "model_server" and count % 2 else False)
    assert not result.errors
    assert {peer: len(steps) for peer, steps in recipe.seen.items()} == {f"worker/{rank}": 2 * (count // 8) for rank in range(2)}
    assert recipe.all() == sorted(2 * list(range(count // 8 * 8)))
    finish = result.recorders["worker/0"].of("finish")[0]
    assert finish["replica_spread"] == 0
    assert [event["epoch"] for event in result.recorders["worker/1"].of("step")] == sorted([0, 1] * (count // 8))


@pytest.mark.parametrize(("count", "workers"), [(16, 0), (18, 0), (31, 0), (40, 0), (18, 1), (31, 1), (31, 2), (40, 2)])
async def test_parts_of_different_length_end_together(count: int, workers: int) -> None:
    class Uneven(Numbers):
        pass

    def shard(data: Numbers, rank: int, world: int) -> Numbers:
        return Numbers(data.count - 8 * rank, rank, world)  # the second worker's part is shorter

    recipe = Trained(lambda: Uneven(count), shard=shard, num_workers=workers)
    result = await train(recipe, epochs=1)
    assert not result.errors
    lengths = {len(steps) for steps in recipe.seen.values()}
    assert len(lengths) == 1
    assert len(recipe.all()) == len(set(recipe.all()))
    short = len(range(1, count - 8, 2))
    if workers < 2:
        assert lengths == {short // 4}


async def test_with_steps_a_stream_begins_anew() -> None:
    recipe = Trained(lambda: Numbers(19))
    result = await train(recipe, steps=5)
    assert not result.errors
    assert recipe.all() == sorted([*range(16), *range(16), *range(8)])


@pytest.mark.parametrize("staleness", ["async", {"bound": 1}])
async def test_groups_that_run_apart_take_steps_and_no_epochs(staleness: Any) -> None:
    exchange = {"kind": "model_server", "staleness": staleness}
    recipe = Trained(lambda: Numbers(24), shard=divided)
    assert not (await train(recipe, steps=7, exchange=exchange)).errors
    assert {len(steps) for steps in recipe.seen.values()} == {7}
    refused = await train(Trained(lambda: Numbers(24)), epochs=1, exchange=exchange)
    assert all(isinstance(error, UsageError) and "set [job] steps instead of epochs" in str(error) for error in refused.causes())
    assert refused.errors


async def test_a_stream_that_is_too_short_or_gives_nothing_again_is_an_error() -> None:
    short = await train(Trained(lambda: Numbers(7)), epochs=1)
    assert all(isinstance(error, TaskError) and "too few samples" in str(error) for error in short.causes())
    assert len(short.errors) == 2

    once = await train(Trained(lambda: iter(list(Numbers(16)))), epochs=2)
    assert all("must also start again each time" in str(error) for error in once.causes())
    assert len(once.errors) == 2


async def test_what_the_stream_raises_names_it() -> None:
    class Broken(Numbers):
        def __iter__(self) -> Iterator[Any]:
            yield from list(super().__iter__())[:10]
            raise OSError("disk on fire")

    result = await train(Trained(lambda: Broken(40)), groups=1, epochs=1)
    error = result.errors["worker/0"]
    assert isinstance(error, TaskError)
    assert "a stream, raised OSError in its batch 2: disk on fire" in str(error)


@pairwise(
    {
        "at": [1, 4],
        "data": {"read again": Shuffled, "own state": Stateful},
        "fields": {
            "no process": {},
            "a process": {"num_workers": 1},
            "one that stays": {"num_workers": 1, "persistent_workers": True},
        },
    }
)
async def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(data: Any, at: int, fields: Any, tmp_path: Path) -> None:
    whole, again = Trained(data, **fields), Trained(data, **fields)
    first = await train(whole, steps=8, checkpoint_every=1, keep_checkpoints=20, folder=tmp_path)
    resumed = await train(again, steps=8, folder=tmp_path / "again", resume=tmp_path / f"step-{at:08d}")
    assert not first.errors
    assert not resumed.errors
    for peer in ("worker/0", "worker/1"):
        assert first.losses(peer)[at:] == resumed.losses(peer)
        assert whole.seen[peer][at:] == again.seen[peer]
        assert bool(resumed.recorders[peer].of("skipping")) == (data is Shuffled)
    assert len({tuple(map(tuple, steps)) for steps in whole.seen.values()}) == 2
    if data is Shuffled:  # the two have shuffled alike, so no sample was taken twice in the epoch
        numbers = [number for steps in whole.seen.values() for step in steps[:5] for number in step]
        assert len(set(numbers)) > 30
    elif not fields:
        assert again.made["worker/0"].read < 8 * 8  # what was behind it was not read again


async def test_a_stream_is_resumed_with_as_many_workers_in_a_group(tmp_path: Path) -> None:
    await train(Recipe(train_data=Numbers(40)), groups=1, size=2, steps=3, folder=tmp_path)
    found = await train(Recipe(train_data=Numbers(40)), groups=1, size=3, steps=5, resume=tmp_path / "step-00000003")
    for error in found.causes():
        assert isinstance(error, CheckpointError)
        assert "among the 3 of a group now: resume with 2 ([compute] group_size" in str(error)
    assert found.errors


@pytest.mark.parametrize("workers", [1, 2])
async def test_parts_of_streams_are_resumed_to_the_bit(workers: int, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"shard": divided, "num_workers": workers}
    whole = Trained(lambda: Numbers(44), **fields)
    first = await train(whole, steps=8, checkpoint_every=1, keep_checkpoints=20, folder=tmp_path)
    assert not first.errors
    for at in ((1, 4), (3, 6))[workers - 1]:
        again = Trained(lambda: Numbers(44), **fields)
        resumed = await train(again, steps=8, folder=tmp_path / f"again {at}", resume=tmp_path / f"step-{at:08d}")
        assert not resumed.errors
        for peer in ("worker/0", "worker/1"):
            assert whole.seen[peer][at:] == again.seen[peer]
            assert first.losses(peer)[at:] == resumed.losses(peer)
    other = Trained(lambda: Numbers(44), shard=divided, num_workers=3 - workers)
    wrong = await train(other, steps=8, folder=tmp_path / "other", resume=tmp_path / "step-00000003")
    assert wrong.errors
    assert all(isinstance(error, CheckpointError) for error in wrong.causes())


async def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    assert not (await train(Recipe(), steps=3, checkpoint_every=2, folder=tmp_path)).errors
    recipe = Recipe(train_data=Shuffled())
    result = await train(recipe, steps=3, folder=tmp_path / "again", resume=tmp_path / "step-00000002")
    assert "does not say how far the run was in its stream" in str(result.errors["worker/0"])


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        ({"job": {"elastic": True}, "exchange": {"kind": "gossip"}}, "remove .job. elastic"),
        ({"compute": {"parts": "measured"}, "exchange": {"kind": "allreduce"}}, "use .compute. weights"),
        ({"data": {"shuffle": "ring"}, "exchange": {"kind": "allreduce"}}, "needs a known number of samples"),
    ],
)
async def test_topologies_in_which_a_stream_is_not_possible(topology: dict[str, Any], said: str) -> None:
    job = {"steps": 3, **topology.pop("job", {})}
    compute = {"groups": 2, "batch_size": 4, **topology.pop("compute", {})}
    result = await run(topology_of(job=job, compute=compute, **topology), Recipe(train_data=Numbers(40)))
    with pytest.raises(UsageError, match=said):
        raise result.causes()[0]


@pytest.mark.parametrize("groups", [1, 2, 3])
async def test_a_stream_is_evaluated_as_a_dataset_is(groups: int) -> None:
    found = []
    for data in (list(Numbers(40)), Numbers(40)):
        recipe = Recipe(train_data=list(Numbers(40)), eval_data=data)
        result = await train(recipe, groups=groups, steps=2)
        assert not result.errors
        found.append(result.recorders["worker/0"].of("eval")[-1])
    for name in ("eval_loss", "eval_accuracy"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-12)


async def test_an_evaluation_of_nothing_is_refused() -> None:
    once = await train(Recipe(train_data=list(Numbers(40)), eval_data=(sample for sample in Numbers(40))), steps=2)
    with pytest.raises(TaskError, match="eval_data is a generator, which can be read only once"):
        raise once.errors["worker/0"]

    class Consumed(Numbers):
        """Goes on where it was."""

        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.left = list(range(count))

        def __iter__(self) -> Iterator[Any]:
            samples = list(super().__iter__())
            while self.left:
                yield samples[self.left.pop(0)]

    again = await train(Recipe(train_data=list(Numbers(40)), eval_data=Consumed(40)), groups=1, steps=3, eval_every=2)
    with pytest.raises(TaskError, match="has given 0 samples to this evaluation, and 40 to the one before"):
        raise again.errors["worker/0"]
    empty = await train(Recipe(train_data=list(Numbers(40)), eval_data=Numbers(0)), groups=1, steps=2)
    with pytest.raises(TaskError, match="eval_data is a stream and has no samples"):
        raise empty.errors["worker/0"]
