"""Sessions of an elastic run (gossip among groups of one worker) in which a worker is lost, and comes back.

All groups have the same samples in each step, so all models are that of one process, whoever is there: a worker that took up the
wrong step or other weights, or a mean that counts one who is gone, would be seen by it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.embed.world import topology_of
from zmqtrain.data.background import BackgroundThread
from zmqtrain.embed.core import Core
from zmqtrain.embed.own_run import OwnRun, open_run
from zmqtrain.embed.session import Session
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.net.memory import MemoryNetwork

LR = 0.02
#: No test makes so many steps, unless the worker that it waits for does not come.
TOO_MANY = 5000


class KilledError(Exception):
    """The worker's process ends here."""


class Line(nn.Module):
    """Its gradient depends on the weights, so one step cannot stand for another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(15, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight + self.bias


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(4, 15, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1)).square().mean().backward()
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def one_process(steps: int) -> Tensor:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        train_step(model, optimizer, step)
    return flat(model)


class Life:
    """One process of a worker: what it has done."""

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number  # of the process, among those of this worker
        self.model = Line()
        self.first = self.ended = -1
        self.sums: dict[int, float] = {}
        """Of the ranks of all who were there, and as many hundreds as there were, after each step."""

    def train(self, session: Session, overlap: bool | None, goes_on: Callable[[int], bool]) -> None:
        """Until ``goes_on(step)`` says no on one of the workers."""
        with torch.no_grad():  # whoever comes late must take the others' weights
            for parameter in self.model.parameters():
                parameter.add_(float(self.number))
        _, optimizer = session.replicate(self.model, torch.optim.SGD(self.model.parameters(), lr=LR), overlap=overlap)
        self.first = session.step
        more = True
        while more:
            step = session.step
            assert step < TOO_MANY
            train_step(self.model, optimizer, step)
            told = torch.tensor([100.0 + self.rank, float(not goes_on(session.step))], dtype=torch.float64)
            share = session.all_reduce(told.clone(), "mean")
            session.all_reduce(told)
            assert share[0] == told[0] / (told[0] // 100), "the mean is of those who are summed"
            self.sums[step], more = float(told[0]), not told[1]
        session.barrier()
        self.ended = session.step


async def elastic_run(folder: Path, program: Callable[[Session, Life], None], *, restarts: int = 0, workers: int = 3) -> list[Life]:
    """The processes of all workers. One whose program raises `KilledError` is lost, and started again so many times."""
    topology = topology_of(
        job={"timeout": 20.0, "restarts": restarts},
        compute={"groups": workers, "group_size": 1, "batch_size": 4, "bucket_size": 64},
        exchange={"kind": "gossip"},
    )
    network, lives = MemoryNetwork(), list[Life]()
    run: OwnRun

    async def process(rank: int, number: int) -> None:
        life, peer = Life(rank, number), f"worker/{rank}"
        lives.append(life)
        try:
            async with run.context(peer) as context:
                core, thread = Core(context), BackgroundThread(peer)
                try:
                    await thread.submit(lambda: program(Session(core), life))
                    await thread.submit(lambda: core.bridge.call(core.guard(core.finish()), "the end"))
                except KilledError:
                    if number == restarts:  # nobody comes in its place; else that one says that this one is gone
                        await context.membership.fail({"message": "killed", "exit_code": 137})
                    raise
                finally:
                    await core.close(thread)
        except KilledError:
            if number < restarts:
                await process(rank, number + 1)

    async with open_run(topology, network=network, checkpoints=folder / "checkpoints") as run, asyncio.TaskGroup() as tasks:
        for rank in range(workers):
            tasks.create_task(process(rank, 0))
    return lives


@pytest.mark.parametrize("overlap", [None, True, False])
@pytest.mark.parametrize("lost", [0, 1])
async def test_the_others_go_on_without_a_lost_worker(lost: int, overlap: bool | None, tmp_path: Path) -> None:
    def program(session: Session, life: Life) -> None:
        def goes_on(step: int) -> bool:
            if life.rank == lost and step == 4:
                raise KilledError
            return step < 9

        life.train(session, overlap, goes_on)

    lives = await elastic_run(tmp_path, program)
    gone = 100.0 + lost
    left = load_file(tmp_path / "model.safetensors")
    for life in lives:
        if life.rank != lost:
            assert life.ended == 9
            assert [life.sums[step] for step in (0, 2)] == [303.0, 303.0]
            assert [life.sums[step] for step in range(3, 9)] == [303.0 - gone] * 6, "killed before it has told of step 3"
            torch.testing.assert_close(flat(life.model), one_process(9), rtol=1e-12, atol=1e-13)
            assert all(torch.equal(left[name], tensor) for name, tensor in life.model.state_dict().items())
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["step"] == 9


@pytest.mark.parametrize("overlap", [None, True, False])
@pytest.mark.parametrize("lost", [0, 1])
async def test_a_restarted_worker_goes_on_where_the_others_are(lost: int, overlap: bool | None, tmp_path: Path) -> None:
    def program(session: Session, life: Life) -> None:
        def goes_on(step: int) -> bool:
            if life.rank == lost and not life.number and step == 4:
                raise KilledError
            return life.rank != lost or step < life.first + 5  # the others train for as long as it takes

        life.train(session, overlap, goes_on)

    lives = await elastic_run(tmp_path, program, restarts=1)
    (back,) = (life for life in lives if life.number)
    others = [life for life in lives if life.rank != lost]
    assert back.first > 3
    assert {life.ended for life in (back, *others)} == {back.first + 5}
    for life in (back, *others):
        torch.testing.assert_close(flat(life.model), one_process(life.ended), rtol=1e-12, atol=1e-13)
        assert [life.sums[step] for step in range(back.first, life.ended)] == [303.0] * 5
    for life in others:
        assert life.sums == {step: 303.0 if step < 3 or step >= back.first else 203.0 - lost for step in range(life.ended)}


async def test_a_restarted_worker_is_told_what_it_must_leave_out(tmp_path: Path) -> None:
    """Nothing that only fits the beginning of a run is done by it in silence."""
    data = TensorDataset(torch.arange(48.0), torch.arange(48))
    taken: dict[int, list[Any]] = {}

    def program(session: Session, life: Life) -> None:
        if life.number:
            with pytest.raises(UsageError, match="on such a worker, skip calls that all workers make together before the loop"):
                session.barrier()
        else:
            session.barrier()
            taken[life.rank] = [batch[1].tolist() for batch in session.batches(data, 1)]

        def goes_on(step: int) -> bool:
            if life.rank == 1 and not life.number and step == 2:
                raise KilledError
            if life.number and step == life.first + 1:
                with pytest.raises(UsageError, match=r"the others are already at step \d+.*first="):
                    next(session.batches(data, 1))
                assert [batch[1].tolist() for batch in session.batches(data, 1, first=3)] == taken[1][3:]
            return life.rank != 1 or step < life.first + 2

        life.train(session, None, goes_on)

    await elastic_run(tmp_path, program, restarts=1)
    assert len(taken[1]) == 4


async def test_the_run_ends_with_the_last_worker(tmp_path: Path) -> None:
    def program(session: Session, life: Life) -> None:
        def goes_on(step: int) -> bool:
            if step == 2 + life.rank:
                raise KilledError
            return True

        life.train(session, None, goes_on)

    with pytest.raises(TaskError, match="killed"):
        await elastic_run(tmp_path, program, workers=2)
