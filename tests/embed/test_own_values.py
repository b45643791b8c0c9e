"""What a loop has beside the replicated model: buffers, other optimizers, and an optimizer's own noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.embed.world import run_sessions, topology_of
from tests.pairwise import pairwise
from zmqtrain.embed.gradients import GoneGradient
from zmqtrain.embed.session import Session
from zmqtrain.errors import TaskError

PAIR = topology_of(compute={"groups": 1, "group_size": 2})


def batch(session: Session, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + session.rank)
    return torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)


def trained(session: Session, model: nn.Module, optimizer: Any, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> Tensor:
    model, optimizer = session.replicate(model, optimizer)
    for step in range(5):
        inputs, target = batch(session, step)
        optimizer.zero_grad()
        loss(model(inputs), target).backward()
        optimizer.step()
    session.settle()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


class Quantized(nn.Module):
    """Keeps the largest input so far, as observers do, or what all workers have."""

    def __init__(self, *, of_samples: bool) -> None:
        super().__init__()
        self.layer, self.of_samples = nn.Linear(6, 3), of_samples
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.largest.add_((inputs if self.of_samples else self.layer.weight).abs().max())
        result: Tensor = self.layer(inputs)
        return result


@pytest.mark.parametrize("of_samples", [True, False])
def test_buffers_that_workers_have_differently_are_warned_of(of_samples: bool) -> None:
    def program(session: Session) -> Tensor:
        model = Quantized(of_samples=of_samples)
        return trained(session, model, torch.optim.SGD(model.parameters(), lr=0.1))

    warnings: list[str] = []
    run_sessions(PAIR, program, warnings)
    assert ["buffer 'largest'" in text for text in warnings] == [True] * of_samples


class Noisy(torch.optim.SGD):
    """Draws noise for the weights."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def test_workers_draw_the_same_in_their_optimizers() -> None:
    def program(session: Session) -> Tensor:
        model = nn.Linear(6, 3)
        return trained(session, model, Noisy(model.parameters(), lr=0.1))

    first, second = run_sessions(PAIR, program)
    assert torch.equal(first, second)


def test_other_optimizers_may_train_the_same_everywhere_or_something_of_one_batch() -> None:
    def program(session: Session) -> Tensor:
        model, scale = nn.Linear(6, 3), nn.Parameter(torch.ones(()))
        everywhere = torch.optim.SGD([scale], lr=0.1)

        def loss(output: Tensor, target: Tensor) -> Tensor:
            shift = torch.zeros_like(output, requires_grad=True)
            of_this_batch = torch.optim.SGD([shift], lr=0.1)
            cross_entropy(output.detach() + shift, target).backward()
            of_this_batch.step()
            everywhere.zero_grad()
            (scale - 0.5).square().backward()
            everywhere.step()
            return cross_entropy(output + shift.detach(), target)

        return trained(session, model, torch.optim.SGD(model.parameters(), lr=0.1), loss)

    run_sessions(PAIR, program)


@pairwise({"overlap": [None, False, True], "replaced": [1, 3], "kind": ["allreduce", "gossip"]})
def test_an_optimizer_that_was_not_replicated_makes_no_steps(overlap: bool | None, replaced: int, kind: str) -> None:
    """It would not be noticed that groups stop to average, in gossip."""

    def program(session: Session) -> None:
        model = nn.Linear(6, 3)
        model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), overlap=overlap)
        for step in range(5):
            if step == replaced:
                optimizer = torch.optim.AdamW(model.parameters())  # type: ignore[assignment]
            inputs, target = batch(session, step)
            optimizer.zero_grad()
            cross_entropy(model(inputs), target).backward()
            optimizer.step()

    topology = topology_of(compute={"groups": 2, "group_size": 2}, exchange={"kind": kind})
    with pytest.raises(TaskError, match=r"given to session\.replicate\(\).*optimizer\.param_groups"):
        run_sessions(topology, program)


def test_an_optimizer_around_the_replicated_one_may_make_steps() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step()

    def program(session: Session) -> int:
        model = nn.Linear(6, 3)
        model, inner = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        optimizer = Around(inner)
        for step in range(4):
            inputs, target = batch(session, step)
            optimizer.zero_grad()
            cross_entropy(model(inputs), target).backward()
            optimizer.step()
        return session.step

    assert run_sessions(PAIR, program) == [4, 4]


@pytest.mark.parametrize("steps", [3, 12])
def test_a_loop_without_steps_of_an_optimizer_is_refused(steps: int) -> None:
    made: list[int] = []

    def program(session: Session) -> None:
        model = nn.Linear(6, 3)
        session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(steps):
            inputs, target = batch(session, step)
            model.zero_grad()
            cross_entropy(model(inputs), target).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
            made.append(step)

    with pytest.raises(TaskError, match=r"never calls optimizer\.step\(\)"):
        run_sessions(PAIR, program)
    assert max(made) < 8


def test_a_gradient_that_is_gone_stays_when_the_model_is_laid_out_anew() -> None:
    """``model.to(memory_format=torch.channels_last)`` in mid-training."""
    layer = nn.Conv2d(1, 2, 2)
    gone = GoneGradient(layer.weight)
    layer.weight.grad = gone
    layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert layer.weight.grad is gone


@pytest.mark.parametrize("exchange", ["allreduce", "gossip", "averaging"])
def test_weights_that_differ_after_the_last_step_are_refused(exchange: str) -> None:
    """As if each worker had restored the best ones by its own loss; the run's model would be the first worker's, or a mixture."""

    def program(session: Session) -> None:
        model = nn.Linear(6, 3)
        trained(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
        if session.rank == 1:
            model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})

    groups = 1 if exchange == "allreduce" else 2
    with pytest.raises(TaskError, match="the workers' weights differ, because they were changed on some workers only"):
        run_sessions(topology_of(compute={"groups": groups, "group_size": 2}, exchange={"kind": exchange}), program)


def test_weights_that_training_has_made_nan_were_not_changed_by_hand() -> None:
    """With model servers too, such a loop goes on as in one process."""

    def program(session: Session) -> Tensor:
        model = nn.Linear(6, 3)
        return trained(session, model, torch.optim.SGD(model.parameters(), lr=0.1), lambda s, t: cross_entropy(s, t) * float("nan"))

    servers = {"kind": "model_server", "staleness": "sync"}
    for weights in run_sessions(topology_of(compute={"groups": 1, "group_size": 2}, exchange=servers), program):
        assert weights.isnan().all()


def test_a_model_of_another_type_than_at_replicate_is_refused() -> None:
    def program(session: Session) -> None:
        model = nn.Linear(6, 3)
        model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, target = batch(session, 0)
        cross_entropy(model.bfloat16()(inputs.bfloat16()), target).backward()
        optimizer.step()

    with pytest.raises(TaskError, match=r"is torch.bfloat16 now, but was torch.float32 at session.replicate\(\)"):
        run_sessions(PAIR, program)
