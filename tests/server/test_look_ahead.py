"""What servers store and send by which piece the delay, through checkpoints too; and old gradients do no harm then."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.look_ahead import steps_ahead
from zmqtrain.exchange.momentum import Compensation
from zmqtrain.exchange.optimizer import describe_optimizer
from zmqtrain.exchange.pieces import Piece
from zmqtrain.server.shard import TensorEntry

MAKE: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
}


def piece_of(spec: OptimizerSpec, horizon: float, *, dtype: str = "float64", size: int = 5, rise: float = 0.0) -> TensorEntry:
    entry = TensorEntry(Piece(0, 0, 0, size, 0, 0), dtype, 0, spec, horizon=horizon, rises=(rise,))
    generator = torch.Generator().manual_seed(3)
    entry.load({"values": torch.randn(size, dtype=entry.values.dtype, generator=generator)}, 0)
    return entry


def spec_of(name: str) -> OptimizerSpec:
    return describe_optimizer(MAKE[name]([torch.nn.Parameter(torch.zeros(5))]))


def gradients(count: int, size: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(size, dtype=torch.float64, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("name", MAKE)
def test_the_values_are_ahead_by_so_many_of_the_newest_step(name: str) -> None:
    """p(t) = w(t) + P D(t), where the optimizer steps from the values that were ahead."""
    spec, horizon = spec_of(name), 5.0
    entry = piece_of(spec, horizon)
    values = torch.nn.Parameter(entry.values.detach().clone())
    optimizer = MAKE[name]([values])
    mean = name not in ("sgd", "nesterov", "rmsprop")
    base = values.detach().clone()
    for number, gradient in enumerate(gradients(6)):
        entry.update(gradient)
        before = values.detach().clone()
        values.grad = gradient.clone()
        optimizer.step()
        step = values.detach() - before
        base += step
        far = steps_ahead(0.9, horizon) * ((1 - 0.9 ** (number + 1)) if mean else 1)
        with torch.no_grad():
            values.copy_(base + far * step)
        torch.testing.assert_close(entry.values.detach(), values.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MAKE)
def test_the_rate_rises_on_top_of_the_schedule_s(name: str) -> None:
    """While it rises and afterwards, whether the schedule changes the rate or not."""
    entry = piece_of(spec_of(name), 0.0, rise=4.5)
    values = torch.nn.Parameter(entry.values.detach().clone())
    optimizer = MAKE[name]([values])
    for number, gradient in enumerate(gradients(9)):
        scheduled = 0.1 if number < 2 else 0.05 if number < 7 else 0.02
        entry.update(gradient, None if number < 2 else {"lr": scheduled})
        values.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = scheduled * (1 if number > 3 else math.sqrt((number + 1) / 4.5))
        optimizer.step()
        torch.testing.assert_close(entry.values.detach(), values.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_without_staleness_not_a_bit_is_different(name: str) -> None:
    entry = piece_of(spec_of(name), 0.0, dtype="float32")
    values = torch.nn.Parameter(entry.values.detach().clone())
    optimizer = MAKE[name]([values])
    for gradient in gradients(6):
        entry.update(gradient.float())
        values.grad = gradient.float()
        optimizer.step()
    assert torch.equal(entry.values, values)
    assert "ahead" not in entry.tensors()


def test_without_momentum_not_a_bit_is_different() -> None:
    spec = describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(5))], lr=0.1))
    entry, plain = piece_of(spec, 5.0), piece_of(spec, 0.0)
    for gradient in gradients(6):
        entry.update(gradient)
        plain.update(gradient)
    assert torch.equal(entry.values, plain.values)
    assert "ahead" not in entry.tensors()


@pytest.mark.parametrize("name", MAKE)
def test_a_checkpoint_keeps_it(name: str) -> None:
    """Kept after any update and put back, it goes on with the same bits; a rate that rises goes on rising."""
    whole = piece_of(spec_of(name), 5.0, rise=6.0)
    kept = []
    for gradient in gradients(8):
        whole.update(gradient)
        kept.append(whole.tensors())
    for done in (1, 3, 7):
        resumed = piece_of(spec_of(name), 5.0, rise=6.0)
        resumed.load(kept[done - 1], done)
        for gradient in gradients(8)[done:]:
            resumed.update(gradient)
        assert torch.equal(resumed.values, whole.values)


def test_resumed_without_it_the_values_are_where_the_steps_lead() -> None:
    """Synchronous from then on, for instance."""
    entry, base = piece_of(spec_of("sgd"), 5.0), None
    for gradient in gradients(4):
        entry.update(gradient)
    kept = entry.tensors()
    base = kept["values"] - kept["ahead"]
    off = piece_of(spec_of("sgd"), 0.0)
    off.load(kept, 4)
    off.update(torch.zeros(5, dtype=torch.float64), {"lr": 0.0})
    torch.testing.assert_close(off.values.detach(), base, rtol=1e-12, atol=1e-12)
    assert "ahead" not in off.tensors()


@pytest.mark.parametrize("wrong", [torch.zeros(4, dtype=torch.float64), torch.zeros(5), torch.zeros(1, 5, dtype=torch.float64)])
def test_a_checkpoint_of_something_else_is_refused(wrong: torch.Tensor) -> None:
    entry = piece_of(spec_of("sgd"), 5.0)
    with pytest.raises(CheckpointError, match="by which piece"):
        entry.load({**entry.tensors(), "ahead": wrong}, 1)


def taking_turns(name: str, groups: int, lr: float, *, ahead: bool) -> float:
    """How far from the optimum groups of a quadratic of curvature 1 (in one direction) and 0.01 end, in its first direction.

    They take turns: each gradient was read as many updates ago as there are others."""
    make = MAKE.get(name, lambda p: torch.optim.SGD(p, lr=0.1))
    given = describe_optimizer(make([torch.nn.Parameter(torch.zeros(2))]))
    given = OptimizerSpec(given.name, ({**given.groups[0], "lr": lr, "weight_decay": 0.0},))
    compensation = Compensation(groups - 1.0, on=True, look_ahead=ahead)
    entry = TensorEntry(Piece(0, 0, 0, 2, 0, 0), "float64", 0, compensation.of(given), horizon=compensation.horizon)
    entry.load({"values": torch.ones(2, dtype=torch.float64)}, 0)
    curvature = torch.tensor([1.0, 0.01], dtype=torch.float64)
    reads = [entry.values.detach().clone() for _ in range(groups)]
    for update in range(100 * groups):
        group = update % groups
        entry.update(curvature * reads[group])
        reads[group] = entry.values.detach().clone()
    return float(entry.values.detach().abs()[0])


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_without_momentum_they_converge_where_they_diverged(groups: int) -> None:
    """At a rate that one synchronous group trains with, up to 2: theirs is a g-th of it."""
    assert taking_turns("plain", groups, 1.3, ahead=False) > 1e3
    assert taking_turns("plain", groups, 1.3, ahead=True) < 1e-2


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_without_momentum_gradients_of_one_point_move_as_far_as_their_mean(groups: int) -> None:
    """As with a bound of 0: exactly a synchronous step, in whole numbers and powers of two."""
    given = describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(5))], lr=0.5))
    compensation = Compensation((groups - 1) / 2, on=True, look_ahead=True, groups=groups)
    entry = piece_of(compensation.of(given), compensation.horizon)
    entry.load({"values": torch.ones(5, dtype=torch.float64)}, 0)
    pushed = [gradient.mul(8).round() for gradient in gradients(groups)]
    for gradient in pushed:
        entry.update(gradient)
    assert torch.equal(entry.values.detach(), 1 - 0.5 * sum(pushed) / groups)


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_groups_that_take_turns_converge_where_they_diverged(groups: int) -> None:
    """At a rate (0.5) that one synchronous group of momentum 0.9 trains with, up to 3.8."""
    assert taking_turns("sgd", groups, 0.5, ahead=False) > 1e3
    assert taking_turns("sgd", groups, 0.5, ahead=True) < 1e-2
