"""Losses that are no mean over a worker's samples, which only values tell: refused in a session, and means left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.embed.world import run_sessions, topology_of
from zmqtrain.embed.session import Session
from zmqtrain.errors import TaskError
from zmqtrain.train.loss_graph import not_a_mean
from zmqtrain.train.loss_trial import Constants, Trials, constants_of, couples, rows_of

Loss = Callable[[Tensor, Tensor], Tensor]
PAIR = topology_of(compute={"groups": 1, "group_size": 2})
WEIGHT = nn.Parameter(torch.full((6, 3), 0.5))
entropy = functional.cross_entropy


def each(scores: Tensor, target: Tensor) -> Tensor:
    return entropy(scores, target, reduction="none")


def same(target: Tensor) -> Tensor:
    return target[:, None] == target[None]


def supervised_contrastive(scores: Tensor, target: Tensor) -> Tensor:
    places = functional.normalize(scores, dim=1)
    alike = places @ places.T
    own = torch.eye(len(target), dtype=torch.bool)
    positive = (same(target) & ~own).to(scores.dtype)
    logs = alike - torch.logsumexp(alike.masked_fill(own, -1e9), 1, keepdim=True)
    return -((positive * logs).sum(1) / positive.sum(1).clamp(min=1)).mean()


def mined_triplets(scores: Tensor, target: Tensor) -> Tensor:
    distances = torch.cdist(scores, scores)
    furthest = (distances * same(target)).max(1).values
    return functional.relu(furthest - (distances + 1e3 * same(target)).min(1).values + 1).mean()


def balance(scores: Tensor, target: Tensor) -> Tensor:
    shares = scores.softmax(1)
    load = functional.one_hot(shares.argmax(1), 3).to(scores.dtype).mean(0)
    return entropy(scores, target) + 0.1 * (shares.mean(0) * load).sum()


def balance_of_layers(scores: Tensor, target: Tensor) -> Tensor:
    """As transformers computes it."""
    layers = [scores.softmax(1), (2 * scores).softmax(1)]
    load = functional.one_hot(scores.argmax(1), 3).to(scores.dtype).mean(0)
    chosen = sum(each.sum(0) for each in layers) / torch.tensor(2.0 * len(scores))
    return entropy(scores, target) + 0.1 * (chosen.unsqueeze(0) * load).sum() * 3


#: Each sample's gradient depends on the others.
COUPLED: dict[str, Loss] = {
    "supervised contrastive": supervised_contrastive,
    "triplets that are mined in the batch": mined_triplets,
    "redundancy of features": lambda s, t: (s.T @ s / len(s) - torch.eye(3)).square().sum(),
    "entropy of the mean": lambda s, t: entropy(s, t) + (s.softmax(1).mean(0) * s.softmax(1).mean(0).log()).sum(),
    "root of a mean": lambda s, t: (s[:, 0] - t).square().mean().sqrt(),
    "log of a sum of exponentials": lambda s, t: each(s, t).logsumexp(0),
}
#: Each worker divides or multiplies by something of its own samples.
OWN_CONSTANTS: dict[str, Loss] = {
    "mean of some": lambda s, t: each(s, t)[t > 0].mean(),
    "mean loss of some": lambda s, t: entropy(s[t > 0], t[t > 0]),
    "divided by their number": lambda s, t: (each(s, t) * (t > 0)).sum() / (t > 0).sum(),
    "weights with a sum of 1": lambda s, t: (each(s, t) * (t + 1.0) / (t + 1.0).sum()).sum(),
    "positive weights of the batch": lambda s, t: functional.binary_cross_entropy_with_logits(
        s[:, 0], (t == 0).to(s.dtype), pos_weight=(t != 0).sum() / (t == 0).sum().clamp(min=1)
    ),
    "load of experts": balance,
    "load of experts, of several layers": balance_of_layers,
}
PICKED: dict[str, Loss] = {
    "hardest": lambda s, t: each(s, t).topk(2).values.mean(),
    "largest": lambda s, t: each(s, t).max(),
    "median": lambda s, t: each(s, t).median(),
}
MEANS: dict[str, Loss] = {
    "mean": entropy,
    "smoothed": lambda s, t: entropy(s, t, label_smoothing=0.1),
    "of norms": lambda s, t: s.norm(dim=1).mean(),
    "hinge": lambda s, t: functional.multi_margin_loss(s, t),
    "hardest class": lambda s, t: (s.max(1).values - s.gather(1, t[:, None])[:, 0]).clamp(min=0).mean(),
    "of sums over classes": lambda s, t: (s - 1).square().sum() / len(s),
    "mean over samples, then over classes": lambda s, t: s.square().mean(0).mean(),
    "mean of losses": lambda s, t: torch.stack([entropy(s, t), s.square().mean(), s.abs().mean(), s.mean()]).mean(),
    "mean over classes of a mean": lambda s, t: (torch.cat([s] * 4, 1).mean(0) * 2 - 1).mean(),
    "centered": lambda s, t: (s - s.detach().mean(0)).square().mean(),
    "penalty of weights": lambda s, t: entropy(s, t) + 0.1 * WEIGHT.square().mean() + WEIGHT.abs().max() + WEIGHT.norm(),
    "scaled by a mean of each sample": lambda s, t: (s.mean(1) * (t + 1.0)).mean(),
}


def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, generator=generator).requires_grad_(), torch.randint(3, (samples,), generator=generator)


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_change_each_others_gradients_are_seen(name: str) -> None:
    scores, target = batch(6, 1)
    output = scores @ torch.eye(3)
    assert couples(COUPLED[name](output, target), [output])


def test_outputs_of_other_batches_do_not_count() -> None:
    scores, target = batch(6, 1)
    output = scores @ torch.eye(3)
    others = [torch.randn(12, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)]
    assert couples(COUPLED["redundancy of features"](output, target), [*others, output])
    assert not couples(entropy(output, target), [*others, output])


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_left_alone(name: str) -> None:
    found: set[tuple[int, float]] = set()
    for samples, seed in ((4, 1), (4, 2), (6, 3)):  # as workers with unequal shares have them
        scores, target = batch(samples, seed)
        output = scores @ torch.eye(3)
        loss = MEANS[name](output, target)
        assert not couples(loss, list(rows_of({"scores": output, "more": None}, samples)))
        assert not not_a_mean(loss)
        constants = Constants()
        constants.add(constants_of(loss, samples, read=True))
        found.add((constants.kinds, constants.value))
        loss.backward()  # the graph is still there
    assert len(found) == 1


@pytest.mark.parametrize("name", PICKED)
def test_a_choice_among_samples_is_seen(name: str) -> None:
    assert "chooses among the samples" in not_a_mean(PICKED[name](*batch(6, 1)))


def test_a_sum_by_backward_of_ones_is_seen() -> None:
    scores, target = batch(6, 1)
    losses = each(scores, target)
    assert "sum over the samples" in not_a_mean(losses, torch.ones(6))
    assert not not_a_mean(losses, torch.full((6,), 1 / 6))
    assert not not_a_mean(scores, torch.randn(6, 3))  # an activation, in a backward of two parts


def trained(loss: Loss) -> None:
    def program(session: Session) -> None:
        model = nn.Linear(6, 3).double()
        model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + session.rank)
            inputs = torch.randn(6, 6, generator=generator, dtype=torch.float64)
            target = torch.randint(3, (6,), generator=generator)
            optimizer.zero_grad()
            loss(model(inputs), target).backward()
            optimizer.step()

    run_sessions(PAIR, program)


@pytest.mark.parametrize("name", [*OWN_CONSTANTS, "supervised contrastive"])
def test_a_session_refuses_them(name: str) -> None:
    with pytest.raises(TaskError, match=r"not a mean over this worker's samples.*session\.backward"):
        trained((COUPLED | OWN_CONSTANTS)[name])


def next_tokens(left_out: Tensor) -> Callable[[Session | None], nn.Module]:
    """A program that trains on sequences of which the targets ``left_out`` do not count; ``None``: in one process."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(len(left_out), 3, 6, generator=generator, dtype=torch.float64)
    target = torch.randint(3, (len(left_out), 3), generator=generator).masked_fill(left_out, -100)
    dataset = torch.utils.data.TensorDataset(inputs, target)

    made = nn.Linear(6, 3).double()  # before the threads begin, which share torch's generator

    def program(session: Session | None) -> nn.Module:
        model = copy.deepcopy(made)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if session is not None:
            model, optimizer = session.replicate(model, optimizer)
        order = [(inputs[s : s + 4], target[s : s + 4]) for s in range(0, len(left_out), 4)]
        for some, labels in order if session is None else session.batches(dataset, 0, batch_size=4):
            optimizer.zero_grad()
            functional.cross_entropy(model(some).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
        return model

    return program


def test_a_mean_over_as_many_targets_of_each_sample_is_that_of_one_process() -> None:
    program = next_tokens(torch.tensor([[False, False, True]] * 12))
    expected = program(None)
    topology = topology_of(compute={"groups": 1, "group_size": 2}, data={"shuffle": "none"})
    for model in run_sessions(topology, program):
        assert isinstance(model, nn.Linear)
        torch.testing.assert_close(model.weight, expected.weight, atol=1e-12, rtol=0)


def test_a_worker_whose_samples_have_fewer_targets_is_noticed() -> None:
    few = torch.tensor([[False, False, True]] * 10 + [[False, True, True]] * 2)
    topology = topology_of(compute={"groups": 1, "group_size": 2}, data={"shuffle": "none"})
    with pytest.raises(TaskError, match="over how many elements it is a mean"):
        run_sessions(topology, next_tokens(few))


def test_gradients_of_own_samples_in_a_loss_are_warned_of() -> None:
    def program(session: Session) -> None:
        model = nn.Linear(6, 3)
        model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        data = torch.utils.data.TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)))
        for (inputs,) in session.batches(data, 0, batch_size=12):
            optimizer.zero_grad()
            own = dict(model.named_parameters())
            inner = model(inputs[:4]).square().mean()  # of a task
            gradients = torch.autograd.grad(inner, list(own.values()), create_graph=second)
            learned = {name: each - 0.1 * by for (name, each), by in zip(own.items(), gradients, strict=True)}
            torch.func.functional_call(model, learned, (inputs,)).square().mean().backward()
            optimizer.step()

    for second in (False, True):
        warnings: list[str] = []
        run_sessions(PAIR, program, warnings)
        assert ["create_graph" in each for each in warnings] == [True] * second


