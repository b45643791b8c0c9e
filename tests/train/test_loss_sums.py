"""Sums over samples that a loss does not divide by their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.embed.world import run_sessions, topology_of
from zmqtrain.embed.session import Session
from zmqtrain.errors import TaskError
from zmqtrain.train.loss_sums import hidden, summed

Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHT = nn.Parameter(torch.full((6, 3), 0.5))
SAMPLES, WHOLE = 6, 24


def each(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores, target, reduction="none")


def dice(scores: Tensor, target: Tensor, smooth: float = 1.0) -> Tensor:
    shares, truth = scores.softmax(1), functional.one_hot(target, 3)
    return 1 - (2 * (shares * truth).sum() + smooth) / (shares.sum() + truth.sum() + smooth)


#: With 6 of 24 samples and 3 values of each.
SUMS: dict[str, Loss] = {
    "sum": lambda s, t: each(s, t).sum(),
    "sum, scaled": lambda s, t: 0.5 * each(s, t).sum(),
    "torch's sum, divided by all workers' samples": lambda s, t: functional.cross_entropy(s, t, reduction="sum") / WHOLE,
    "divided by all workers' samples": lambda s, t: each(s, t).sum() / WHOLE,
    "multiplied by the inverse of that": lambda s, t: each(s, t).sum() * (1 / WHOLE),
    "divided by something": lambda s, t: (s - 1).square().sum() / 1000,
    "the samples' sum for each class": lambda s, t: (s - 1).square().sum(0).mean(),
    "the same, divided by all": lambda s, t: ((s - 1).square().sum(0) / WHOLE).sum(),
    "a penalty of activations": lambda s, t: functional.cross_entropy(s, t) + 1e-3 * s.abs().sum(),
    "of one term": lambda s, t: functional.mse_loss(s, s.detach() + 1) - (s.log_softmax(1).sum() / WHOLE),
}
QUOTIENTS: dict[str, Loss] = {
    "dice": dice,
    "with cross-entropy": lambda s, t: functional.cross_entropy(s, t) + 0.5 * dice(s, t),
    "of means": lambda s, t: s.square().mean() / s.exp().mean(),
    "per class": lambda s, t: ((s.softmax(1) * s).sum(0) / (s.softmax(1).sum(0) + 1e-5)).mean(),
}
MEANS: dict[str, Loss] = {
    "mean": functional.cross_entropy,
    "sum by the number of samples": lambda s, t: each(s, t).sum() / len(s),
    "half of it": lambda s, t: (s - 1).square().sum() / (2 * len(s)),
    "by that of elements": lambda s, t: (s - 1).square().sum() * (1 / s.numel()),
    "in two divisions": lambda s, t: ((s - 1).square().sum() / 3) / len(s),
    "weighted": lambda s, t: 0.1 * (s - 1).square().sum() / len(s) + 7 * s.mean(),
    "a fixed number of each sample's": lambda s, t: (s * (torch.arange(3) < 2)).sum() / (2 * len(s)),
    "sums of each sample": lambda s, t: s.square().sum(1).mean(),
    "mean of samples, sum of classes": lambda s, t: s.square().mean(0).sum(),
    "the samples' sum for each class": lambda s, t: (s.sum(0) / len(s)).mean(),
    "torch's sum": lambda s, t: functional.cross_entropy(s, t, reduction="sum") / len(t),
    "label smoothing by hand": lambda s, t: (
        (-s.log_softmax(1)).sum(1, keepdim=True).masked_fill(t[:, None] > 9, 0).sum() / s.numel()
    ),
    "uncertainty": lambda s, t: functional.cross_entropy(s, t) * torch.exp(-WEIGHT.mean()) + WEIGHT.mean(),
    "penalty of weights": lambda s, t: functional.cross_entropy(s, t) + 0.1 * WEIGHT.square().sum() + WEIGHT.sum() / 7,
    "noisy weights": lambda s, t: functional.cross_entropy(s, t) + (WEIGHT * torch.ones(6, 3)).square().sum() / 100,
    "by a sum of weights": lambda s, t: s.square().mean() / WEIGHT.sum(),
    "relative to itself": lambda s, t: s.square().mean() / s.square().mean().detach(),
}


def reason_of(loss: Loss) -> str:
    generator = torch.Generator().manual_seed(1)
    output = torch.randn(SAMPLES, 3, generator=generator).requires_grad_() @ torch.eye(3)
    value = loss(output, torch.randint(3, (SAMPLES,), generator=generator))
    reason = summed(value, [output], {SAMPLES, WHOLE}, read=True)
    value.backward()  # the graph is still there
    return reason


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_seen(name: str) -> None:
    reason = reason_of(SUMS[name])
    assert reason.startswith("it is a sum over the samples")
    assert "this worker has 6 of 24 samples" in reason


@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_quotient_of_sums_is_seen(name: str) -> None:
    assert "quotient of two sums" in reason_of(QUOTIENTS[name])


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_left_alone(name: str) -> None:
    assert not reason_of(MEANS[name])


def test_the_number_at_fault_is_named() -> None:
    assert "that is divided by 24, and" in reason_of(SUMS["multiplied by the inverse of that"])
    assert "that is not divided by their number" in reason_of(SUMS["sum"])


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.pow(3).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return gradient * 3 * values.square() / values.numel()


def test_what_cannot_be_seen_is_noticed() -> None:
    scores = torch.ones(6, 3, requires_grad=True)
    assert hidden(Cube.apply(scores))
    assert hidden(functional.mse_loss(scores, scores.detach()) + 0.5 * Cube.apply(scores))
    assert not hidden(Cube.apply(scores).expand(6).mean())  # a mean of something
    compiled = torch.compile(lambda values: values.square().mean(), backend="aot_eager")
    assert hidden(compiled(scores))
    assert not hidden(torch.compile(nn.Linear(3, 2), backend="aot_eager")(scores).mean())


def warnings_of(loss: Callable[[Tensor, Tensor, Session], Tensor], *, uneven: bool = False) -> list[str]:
    """What two workers are warned of in five steps."""

    def program(session: Session) -> None:
        model = nn.Linear(6, 3).double()
        model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        generator = torch.Generator().manual_seed(session.rank)
        for _ in range(5):
            inputs = torch.randn(6 + session.rank * uneven, 6, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            loss(model(inputs), torch.randint(3, (len(inputs),), generator=generator), session).backward()
            optimizer.step()

    warnings: list[str] = []
    run_sessions(topology_of(compute={"groups": 1, "group_size": 2}), program, warnings)
    return warnings


def test_a_session_warns_once_of_what_it_cannot_see() -> None:
    (text,) = warnings_of(lambda s, t, session: Cube.apply(s))
    assert "cannot be seen" in text


def test_a_session_warns_once_of_factors_that_differ() -> None:
    (text,) = warnings_of(lambda s, t, session: functional.cross_entropy(s, t) * (0.5 + session.rank))
    assert "multiply their losses by different numbers" in text
    assert not warnings_of(lambda s, t, session: functional.cross_entropy(s, t) * 0.5)
    assert warnings_of(lambda s, t, session: each(s, t).sum() * (1 / len(s)), uneven=True)  # and they count alike


@pytest.mark.parametrize("divisor", ["own", "all"])
def test_a_session_refuses_to_divide_by_the_batch_of_all(divisor: str) -> None:
    dataset = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.zeros(40, dtype=torch.long))

    def program(session: Session) -> None:
        model = nn.Linear(6, 3)
        model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for inputs, target in session.batches(dataset, 0, batch_size=10):
            optimizer.zero_grad()
            total = each(model(inputs), target).sum()
            (total / 10 if divisor == "all" else total * (1 / len(inputs))).backward()
            optimizer.step()

    topology, warnings = topology_of(compute={"groups": 1, "group_size": 3}), list[str]()
    if divisor == "own":  # 4, 3 and 3 samples
        run_sessions(topology, program, warnings)
        assert not warnings
    else:
        with pytest.raises(TaskError, match=r"divided by 10, and this worker has \d of 10 samples"):
            run_sessions(topology, program)
