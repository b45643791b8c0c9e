"""Which losses show that they are no mean over samples, and which are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.train.loss_graph import not_a_mean, watch_backward

Loss = Callable[[Tensor, Tensor], Tensor]
CLASSES = torch.tensor([0.2, 1.0, 5.0])
WEIGHT = nn.Parameter(torch.ones(6, 3))
WORN = nn.Parameter(torch.zeros(2))
BINARY = functional.binary_cross_entropy_with_logits


def scores() -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()


TARGET = torch.tensor([0, 1, 2, 2, 1, 0])
OTHERS: dict[str, tuple[Loss, str]] = {
    "class weights": (lambda s, t: functional.cross_entropy(s, t, weight=CLASSES), "class weights"),
    "class weights, smoothed": (lambda s, t: functional.cross_entropy(s, t, weight=CLASSES, label_smoothing=0.1), "class weights"),
    "targets left out": (lambda s, t: functional.cross_entropy(s, t.masked_fill(t == 1, -100)), "ignore_index"),
    "targets left out, of two": (
        lambda s, t: s.square().mean() + functional.nll_loss(s.log_softmax(1), t, ignore_index=2) / 2,
        "ignore_index",
    ),
    "in two dimensions": (
        lambda s, t: functional.cross_entropy(s.view(1, 6, 3).mT, t.masked_fill(t == 1, -100)[None]),
        "ignore_index",
    ),
    "sum": (lambda s, t: functional.cross_entropy(s, t, reduction="sum"), 'reduction="sum"'),
    "sums": (lambda s, t: BINARY(s, s.detach().sigmoid(), reduction="sum") + (-0.5 * s.square().sum()), 'reduction="sum"'),
    "root": (lambda s, t: functional.mse_loss(s, s.detach() + 1).sqrt(), "a function (sqrt) of a mean"),
    "focal, of a mean": (
        lambda s, t: (1 - (-functional.cross_entropy(s, t)).exp()) ** 2 * functional.cross_entropy(s, t),
        "product or quotient",
    ),
    "contrastive, with a learned temperature": (
        lambda s, t: functional.cross_entropy(WORN[0].exp() * (s.tanh() @ s.sin().T), torch.arange(6)),
        "compares each sample",
    ),
    "contrastive": (lambda s, t: functional.cross_entropy((s.tanh() @ s.sin().T) / 0.1, torch.arange(6)), "compares each sample"),
}
MEANS: dict[str, Loss] = {
    "mean": functional.cross_entropy,
    "smoothed": lambda s, t: functional.cross_entropy(s, t, label_smoothing=0.1),
    "scaled": lambda s, t: functional.cross_entropy(s, t) / 4 * 1024.0,
    "two losses": lambda s, t: functional.cross_entropy(s, t) + 0.5 * s.square().mean(),
    "sum over the number": lambda s, t: functional.cross_entropy(s, t, reduction="sum") / len(t),
    "mean of sums": lambda s, t: (s - 1).square().sum(1).mean(),
    "sum of means": lambda s, t: torch.stack([functional.cross_entropy(s, t), s.square().mean()]).sum(),
    "weights per sample": lambda s, t: (functional.cross_entropy(s, t, reduction="none") * torch.arange(6.0)).mean(),
    "learned weights": lambda s, t: (
        functional.cross_entropy(s, t) * (-WORN[0]).exp() + s.square().mean() / WORN[1].exp() + WORN.sum()
    ),
    "all class weights 1": lambda s, t: functional.cross_entropy(s, t, weight=torch.ones(3)),
    "positive weights": lambda s, t: BINARY(s, s.detach().sigmoid(), pos_weight=CLASSES),
    "focal, of samples": lambda s, t: ((1 - (-functional.cross_entropy(s, t, reduction="none")).exp()) ** 2).mean(),
    "probabilities": lambda s, t: functional.cross_entropy(s, s.detach().softmax(1), weight=CLASSES),
    "a norm of weights": lambda s, t: functional.cross_entropy(s, t) + WORN.square().mean().sqrt(),
    "as many classes as samples, in order": lambda s, t: functional.cross_entropy(s @ WEIGHT.T, torch.arange(6)),
    "as many classes as samples": lambda s, t: functional.cross_entropy(s @ s.T, t),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_mean_is_told_with_its_reason(name: str) -> None:
    loss, reason = OTHERS[name]
    assert reason in not_a_mean(loss(scores(), TARGET))


@pytest.mark.parametrize("name", MEANS)
def test_means_are_left_alone(name: str) -> None:
    assert not not_a_mean(MEANS[name](scores(), TARGET))


def test_as_many_targets_may_be_left_out_of_each_sample() -> None:
    tokens = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()  # samples, classes, times
    target = torch.zeros(4, 5, dtype=torch.long).index_fill(1, torch.tensor([4]), -100)  # the last one has no next one
    assert not not_a_mean(functional.cross_entropy(tokens, target), samples=4)
    assert "ignore_index" in not_a_mean(functional.cross_entropy(tokens, target))
    target[0, 0] = -100
    assert "session.backward(loss * n, n)" in not_a_mean(functional.cross_entropy(tokens, target), samples=4)
    assert "ignore_index" in not_a_mean(functional.cross_entropy(tokens, torch.full_like(target, -100)), samples=4)


def test_backward_is_torchs_own_again_once_nobody_watches() -> None:
    before, seen = torch.autograd.backward, []

    def listen(loss: Tensor, gradient: Tensor | None) -> None:
        seen.append(loss)

    first, second = watch_backward(listen), watch_backward(lambda loss, gradient: None)
    first()
    assert torch.autograd.backward is not before
    third = watch_backward(listen)
    loss = functional.cross_entropy(scores(), TARGET)
    loss.backward()
    assert len(seen) == 1
    assert seen[0] is loss
    second()
    third()
    third()
    assert torch.autograd.backward is before


def test_a_long_sum_of_terms_is_looked_at_only_in_part() -> None:
    loss = functional.cross_entropy(scores(), TARGET, reduction="sum")
    for _ in range(200):
        loss = loss + WORN.sum()
    assert not not_a_mean(loss)