def test_a_statistic_of_all_workers_may_enter_a_loss() -> None:
    def program(session: Session) -> None:
        model = nn.Linear(6, 3)
        model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            inputs = torch.randn(6, 6, generator=torch.Generator().manual_seed(10 * step + session.rank))
            shares = model(inputs).softmax(1)
            load = session.all_reduce(functional.one_hot(shares.argmax(1), 3).float().mean(0), "mean")
            optimizer.zero_grad()
            (shares.mean(0) * load).sum().backward()
            optimizer.step()

    run_sessions(PAIR, program)


def test_what_is_trained_by_hand_beside_the_model_is_compared() -> None:
    def program(session: Session) -> None:
        model, scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))
        model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(5):
            inputs = torch.randn(6, 6, generator=torch.Generator().manual_seed(10 * step + session.rank))
            optimizer.zero_grad()
            (model(inputs) * scale).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                assert scale.grad is not None
                scale -= 0.1 * scale.grad
                scale.grad = None

    with pytest.raises(TaskError, match="parameters outside of the replicated model differ between the workers"):
        run_sessions(PAIR, program)


@pytest.mark.parametrize("scale", [1e12, 1e-12, 3e-300, 8.0])
def test_a_factor_of_any_size_may_multiply_a_loss(scale: float) -> None:
    parameter = torch.ones(8, 3, dtype=torch.float64, requires_grad=True)
    found = constants_of((parameter**2).mean() * scale, 8, read=True)
    assert len(found) == 2


