"""A task's callbacks: what they are told on every worker, and what an error in one does."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.embed.world import run_sessions
from tests.train.world import Recipe, data_of, network_of, run, topology_of
from zmqtrain.embed.session import Session
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.train.callback import Callback, StepDone
from zmqtrain.train.task import Task


class Heard(Callback):
    def __init__(self) -> None:
        self.steps: list[StepDone] = []
        self.said: list[str] = []
        self.threads: set[threading.Thread] = set()

    def on_step(self, done: StepDone) -> None:
        self.steps.append(done)
        self.threads.add(threading.current_thread())

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self.said.append(f"eval {step} {sorted(metrics)}")

    def on_checkpoint(self, step: int) -> None:
        self.said.append(f"checkpoint {step}")

    def on_view(self, step: int, workers: Sequence[str]) -> None:
        self.said.append(f"view {step} {' '.join(workers)}")


async def test_every_worker_hears_of_its_steps_evaluations_and_checkpoints(tmp_path: Path) -> None:
    heard = {f"worker/{rank}": Heard() for rank in range(2)}
    recipe = Recipe(torch.float32, schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    topology = topology_of(
        job={"steps": 4, "eval_every": 2, "checkpoint_every": 2}, compute={"groups": 1, "group_size": 2, "batch_size": 8}
    )
    result = await run(topology, lambda peer: replace(recipe(peer), callbacks=[heard[peer]]), folder=tmp_path)
    assert not result.errors
    assert sorted(each.steps[0].rank for each in heard.values()) == [0, 1]
    metrics = "['eval_accuracy', 'eval_loss']"
    for peer, each in heard.items():
        assert [done.step for done in each.steps] == [0, 1, 2, 3]
        rates = [done.lr for done in each.steps]
        assert rates == [rates[0] * 0.5**step for step in range(4)], "the rate with which each step was done"
        assert each.said[0] == "view 0 worker/0 worker/1"
        assert [said for said in each.said if said.startswith("eval")] == [f"eval {step} {metrics}" for step in (2, 4)]
        assert threading.current_thread() not in each.threads, "a slow callback must not hold up the event loop"
        assert [said for said in each.said if said.startswith("checkpoint")] == ["checkpoint 2", "checkpoint 4"]
        events = result.recorders[peer].of("step")
        assert [{"kind": "step", "step": done.step, **done.values} for done in each.steps] == events


async def test_what_a_callback_raises_ends_the_run_as_an_error_of_the_task() -> None:
    class Bad(Callback):
        def on_step(self, done: StepDone) -> None:
            if done.step == 1:
                raise ZeroDivisionError("no such figure")

    recipe = Recipe(torch.float32)
    topology = topology_of(job={"steps": 4}, compute={"groups": 1, "group_size": 1, "batch_size": 8})
    result = await run(topology, lambda peer: replace(recipe(peer), callbacks=[Bad()]))
    (error,) = [error for error in result.errors.values() if isinstance(error, TaskError)]
    assert str(error) == "Bad.on_step() raised ZeroDivisionError: no such figure"


def test_other_objects_are_refused() -> None:
    with pytest.raises(TaskError, match=r"Task.callbacks has a function: each must be an object of a zmqtrain.Callback class"):
        Task(
            model=lambda: nn.Linear(1, 1),
            loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            train_data=[0],
            callbacks=[lambda done: None],  # type: ignore[list-item]
        )


async def test_a_callback_that_changes_parameters_is_refused() -> None:
    recipe = Recipe()

    class Clamps(Callback):
        def __init__(self, peer: str) -> None:
            self.peer = peer

        def on_step(self, done: StepDone) -> None:
            with torch.no_grad():
                for parameter in recipe.models[self.peer].parameters():
                    parameter.clamp_(-0.1, 0.1)

    topology = topology_of(job={"steps": 3}, compute={"groups": 1, "group_size": 2, "batch_size": 8})
    result = await run(topology, lambda peer: replace(recipe(peer), callbacks=[Clamps(peer)]))
    assert any(
        isinstance(error, TaskError) and "a callback has changed '0.weight'" in str(error) for error in result.errors.values()
    )


class Ema(Callback):
    def __init__(self) -> None:
        self.average: AveragedModel | None = None
        self.steps: list[int] = []

    def on_parameters(self, step: int, model: nn.Module) -> None:
        self.steps.append(step)
        if self.average is None:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.average.update_parameters(model)


def always_the_same() -> nn.Module:
    """Without torch's generator, which the threads share."""
    model, generator = network_of(), torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return model


def averaged_in_one_process(steps: int, batch: int) -> AveragedModel:
    model = always_the_same()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    ema = Ema()
    ema.on_parameters(0, model)
    inputs, target = data_of().tensors
    for step in range(steps):
        rows = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), target[rows]).backward()
        optimizer.step()
        ema.on_parameters(step + 1, model)
    assert ema.average is not None
    return ema.average


@pytest.mark.parametrize(
    "exchange",
    [
        {"kind": "allreduce"},
        {"kind": "model_server", "staleness": "sync", "shards": 2},
        {"kind": "model_server", "staleness": "async"},
        {"kind": "gossip"},
        {"kind": "averaging"},
    ],
    ids=lambda exchange: str(exchange.get("staleness", exchange["kind"])),
)
async def test_an_average_of_the_weights_is_that_of_one_process(exchange: dict[str, Any]) -> None:
    """Of one group, if its model is its own."""
    in_step = exchange["kind"] == "allreduce" or exchange.get("staleness") == "sync"
    averages = {f"worker/{rank}": Ema() for rank in range(4 if in_step else 2)}
    compute = {"groups": 2 if in_step else 1, "group_size": 2, "batch_size": 8}
    topology = topology_of(job={"steps": 4}, compute=compute, exchange=exchange, data={"shuffle": "none"})
    recipe = Recipe(model=always_the_same)
    result = await run(topology, lambda peer: replace(recipe(peer), callbacks=[averages[peer]]))
    assert not result.errors
    expected = dict(averaged_in_one_process(4, 16 if in_step else 8).module.state_dict())
    for each in averages.values():
        assert each.steps == [0, 1, 2, 3, 4]
        assert each.average is not None
        for name, tensor in each.average.module.state_dict().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-11, atol=1e-12)


async def test_parameters_are_not_given_to_callbacks_where_a_worker_has_parts_of_them() -> None:
    topology = topology_of(job={"steps": 2}, compute={"groups": 1, "group_size": 2, "batch_size": 8, "grid": "2x1"})
    recipe = Recipe()
    result = await run(topology, lambda peer: replace(recipe(peer), callbacks=[Ema()]))
    assert any(isinstance(error, UsageError) and "on_parameters() gets the whole" in str(error) for error in result.errors.values())


def test_a_session_gives_no_parameters_to_callbacks() -> None:
    def program(session: Session) -> None:
        model = nn.Linear(6, 3)
        session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[Ema()])

    with pytest.raises(UsageError, match="your loop has the model itself"):
        run_sessions(topology_of(), program)
