"""Sessions under every exchange and its settings: what is particular to sessions, and not to loops (see test_loops.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import zmqtrain
from tests.embed.loops import network
from tests.embed.world import run_sessions, topology_of
from zmqtrain.embed.session import Session
from zmqtrain.errors import TaskError, UsageError

SAMPLES = 96


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64), torch.arange(SAMPLES) % 3)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(session: Session, *, clip: float = 0.0, overlap: bool | None = None, epochs: int = 1) -> tuple[Tensor, nn.Module]:
    model, optimizer = session.replicate(*build(), overlap=overlap)
    for epoch in range(epochs):
        for inputs, target in session.batches(data(), epoch):
            optimizer.zero_grad()
            cross_entropy(model(inputs), target).backward()
            if clip:
                session.clip_grad_norm_(clip)
            optimizer.step()
    session.settle()
    return flat(model), model


IN_STEP: list[dict[str, Any]] = [
    {"kind": "allreduce"},
    {"kind": "model_server", "staleness": "sync", "shards": 2},
    {"kind": "model_server", "staleness": "sync", "snapshot": True},
]


@pytest.mark.parametrize("overlap", [None, True, False])
@pytest.mark.parametrize("exchange", IN_STEP)
def test_groups_in_step_are_one_process(exchange: dict[str, Any], overlap: bool | None) -> None:
    """Uneven parts, each sample counted alike."""
    topology = topology_of(compute={"groups": 2, "group_size": 2, "batch_size": 8, "parts": [3, 5]}, exchange=exchange)
    start = build()[0].state_dict()

    def program(session: Session) -> Tensor:
        model, optimizer = build()
        model.load_state_dict(start)
        session.replicate(model, optimizer, overlap=overlap)
        for inputs, target in session.batches(data()):
            optimizer.zero_grad()
            cross_entropy(model(inputs), target).backward()
            optimizer.step()
        session.settle()
        return flat(model)

    results = run_sessions(topology, program)
    with zmqtrain.session() as session:
        batches = list(session.batches(data(), batch_size=16))
    model, optimizer = build()
    model.load_state_dict(start)
    for inputs, target in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
    for ours in results:
        torch.testing.assert_close(ours, flat(model), rtol=1e-12, atol=1e-13)


OTHERS: list[dict[str, Any]] = [
    {"kind": "allreduce", "every": 2},
    {"kind": "model_server", "staleness": "async", "shards": 2},
    {"kind": "model_server", "staleness": {"bound": 1}},
    {"kind": "model_server", "staleness": "async", "compression": "int8"},
    {"kind": "gossip"},
    {"kind": "gossip", "gossip": {"exchange": "gradients"}},
    {"kind": "gossip", "gossip": {"topology": "ring", "rotation": False}},
    {"kind": "averaging", "every": 3},
    {"kind": "averaging", "averaging": {"method": "elastic"}, "every": 2},
    {"kind": "averaging", "averaging": {"method": "outer"}, "every": 2},
    {"kind": "model_server", "staleness": "sync", "compression": "powersgd", "compression_rank": 1},
    {"kind": "allreduce", "compression": "powersgd", "compression_rank": 1},
    {"kind": "allreduce", "compression": "sign"},
]


@pytest.mark.parametrize(
    ("exchange", "overlap"),
    [
        (OTHERS[0], None),
        (OTHERS[0], True),
        (OTHERS[4], None),
        # Each with overlap or without, by turns; asynchronous servers, gossip and averaging with both.
        *((each, bool(number % 2)) for number, each in enumerate(OTHERS[1:])),
        *((OTHERS[number], bool(number % 2)) for number in (1, 4, 7)),
    ],
    ids=str,
)
def test_every_exchange_trains(exchange: dict[str, Any], overlap: bool | None) -> None:
    """With groups that have samples of their own, and clip where they can: the loss falls, and all end with one model."""
    every = exchange["kind"] == "allreduce"
    clip = 0.0 if every or overlap else 1.0
    topology = topology_of(compute={"groups": 2, "group_size": 2, "batch_size": 8}, exchange=exchange)
    inputs, target = data().tensors
    target = (inputs[:, 0] > 0).long()

    def program(session: Session) -> tuple[float, float, nn.Module]:
        model, optimizer = session.replicate(*build(), overlap=overlap)
        before = float(cross_entropy(model(inputs), target).detach())
        for epoch in range(2):
            for some, right in session.batches(TensorDataset(inputs, target), epoch):
                optimizer.zero_grad()
                cross_entropy(model(some), right).backward()
                if clip:
                    session.clip_grad_norm_(clip)
                optimizer.step()
        session.settle()
        with torch.no_grad():
            return before, float(cross_entropy(model(inputs), target)), model

    results = run_sessions(topology, program)
    assert all(after < before for before, after, _ in results)
    models = [flat(model) for _, _, model in results]  # now that the sessions are over
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("overlap", [None, True])
def test_elastic_gossip_trains_in_sessions(overlap: bool | None) -> None:
    topology = topology_of(
        compute={"groups": 3, "group_size": 1, "batch_size": 4}, exchange={"kind": "gossip"}, job={"restarts": 1}
    )
    results = run_sessions(topology, lambda session: train(session, clip=0.0 if overlap else 0.5, overlap=overlap)[1])
    for model in results[1:]:
        torch.testing.assert_close(flat(model), flat(results[0]), rtol=1e-12, atol=1e-13)


def test_a_script_does_not_train_again_what_a_group_of_several_has_given_up() -> None:
    compute = {"groups": 2, "group_size": 2, "batch_size": 4}
    topology = topology_of(compute=compute, exchange={"kind": "averaging", "every": 2}, job={"elastic": True})
    with pytest.raises(UsageError, match=r"with groups of several workers, a script's own loop .* remove \[job\] elastic"):
        run_sessions(topology, train)


def test_settings_of_tasks_are_refused() -> None:
    for compute in ({"precision": "bfloat16"}, {"accumulate": 2}):
        with pytest.raises(UsageError, match="are for tasks"):
            run_sessions(topology_of(compute={"batch_size": 8, **compute}), lambda session: session.replicate(*build()))
    every = topology_of(compute={"groups": 2, "batch_size": 8}, exchange={"kind": "allreduce", "every": 2})
    with pytest.raises(UsageError, match="overlap=False with"):
        run_sessions(every, lambda session: session.replicate(*build(), overlap=False))


def test_weights_changed_after_the_last_step_are_not_lost_unsaid() -> None:
    def program(session: Session) -> None:
        _, model = train(session)
        with torch.no_grad():
            model[0].weight.zero_()  # type: ignore[index]

    with pytest.raises(TaskError, match="changed by hand"):
        run_sessions(topology_of(compute={"batch_size": 8}, exchange={"kind": "model_server"}), program)


async def test_clipping_in_an_event_loop() -> None:
    torch.manual_seed(0)
    model, optimizer = build()
    start = flat(model).clone()
    async with zmqtrain.join() as session:
        await session.replicate(model, optimizer)

        def step() -> float:
            inputs, target = data()[:16]
            optimizer.zero_grad()
            cross_entropy(model(inputs), target).backward()
            norm = session.clip_grad_norm_(1e-3)
            session.clip_grad_value_(1e-3)
            optimizer.step()
            return float(norm)

        assert await session.run(step) > 1e-3
    assert 0 < float((flat(model) - start).norm()) < 1.01e-4