BY_PIECES: dict[str, Loss] = {
    "torch's sum": lambda s, t: entropy(s, t, reduction="sum"),
    "mean of some": lambda s, t: each(s, t)[t > 0].mean(),
    "a sum by hand": lambda s, t: (s - 1).square().sum(),
    "correlations": lambda s, t: (s.T @ s / len(s) - torch.eye(3)).square().sum(),
}


@pytest.mark.parametrize("loss", BY_PIECES.values(), ids=list(BY_PIECES))
def test_losses_of_a_loop_that_never_calls_the_model_itself_are_looked_at_too(loss: Loss) -> None:
    def program(session: Session) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + session.rank)
            inputs, target = torch.randn(4, 6, generator=generator), (torch.arange(4) > session.rank).long()
            optimizer.zero_grad()
            loss(model[1](model[0](inputs)), target).backward()
            optimizer.step()

    with pytest.raises(TaskError, match="not a mean over this worker's samples"):
        run_sessions(PAIR, program)


def hidden_penalty(session: Session, penalty: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    hidden: list[Tensor] = []
    model[1].register_forward_hook(lambda module, inputs, output: hidden.append(output))
    model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + session.rank)
        inputs, target = torch.randn(4, 6, generator=generator), torch.arange(4) % 3
        optimizer.zero_grad()
        loss = entropy(model(inputs), target) + 0.01 * penalty(hidden.pop())
        loss.backward()
        optimizer.step()


