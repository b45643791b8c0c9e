"""Every second of a step belongs to one layer, or to the loss: on a clock that only layers move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zmqtrain.plan.measure.layer_times import LOSS, LayerTimes


class Hand:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, clock: Hand, forward_s: float, backward_s: float) -> Tensor:
        context.clock, context.backward_s = clock, backward_s
        clock.now += forward_s
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        context.clock.now += context.backward_s
        return gradient.clone(), None, None, None


class Slow(nn.Module):
    """A layer that takes its time."""

    def __init__(self, clock: Hand, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock, self.seconds = clock, (forward_s, backward_s)

    def forward(self, tensor: Tensor) -> Tensor:
        result: Tensor = _Move.apply(tensor * self.weight, self.clock, *self.seconds)
        return result


def moved(clock: Hand, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """A function between layers that takes its time."""
    result: Tensor = _Move.apply(tensor, clock, forward_s, backward_s)
    return result


def timed(model: nn.Module, clock: Hand, names: list[str], steps: int = 1) -> LayerTimes:
    times = LayerTimes(clock)
    with times.watching(model, names):
        for _ in range(steps):
            with times.going_forward():
                loss = moved(clock, model(torch.ones(2, 1)).sum(), 100, 200)
            with times.going_backward():
                loss.backward()  # type: ignore[no-untyped-call]
    assert not any(module._forward_hooks for module in model.modules())
    return times


def seconds(times: LayerTimes, name: str) -> tuple[float, float]:
    forward, backward = times.of(name)
    return forward.median_s, backward.median_s


def test_layers_in_a_row() -> None:
    clock = Hand()
    model = nn.Sequential(Slow(clock, 1, 2), Slow(clock, 4, 8), Slow(clock, 16, 32))
    times = timed(model, clock, ["0", "1", "2"], steps=3)
    assert [seconds(times, name) for name in ("0", "1", "2", LOSS)] == [(1, 2), (4, 8), (16, 32), (100, 200)]
    assert times.together(["0", "2"]).median_s == 1 + 2 + 16 + 32
    assert times.passes == {"0": 2, "1": 3, "2": 3}, "the input needs no gradient"


class Between(nn.Module):
    """Functions between layers, a layer that is called twice, and branches."""

    def __init__(self, clock: Hand) -> None:
        super().__init__()
        self.clock = clock
        self.first, self.twice, self.left, self.right = (Slow(clock, 10**place, 2 * 10**place) for place in range(4))

    def forward(self, tensor: Tensor) -> Tensor:
        tensor = moved(self.clock, self.first(tensor), 0.25, 0.5)  # counts with the layer behind it
        tensor = self.twice(self.twice(tensor))
        return self.left(tensor) + self.right(tensor)


def test_functions_repeated_layers_and_branches() -> None:
    clock = Hand()
    times = timed(Between(clock), clock, ["first", "twice", "left", "right"])
    assert seconds(times, "first") == (1, 2)
    assert seconds(times, "twice") == (20.25, 40.5)
    assert seconds(times, "left") == (100, 200)
    assert seconds(times, "right") == (1000, 2000)
    assert clock.now == sum(sum(seconds(times, name)) for name in ("first", "twice", "left", "right", LOSS))


def test_in_place_identical_and_frozen_layers() -> None:
    clock = Hand()
    frozen = Slow(clock, 4, 8).requires_grad_(False)
    model = nn.Sequential(frozen, Slow(clock, 1, 2), nn.ReLU(inplace=True), nn.Identity(), Slow(clock, 16, 32))
    times = timed(model, clock, [str(place) for place in range(5)])
    assert seconds(times, "0") == (4, 0), "no gradient comes here"
    assert [seconds(times, str(place)) for place in range(1, 5)] == [(1, 2), (0, 0), (0, 0), (16, 32)]
    assert "0" not in times.passes
    assert times.passes["4"] == 3


def test_warm_up_is_forgotten_and_spreads_are_between_quartiles() -> None:
    clock = Hand()
    layer = Slow(clock, 1000, 1000)
    times = LayerTimes(clock)
    with times.watching(layer, [""]):
        for turn in range(6):
            if turn == 1:
                times.drop()
            with times.going_forward():
                loss = layer(torch.ones(1)).sum()
            with times.going_backward():
                loss.backward()
            layer.seconds = (float(turn + 1), 0.0)
    forward, _ = times.of("")
    assert (forward.median_s, forward.spread_s) == (3, 1)
    assert times.of("no such layer")[0].median_s == 0


@pytest.mark.parametrize("nested", [True, False])
def test_a_layer_with_layers_inside_has_what_they_leave(nested: bool) -> None:
    clock = Hand()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.ones(1))
            self.inner = Slow(clock, 4, 8)

        def forward(self, tensor: Tensor) -> Tensor:
            return moved(clock, self.inner(tensor + self.position), 1, 2)

    times = timed(Outer(), clock, ["", "inner"] if nested else ["inner"])
    assert seconds(times, "inner") == (4, 8)
    assert seconds(times, "") == ((1, 2) if nested else (0, 0))
    assert seconds(times, LOSS) == ((100, 200) if nested else (101, 202))
