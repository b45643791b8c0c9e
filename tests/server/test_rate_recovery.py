"""A server's learning rate recovers where steps are too small, with each optimizer that it is fitted for; checkpoints keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.momentum import Compensation
from zmqtrain.exchange.norm_limit import NormLimit
from zmqtrain.exchange.optimizer import describe_optimizer
from zmqtrain.exchange.pieces import Piece
from zmqtrain.exchange.rate_recovery import WAIT
from zmqtrain.server.aggregator import Update
from zmqtrain.server.checkpoint import keep_pieces, restore_pieces
from zmqtrain.server.rate_recovery import ELEMENTS, REMEMBERED, PiecePath, Recovery
from zmqtrain.server.serving import Shard
from zmqtrain.server.shard import TensorEntry

GROUPS, SIZES = 4, (300, 20)
MAKE: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    "nadam": lambda p, lr: torch.optim.NAdam(p, lr=lr),
    "adamax": lambda p, lr: torch.optim.Adamax(p, lr=lr),
}


class Training:
    """Groups that take turns, on a quadratic with noise, at one server with two pieces."""

    def __init__(self, name: str, lr: float, done: int = 0) -> None:
        given = describe_optimizer(MAKE[name]([torch.nn.Parameter(torch.zeros(1))], lr))
        compensation = Compensation(GROUPS - 1.0, on=True, look_ahead=True, groups=GROUPS)
        self.ceiling = compensation.ceiling(given.groups[0])
        self.shard = Shard()
        for index, size in enumerate(SIZES):
            piece = Piece(index, index, 0, size, 0, 0)
            spec, ceilings = compensation.of(given), (self.ceiling,)
            entry = TensorEntry(piece, "float32", 0, spec, horizon=compensation.horizon, ceilings=ceilings)
            entry.load({"values": torch.ones(size)}, 0)
            self.shard.entries[index] = entry
        self.shard.limit = NormLimit(self.shard.entries) if compensation.limits(given) else None
        self.shard.recovery = Recovery(self.shard.entries, GROUPS, self.ceiling)
        self.chance = torch.Generator().manual_seed(5)
        self.reads = [self.read() for _ in range(GROUPS)]
        self.done = done

    def read(self) -> tuple[list[Tensor], list[int]]:
        entries = self.shard.entries.values()
        return [entry.memory().tensor.clone() for entry in entries], [entry.version for entry in entries]

    def train(self, updates: int) -> float:
        for _ in range(updates):
            group = self.done % GROUPS
            values, versions = self.reads[group]
            gradients = [each + torch.randn(each.shape, generator=self.chance) for each in values]
            pushes = zip(range(len(SIZES)), gradients, versions, strict=True)
            self.shard.apply([Update(piece, each, None, ((group, 0, version),)) for piece, each, version in pushes])
            self.reads[group] = self.read()
            self.done += 1
        assert self.shard.recovery is not None
        return self.shard.recovery.factor


@pytest.mark.parametrize("name", MAKE)
def test_it_recovers_at_a_rate_that_is_too_low(name: str) -> None:
    training = Training(name, 1e-3 if name == "sgd" else 1e-4)
    assert training.train(WAIT * GROUPS) == 1.0
    assert training.train(160) > 1.4
    assert training.ceiling == (4.0 if name == "sgd" else 2.0)


@pytest.mark.parametrize("name", MAKE)
def test_it_does_not_at_a_rate_that_is_high(name: str) -> None:
    training = Training(name, 0.3 if name == "sgd" else 0.5)
    assert max(training.train(20) for _ in range(15)) < 1.1


def test_passed_over_updates_change_nothing() -> None:
    training = Training("sgd", 1e-3)
    training.train(WAIT * GROUPS + 20)
    recovery = training.shard.recovery
    assert recovery is not None
    before = recovery.state()
    training.shard.apply([Update(0, torch.full((SIZES[0],), torch.nan), None, ((0, 0, 0),), passed_over=True)])
    assert recovery.state() == before
    assert training.train(40) > 1


def test_a_checkpoint_goes_on_with_the_same_bits() -> None:
    """Gradients of earlier versions that arrive after it, too."""
    training = Training("adam", 1e-4)
    training.train(WAIT * GROUPS + 30)
    tensors, sidecar = keep_pieces(training.shard.entries, 7, training.shard.limit, training.shard.recovery)
    resumed = Training("adam", 1e-4, training.done)
    restore_pieces(resumed.shard.entries, tensors, sidecar, resumed.shard.limit, resumed.shard.recovery)
    resumed.reads = list(training.reads)
    resumed.chance.set_state(training.chance.get_state())
    assert 1 < training.train(60) == resumed.train(60)
    for one, other in zip(training.read()[0], resumed.read()[0], strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_without_it_begins_anew() -> None:
    training = Training("sgd", 1e-3)
    training.train(WAIT * GROUPS + 30)
    tensors, sidecar = keep_pieces(training.shard.entries, 7)
    resumed = Training("sgd", 1e-3)
    restore_pieces(resumed.shard.entries, tensors, sidecar, None, resumed.shard.recovery)
    assert resumed.train(WAIT * GROUPS) == 1.0


@pytest.mark.parametrize("wrong", [None, {}, {"versions": [3], "rows": b"1234"}, {"versions": [2, 1], "rows": bytes(40)}])
def test_a_checkpoint_of_something_else_is_refused(wrong: Any) -> None:
    training = Training("sgd", 1e-3)
    recovery = training.shard.recovery
    assert recovery is not None
    state: Any = recovery.state()
    with pytest.raises(CheckpointError, match="paths"):
        recovery.load({**state, "paths": {**state["paths"], "1": wrong}})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_a_path_is_known_as_long_as_it_is_of_use(dtype: torch.dtype) -> None:
    path = PiecePath(3 * ELEMENTS, ELEMENTS, 2, is_complex=dtype.is_complex)
    values = torch.zeros(3 * ELEMENTS, dtype=dtype)
    for version in range(1, 20):
        path.begin(values)
        values = values + 1
        path.moved(values, version)
    gradient = torch.full_like(values, -2)
    found = path.beside(gradient, 19)
    assert found is not None
    assert found.along == pytest.approx((found.gradient * found.path) ** 0.5, rel=1e-5)
    assert path.beside(gradient, 19 - REMEMBERED * 2) is not None
    assert path.beside(gradient, 18 - REMEMBERED * 2) is None
    assert path.beside(gradient, 20) is None