def test_a_sum_of_hidden_activations_is_refused() -> None:
    run_sessions(PAIR, lambda session: hidden_penalty(session, lambda h: h.abs().sum() / len(h)))
    with pytest.raises(TaskError, match="a sum over the samples"):
        run_sessions(PAIR, lambda session: hidden_penalty(session, lambda h: h.abs().sum()))


class Codes(nn.Module):
    """An autoencoder whose decoder normalizes over the batch."""

    def __init__(self, *, earlier: bool) -> None:
        super().__init__()
        self.encoder, self.earlier = nn.Linear(6, 3), earlier
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        codes = self.encoder(inputs).tanh()
        outputs = self.decoder(codes)
        return (codes, outputs) if self.earlier else (outputs, codes)


@pytest.mark.parametrize("earlier", [True, False])
def test_a_model_that_couples_samples_between_its_outputs_is_no_loss_that_does(earlier: bool) -> None:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    both = Codes(earlier=earlier)(inputs)
    codes, outputs = both if earlier else both[::-1]
    fine = [
        functional.mse_loss(outputs, inputs),
        functional.mse_loss(outputs, inputs) + codes.square().sum() / len(codes),
        (outputs.square().mean(1) * codes.square().mean(1)).mean(),
        functional.mse_loss(outputs, inputs) + codes.exp().mean(),
    ]
    assert [couples(loss, both) for loss in fine] == [False] * len(fine)
    coupled = [
        functional.mse_loss(outputs, inputs) + 0.1 * (codes.T @ codes / len(codes) - torch.eye(3)).square().sum(),
        functional.mse_loss(outputs, inputs) + 0.1 * codes.mean(0).square().sum(),
        functional.mse_loss(outputs, inputs) + 0.1 * outputs.mean(0).square().sum(),
        (outputs.mean(0).sum() * codes.mean(0).sum()),
    ]
    assert [couples(loss, both) for loss in coupled] == [True] * len(coupled)


def test_a_loss_is_tried_at_first_and_ever_more_rarely_and_where_its_constants_are_new() -> None:
    values = torch.ones(4, requires_grad=True)

    def tried(divisors: list[int]) -> list[int]:
        trials = Trials(3)
        each = [values.sum() / torch.tensor(divisor) for divisor in divisors]
        return [number for number, loss in enumerate(each, 1) if trials.due(loss, 4, read=True)]

    assert tried([4] * 40) == [1, 2, 3, 4, 8, 16, 32]
    assert tried([4] * 20 + [3] * 10 + [4] * 5 + [7] * 5) == [1, 2, 3, 4, 8, 16, 21, 32, 36]
    assert len(tried(list(range(1, 1001)))) < 25
