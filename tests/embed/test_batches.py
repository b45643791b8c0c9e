"""Batches of a session: whose epoch they are, and by how much a worker's part of them counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from tests.embed.world import run_sessions, topology_of
from zmqtrain.embed.session import Session
from zmqtrain.errors import TaskError, UsageError

GENERATOR = torch.Generator().manual_seed(3)
DATA, OTHER = (TensorDataset(torch.randn(48, 6, generator=GENERATOR, dtype=torch.float64), torch.arange(48) % 3) for _ in range(2))
BUILDING = threading.Lock()
Program = Callable[[Session, nn.Module, torch.optim.Optimizer], Any]


def trained(program: Program, workers: int, **how: Any) -> Tensor:
    def run(session: Session) -> Tensor:
        with BUILDING:  # workers are threads here, with one random state
            torch.manual_seed(5)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        program(session, *session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.3), **how))
        return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    compute = {"groups": 1, "group_size": workers, "batch_size": 8}
    return run_sessions(topology_of(compute=compute, exchange={"kind": "allreduce"}), run)[0]


def evaluated_within(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, target in session.batches(DATA, 0, batch_size=7):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        with torch.no_grad():
            for others, _ in session.batches(OTHER, 0, batch_size=5):
                model(others)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("overlap", [None, False, True])
def test_batches_of_an_evaluation_do_not_weigh_the_gradient(overlap: bool | None) -> None:
    torch.testing.assert_close(trained(evaluated_within, 3, overlap=overlap), trained(evaluated_within, 1), rtol=1e-12, atol=1e-12)


def drawn_split(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int | None) -> None:
    """A training set that each worker draws by itself."""
    order = np.random.default_rng(session.rank if seed is None else seed).permutation(48)
    for _ in range(2):
        for inputs, target in session.batches(Subset(DATA, order[:32].tolist())):
            optimizer.zero_grad()
            cross_entropy(model(inputs), target).backward()
            optimizer.step()


def drawn_sampler(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int | None) -> None:
    order = np.random.default_rng(session.rank if seed is None else seed).permutation(48)
    for inputs, target in session.batches(DataLoader(DATA, 8, sampler=SubsetRandomSampler(order[:32].tolist()))):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@pytest.mark.parametrize("program", [drawn_split, drawn_sampler])
def test_data_that_each_worker_has_drawn_for_itself_is_refused(program: Callable[..., Any]) -> None:
    with pytest.raises(TaskError, match=r"the content of the session's data \(\d+ samples\) of worker/\d differs.*default_rng"):
        trained(partial(program, seed=None), 2)
    torch.testing.assert_close(trained(partial(program, seed=3), 2), trained(partial(program, seed=3), 1), rtol=1e-12, atol=1e-12)


def looked_at_by_one(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An evaluation is each worker's own, also before the first step."""
    with torch.no_grad():
        if session.rank == 0:
            next(session.batches(OTHER))
    one_epoch(session, model, optimizer)


def one_epoch(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, target in session.batches(DATA):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


def test_what_one_worker_evaluates_is_not_compared() -> None:
    torch.testing.assert_close(trained(looked_at_by_one, 2), trained(one_epoch, 1), rtol=1e-12, atol=1e-12)


def two_at_once(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for (inputs, target), (others, _) in zip(session.batches(DATA), session.batches(OTHER, batch_size=7), strict=False):
        optimizer.zero_grad()
        (cross_entropy(model(inputs), target) + model(others).square().mean()).backward()
        optimizer.step()


def two_in_turn(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    others = session.batches(OTHER, batch_size=7)
    for inputs, target in session.batches(DATA):
        optimizer.zero_grad()
        with session.accumulating():
            cross_entropy(model(inputs), target).backward()
        model(next(others)[0]).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("program", [two_at_once, two_in_turn])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_of_batches_that_are_divided_differently_is_refused(program: Program, overlap: bool) -> None:
    with pytest.raises(TaskError, match="divided differently"):
        trained(program, 2, overlap=overlap)
    trained(program, 1, overlap=overlap)


def test_epochs_that_are_not_numbered_are_counted() -> None:
    seen: list[list[Tensor]] = []

    def program(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def inputs(*arguments: int) -> list[Tensor]:
            return [inputs for inputs, _ in session.batches(DATA, *arguments)]

        seen.extend([inputs(), inputs(), inputs(0), inputs(1)])
        with torch.no_grad():
            evaluated = [[inputs for inputs, _ in session.batches(OTHER)] for _ in range(2)]
        assert torch.equal(torch.cat(evaluated[0]), torch.cat(evaluated[1]))

    trained(program, 1)
    first, second, zero, one = map(torch.cat, seen)
    assert torch.equal(first, zero)
    assert torch.equal(second, one)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("where", ["the event loop", "another thread"])
def test_a_loop_that_was_left_ends_in_the_thread_where_it_is_collected(where: str) -> None:
    """The garbage collector runs in any thread, and finds the generator of a loop whose exception is kept, for example."""

    def program(session: Session, *_: Any) -> None:
        left = [session.batches(DATA)]
        next(left[0])
        core, collected = session._core, threading.Event()

        def collect() -> None:
            left.clear()
            collected.set()

        if where == "the event loop":
            core.bridge.loop.call_soon_threadsafe(collect)
        else:
            threading.Thread(target=collect).start()
        assert collected.wait(60.0)
        assert len(list(session.batches(DATA))) == 6
        assert core._feeds == []

    trained(program, 2)


def test_an_epoch_of_a_stream_that_has_ended_for_good_is_an_error() -> None:
    """A loop over a generator would train one epoch, and none after it."""

    def program(session: Session) -> int:
        data, number = zip(torch.randn(20, 3), torch.randn(20), strict=True), 0
        for epoch in range(2):
            number = 0
            for _ in session.batches(data, epoch, batch_size=8):
                number += 1
            assert number == 2
        return number

    with pytest.raises(TaskError, match=r"not a single batch in this epoch: .* an iterator that has ended"):
        run_sessions(topology_of(compute={"groups": 1, "group_size": 2}), program)


def test_the_number_of_batches_is_known_before_the_first() -> None:
    """`OneCycleLR(steps_per_epoch=len(...))` and progress bars ask for it; it begins no epoch, and counts none."""
    counted: list[tuple[int, ...]] = []

    def counting(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        steps = len(session.batches(DATA, batch_size=7))
        first = session.batches(DATA, batch_size=7)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, steps_per_epoch=len(first), epochs=1)
        taken = 0
        for inputs, target in first:
            optimizer.zero_grad()
            cross_entropy(model(inputs), target).backward()
            optimizer.step()
            schedule.step()
            taken += 1
        other = session.batches(DATA, 0, batch_size=7, first=2)
        counted.append((steps, taken, len(first), len(other), len(list(other)), bool(first)))
        with pytest.raises(TypeError, match="a stream has no length"):
            len(session.batches(iter([])))
        with pytest.raises(UsageError, match="must be a whole number"):
            len(session.batches(DATA, batch_size=0))

    trained(counting, 2)
    assert counted == [(6, 6, 6, 4, 4, True)] * 2
