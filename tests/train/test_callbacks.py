"""A task's callbacks: what they are told on every worker, and what an error in one does."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.world import Recipe, run, topology_of
from zmqtrain.errors import TaskError
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
    assert str(error) == "Callback.on_step() raised ZeroDivisionError: no such figure"


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
