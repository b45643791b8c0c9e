"""Data as people have it: whatever the samples, the batches and the source, training equals plain PyTorch in one process."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from tests.train.world import Recipe, run, topology_of
from zmqtrain.data.draws import drawn_from
from zmqtrain.data.partition import Partition
from zmqtrain.train.random_state import seed_everything

SAMPLES, STEP, STEPS = 40, 16, 3
_random = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, 6, generator=_random).double()
Z = torch.randn(SAMPLES, 6, generator=_random).double()
Y = torch.arange(SAMPLES) % 3
PLAIN = [(X[i], int(Y[i])) for i in range(SAMPLES)]


class Pair(NamedTuple):
    image: Tensor
    label: int


class Asked(Dataset[Any]):
    """Is asked for a whole batch, and for nothing else."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it has __getitems__")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [PLAIN[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        yield from self.samples


class Stateful(Stream):
    """Says where it is, as Hugging Face's streams do."""

    at = 0
    resume = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.resume = self.resume, 0
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume = state["at"]


@dataclass
class Ragged:
    rows: list[Tensor]
    labels: Tensor


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as tokenizers make it."""


class Two(nn.Module):
    """Takes two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.first(a).tanh() + self.second(b)


class Taking(nn.Module):
    """Takes one input, made of whatever it is given by ``take``."""

    def __init__(self, take: Callable[[Any], Tensor], outputs: int = 3) -> None:
        super().__init__()
        self.take, self.layer = take, nn.Linear(6, outputs).double()

    def forward(self, x: Any) -> Tensor:
        return self.layer(self.take(x).tanh())


def one(take: Callable[[Any], Tensor] = lambda x: x) -> Callable[[], nn.Module]:
    return lambda: Taking(take)


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def padded(samples: list[Any]) -> Any:
    longest = max(len(text) for text, _ in samples)
    rows = torch.zeros(len(samples), longest, dtype=torch.float64)
    for row, (text, _) in zip(rows, samples, strict=True):
        row[: len(text)] = text
    return {"x": rows, "length": torch.tensor([len(text) for text, _ in samples]), "label": torch.tensor([y for _, y in samples])}


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3).double()

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        return self.layer(torch.stack([x.sum(1), length.double()], 1) / 4)


TEXTS = [(X[i, : 1 + i % 6], int(Y[i])) for i in range(SAMPLES)]


@dataclass
class Case:
    data: Callable[[], Any]
    model: Callable[[], nn.Module] = field(default_factory=one)
    plain: Callable[[nn.Module, Any], Tensor] = lambda model, batch: entropy(model(batch[0]), batch[1])
    fields: dict[str, Any] = field(default_factory=dict)
    rows: Callable[[int], list[int]] | None = None
    """The samples of a step, where they are not those of the job's order."""
    samples: Callable[[], Any] | None = None
    """What ``data()`` gives as something to index."""
    cut: bool = True
    """Whether a batch can be cut."""


def named(model: nn.Module, batch: Any) -> Tensor:
    rest = {key: value for key, value in batch.items() if key not in ("label", "labels", "target")}
    (target,) = (value for key, value in batch.items() if key in ("label", "labels", "target"))
    return entropy(model(**rest), target)


def in_turn(step: int) -> list[int]:
    first = step % (SAMPLES // STEP) * STEP
    return list(range(first, first + STEP))


def drawn(sampler: Any) -> Callable[[int], list[int]]:
    def rows(step: int) -> list[int]:
        steps = len(sampler) // STEP
        with drawn_from((1, step // steps)):
            order = list(sampler)
        return order[step % steps * STEP :][:STEP]

    return rows


def loader(data: Any, **fields: Any) -> Callable[[], Any]:
    return lambda: DataLoader(data, batch_size=8, **fields)


def stateful(data: Any, **fields: Any) -> Callable[[], Any]:
    def make() -> Any:
        module = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return module.StatefulDataLoader(data, batch_size=8, **fields)

    return make


WEIGHTED = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 36, replacement=True)
SUBSET = SubsetRandomSampler(list(range(3, 38)))
BOTH: dict[str, Any] = {"model": Two}
FORWARD: dict[str, Any] = {
    "forward": lambda model, batch: model(batch),
    "loss": lambda output, batch: entropy(output, batch["kind"]),
}


def listed() -> Any:
    return PLAIN


CASES: dict[str, Case] = {
    "pairs": Case(listed),
    "tensors": Case(lambda: TensorDataset(X, Y), samples=listed),
    "lists": Case(lambda: [[x, y] for x, y in PLAIN]),
    "named tuples": Case(lambda: [Pair(*pair) for pair in PLAIN]),
    "numpy": Case(lambda: [(x.numpy(), np.int64(y)) for x, y in PLAIN]),
    "numbers": Case(lambda: [(float(x[0]), y) for x, y in PLAIN], one(lambda x: x[:, None].expand(-1, 6))),
    "two inputs": Case(lambda: [(X[i], Z[i], int(Y[i])) for i in range(SAMPLES)], Two, lambda m, b: entropy(m(b[0], b[1]), b[2])),
    "nested inputs": Case(lambda: [((X[i], Z[i]), int(Y[i])) for i in range(SAMPLES)], one(lambda x: x[0] * x[1])),
    "a mapping among the inputs": Case(lambda: [({"a": {"b": x}}, y) for x, y in PLAIN], one(lambda x: x["a"]["b"])),
    "mapping, labels": Case(lambda: [{"x": x, "labels": y} for x, y in PLAIN], plain=named),
    "mapping, label first": Case(lambda: [{"label": y, "x": x} for x, y in PLAIN], plain=named),
    "mapping, two inputs": Case(lambda: [{"b": Z[i], "a": X[i], "target": int(Y[i])} for i in range(SAMPLES)], Two, named),
    "mapping, forward": Case(
        lambda: [{"x": x, "kind": y, "text": f"number {y}"} for x, y in PLAIN],
        plain=lambda m, b: entropy(m(b["x"]), b["kind"]),
        fields={"forward": lambda m, b: m(b["x"] if len(b["text"]) == len(b["x"]) else 1 / 0), "loss": FORWARD["loss"]},
    ),
    "texts": Case(
        lambda: [(f"{i % 3}" * 2, {"x": X[i]}) for i in range(SAMPLES)],
        plain=lambda m, b: entropy(m(b[1]["x"]), torch.tensor([int(text[0]) for text in b[0]])),
        fields={
            "forward": lambda m, b: m(b[1]["x"]),
            "loss": lambda output, b: entropy(output, torch.tensor([int(text[0]) for text in b[0]])),
        },
    ),
    "one tensor": Case(
        lambda: list(X),
        lambda: Taking(lambda x: x, 6),
        lambda m, b: (m(b) - b).square().mean(),
        {"forward": lambda m, b: m(b), "loss": lambda output, b: (output - b).square().mean()},
    ),
    "collate, padded": Case(lambda: TEXTS, Padded, named, {"collate": padded}),
    "collate, dataclass": Case(
        listed,
        plain=lambda m, b: entropy(m(torch.stack(b.rows)), b.labels),
        fields={
            "collate": lambda samples: Ragged([x for x, _ in samples], torch.tensor([y for _, y in samples])),
            "forward": lambda m, b: m(torch.stack(b.rows)),
            "loss": lambda output, b: entropy(output, b.labels),
        },
    ),
    "collate, a mapping that is no dict": Case(
        listed, plain=named, fields={"collate": lambda samples: Encoding(x=default_collate([x for x, _ in samples]),
                                                                         labels=torch.tensor([y for _, y in samples]))}
    ),
    "collate, a list of targets": Case(
        listed,
        plain=lambda m, b: entropy(m(b[0]), torch.stack([each["class"] for each in b[1]])),
        fields={
            "collate": lambda samples: (torch.stack([x for x, _ in samples]), [{"class": torch.tensor(y)} for _, y in samples]),
            "loss": lambda output, target: entropy(output, torch.stack([each["class"] for each in target])),
        },
    ),
    "transform": Case(
        listed, plain=lambda m, b: entropy(m(b[0] * 2), b[1]), fields={"transform": lambda b: (b[0] * 2, b[1])}
    ),
    "subset": Case(lambda: Subset([*PLAIN, *PLAIN], range(SAMPLES)), samples=listed),
    "two datasets": Case(lambda: ConcatDataset([Subset(PLAIN, range(9)), Subset(PLAIN, range(9, SAMPLES))]), samples=listed),
    "getitems": Case(Asked, samples=listed),
    "loader, shuffled": Case(loader(PLAIN, shuffle=True), samples=listed),
    "loader, in turn": Case(loader(PLAIN), rows=in_turn, samples=listed),
    "loader, weighted": Case(loader(PLAIN, sampler=WEIGHTED), rows=drawn(WEIGHTED), samples=listed),
    "loader, a subset": Case(loader(PLAIN, sampler=SUBSET), rows=drawn(SUBSET), samples=listed),
    "loader, indices": Case(loader(PLAIN, sampler=[*range(39, -1, -1)]), rows=drawn([*range(39, -1, -1)]), samples=listed),
    "loader, collate": Case(loader(TEXTS, collate_fn=padded, shuffle=True), Padded, named, {"like": padded}, samples=lambda: TEXTS),
    "loader, 2 processes": Case(loader(PLAIN, num_workers=2, prefetch_factor=3), rows=in_turn, samples=listed),
    "loader of torchdata": Case(stateful(PLAIN, shuffle=True), samples=listed),
    "1 process": Case(listed, fields={"num_workers": 1}),
    "2 processes that stay": Case(listed, fields={"num_workers": 2, "persistent_workers": True}),
    "2 processes, mapping": Case(lambda: [{"x": x, "labels": y, "t": "a"} for x, y in PLAIN], fields={
        "num_workers": 2, "forward": lambda m, b: m(b["x"]), "loss": lambda o, b: entropy(o, b["labels"]),
    }, plain=lambda m, b: entropy(m(b["x"]), b["labels"])),
    "stream": Case(lambda: Stream(PLAIN), rows=in_turn, samples=listed),
    "stream, mapping": Case(lambda: Stream([{"x": x, "labels": y} for x, y in PLAIN]), plain=named, rows=in_turn,
                            samples=lambda: [{"x": x, "labels": y} for x, y in PLAIN]),
    "stream, 1 process": Case(lambda: Stream(PLAIN), rows=in_turn, samples=listed, fields={"num_workers": 1}),
    "stream, loader": Case(loader(Stream(PLAIN)), rows=in_turn, samples=listed),
    "stream of torchdata": Case(stateful(Stateful(PLAIN), num_workers=1), rows=in_turn, samples=listed),
    "an iterable that is no dataset": Case(lambda: Once(), rows=in_turn, samples=listed),
}  # fmt: skip


class Once:
    """Anything with ``iter``."""

    def __iter__(self) -> Iterator[Any]:
        return iter(PLAIN)


def alone(case: Case, steps: int) -> Tensor:
    """Plain PyTorch in one process, on the batches of all."""
    seed_everything(1)
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = (case.samples or case.data)()
    partition = Partition(len(samples), 1, 1, STEP, 1)
    collate = case.fields.get("collate", case.fields.get("like", default_collate))
    for step in range(steps):
        rows = partition.indices(step, 0, 0) if case.rows is None else case.rows(step)
        optimizer.zero_grad()
        case.plain(model, collate([samples[int(row)] for row in rows])).backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


#: All in two pieces a step, which cuts batches of whatever form; and one of each kind of source whole.
WHOLE = ("pairs", "mapping, labels", "texts", "collate, padded", "loader, shuffled", "stream", "1 process")


@pytest.mark.parametrize(("name", "accumulate"), [*((name, 2) for name in CASES), *((name, 1) for name in WHOLE)])
async def test_training_equals_one_process(name: str, accumulate: int) -> None:
    case = CASES[name]
    fields = {key: value for key, value in case.fields.items() if key != "like"}
    recipe = Recipe(
        model=case.model,
        **{"loss": entropy, "train_data": case.data(), "eval_data": None} | fields,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
    # Each worker has processes of its own, which are forked from this one.
    size = 1 if "process" in name or name == "stream of torchdata" else 2
    compute = {"groups": 2, "group_size": size, "batch_size": STEP // 2, "accumulate": accumulate}
    result = await run(topology_of(job={"steps": STEPS}, compute=compute, exchange={"kind": "allreduce"}), recipe)
    assert not result.errors, result.errors
    expected = alone(case, STEPS)
    for worker in range(2 * size):
        ours = recipe.parameters(f"worker/{worker}")
        assert (ours - expected).norm() <= 1e-12 * expected.norm()
