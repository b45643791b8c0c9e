"""Sessions: a world of one must be plain training to the bit, and misuse must say what to do."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

import zmqtrain
from tests.embed.world import run_sessions, topology_of
from zmqtrain.embed import own_run
from zmqtrain.embed.session import Session
from zmqtrain.errors import NonFiniteLossError, TaskError, UsageError
from zmqtrain.membership.environment import RoleEnvironment

DATA = TensorDataset(torch.randn(200, 6, generator=torch.Generator().manual_seed(3)), torch.arange(200) % 3)


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain_training(batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    model = network()
    optimizer = sgd(model)
    schedule = StepLR(optimizer, 2, gamma=0.5)
    for inputs, target in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        schedule.step()
    return weights(model)


def test_a_session_without_a_launcher_is_plain_training() -> None:
    model, seen = network(), []
    with zmqtrain.session() as session:
        assert (session.rank, session.world_size, session.group, session.groups, session.group_size) == (0, 1, 0, 1, 1)
        model, optimizer = session.replicate(model, sgd(model))
        schedule = StepLR(optimizer, 2, gamma=0.5)
        for epoch in range(2):
            for inputs, target in session.batches(DATA, epoch, batch_size=50):
                seen.append((inputs, target))
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), target)
                loss.backward()
                optimizer.step()
                schedule.step()
                session.report(loss=loss.item())
        assert session.step == len(seen) == 8
        assert torch.equal(session.all_reduce(torch.ones(3), "mean"), torch.ones(3))
        session.barrier()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(model), plain_training(seen), strict=True))


def test_callbacks_are_called_in_the_loops_thread_with_what_was_reported() -> None:
    class Heard(zmqtrain.Callback):
        def __init__(self) -> None:
            self.losses: list[float | None] = []
            self.said: list[str] = []

        def on_step(self, done: zmqtrain.StepDone) -> None:
            assert threading.current_thread() is threading.main_thread()
            self.losses.append(done.loss)

        def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
            self.said.append(f"{step} {dict(metrics)}")

    model, heard, losses = network(), Heard(), []
    with zmqtrain.session() as session:
        model, optimizer = session.replicate(model, sgd(model), callbacks=[heard])
        for inputs, target in session.batches(DATA, 0, batch_size=50):
            loss = cross_entropy(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            session.report(loss=loss.item())
        session.report("eval", accuracy=0.5)
        assert heard.said == ["4 {'accuracy': 0.5}"]
    assert heard.losses == losses
    assert len(losses) == 4


async def test_the_same_in_an_event_loop() -> None:
    model, seen = network(), []

    async with zmqtrain.join() as session:
        model, optimizer = await session.replicate(model, sgd(model))
        schedule = StepLR(optimizer, 2, gamma=0.5)

        def step(inputs: Tensor, target: Tensor) -> float:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            schedule.step()
            return loss.item()

        assert len(session.batches(DATA, batch_size=50)) == 240 // 50
        async for inputs, target in session.batches(DATA, batch_size=50):
            seen.append((inputs, target))
            session.report(loss=await session.run(step, inputs, target))
        await session.barrier()
        assert (await session.all_reduce(torch.ones(2))).tolist() == [1, 1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(model), plain_training(seen), strict=True))


def test_an_optimizer_of_another_model_is_refused() -> None:
    with zmqtrain.session() as session, pytest.raises(TaskError, match="none of the model's trainable parameters"):
        session.replicate(network(), sgd(network()))


def test_accumulating_equals_the_whole_batch() -> None:
    inputs, target = DATA[:40]
    model = network()
    with zmqtrain.session() as session:
        model, optimizer = session.replicate(model, sgd(model))
        for _ in range(3):
            optimizer.zero_grad()
            with session.accumulating():
                (cross_entropy(model(inputs[:20]), target[:20]) / 2).backward()
            (cross_entropy(model(inputs[20:]), target[20:]) / 2).backward()
            optimizer.step()
    whole = network()
    optimizer = sgd(whole)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(whole(inputs), target).backward()
        optimizer.step()
    for ours, theirs in zip(weights(model), weights(whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_model_and_optimizer_are_given_back() -> None:
    model = network()
    before = sgd(model)
    with zmqtrain.session() as session:
        _, optimizer = session.replicate(model, before)
        assert optimizer is before
        assert type(optimizer) is torch.optim.SGD
        with torch.no_grad():
            model(DATA[:4][0])  # an evaluation is no step
    after = weights(model)
    cross_entropy(model(DATA[:4][0]), DATA[:4][1]).backward()
    before.step()
    assert not torch.equal(after[0], weights(model)[0])


def test_misuse_says_what_to_do() -> None:
    model = network()
    with zmqtrain.session() as session:
        model, optimizer = session.replicate(model, sgd(model))
        with pytest.raises(TaskError, match="without a forward and a backward"):
            optimizer.step()
        with pytest.raises(TaskError, match="must be a tensor of one element"):
            session.backward(torch.ones(2), 1.0)
        for what in ({"epoch": -1}, {"epoch": 1.0}, {"batch_size": 0}, {"batch_size": 8.0}):
            with pytest.raises(UsageError, match="must be a whole number"):
                next(session.batches(DATA, **what))
        with pytest.raises(UsageError, match="takes a tensor, such as"):
            session.all_reduce(0.5)
        with pytest.raises(UsageError, match="holds no fractions"):
            session.all_reduce(torch.tensor(3), "mean")
        with pytest.raises(UsageError, match="replicates one model"):
            session.replicate(model, optimizer)
        with pytest.raises(NonFiniteLossError, match="No model of the run is saved"):
            session.report(loss=math.nan)
        with pytest.raises(UsageError, match="samples"):
            next(session.batches(DATA, batch_size=1000))


async def test_the_loop_never_waits_for_itself() -> None:
    async with zmqtrain.join() as session:
        model = network()
        model, _ = await session.replicate(model, sgd(model))
        with pytest.raises(UsageError, match=r"await session\.run"):
            model(DATA[:4][0])


def test_an_error_of_the_script_comes_out_as_it_is() -> None:
    def script() -> None:
        with zmqtrain.session() as session:
            session.replicate(model := network(), sgd(model))
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        script()
    assert not [thread for thread in threading.enumerate() if thread.name == "zmqtrain-loop"]


async def test_an_error_of_the_coroutine_comes_out_as_it_is() -> None:
    async def program() -> None:
        async with zmqtrain.join():
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        await program()
    assert len(asyncio.all_tasks()) == 1


async def test_a_session_that_has_ended_says_so() -> None:
    with zmqtrain.session() as session:
        batches = iter(session.batches(DATA, 0, batch_size=50))
        next(batches)
    dropped = zmqtrain.session().__enter__()  # nobody keeps its block open
    uses: list[Callable[[], object]] = [
        session.barrier,
        lambda: next(batches),
        lambda: list(session.batches(DATA, 1)),
        dropped.barrier,
    ]
    for use in uses:
        with pytest.raises(UsageError, match="the session has ended: use it within its block"):
            use()
    async with zmqtrain.join() as joined:
        await joined.barrier()
    for late in (joined.barrier(), joined.run(print)):
        with pytest.raises(UsageError, match="the session has ended"):
            await late


def test_torchrun_s_processes_are_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with zmqtrain.session() as session:
        assert session.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="torchrun has started 2 processes, each of which would train by itself"):
        zmqtrain.session().__enter__()


def test_a_second_session_of_a_launched_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = RoleEnvironment("worker/3", "tcp://127.0.0.1:1", "token")
    for name, value in environment.to_environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(own_run, "_entered", {(environment.peer, environment.coordinator)})
    with pytest.raises(UsageError, match="worker/3 of the run already"), zmqtrain.session():
        pass


def test_a_worker_that_others_give_up_is_not_closed_while_its_thread_trains() -> None:
    begun, closed = threading.Event(), []

    def program(session: Session) -> None:
        model = nn.Linear(4, 2)
        _, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if session.rank == 0:
            assert begun.wait(60.0)
            raise TaskError("given up")
        begun.set()
        for _ in range(20_000):  # long enough for the other's error to arrive
            optimizer.zero_grad()
        closed.append(session._core.closed)

    with pytest.raises(TaskError, match="given up"):
        run_sessions(topology_of(compute={"groups": 2}, exchange={"kind": "averaging"}), program)
    assert closed == [False]


async def test_a_worker_that_is_cancelled_again_while_it_closes_releases_its_model() -> None:
    begun, may_end, cores = threading.Event(), threading.Event(), []

    def program() -> None:
        begun.set()
        assert may_end.wait(60.0)

    async def worker() -> None:
        async with zmqtrain.join() as session:
            model = nn.Linear(4, 2)
            await session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
            cores.append(session._core)
            await session.run(program)

    running = asyncio.create_task(worker())
    assert await asyncio.to_thread(begun.wait, 60.0)
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0.01)  # the thread still runs
    may_end.set()
    await asyncio.wait({running})
    assert cores[0].closed


@pytest.mark.parametrize(
    ("ahead", "batches", "passes", "counted"),
    [(False, 1, 1, 4), (False, 3, 1, 12), (False, 1, 2, 4), (False, 2, 2, 8), (True, 1, 1, 4), (True, 3, 1, 12)],
)
def test_a_step_counts_the_samples_of_its_batches(ahead: bool, batches: int, passes: int, counted: int) -> None:
    """Of batches of 8, each of two workers has the half."""

    class Counts(zmqtrain.Callback):
        def __init__(self) -> None:
            self.samples: list[int] = []

        def on_step(self, done: zmqtrain.StepDone) -> None:
            self.samples.append(done.samples)

    def program(session: Session) -> Counts:
        counts, model = Counts(), network()
        model, optimizer = session.replicate(model, sgd(model), callbacks=[counts])
        taken = session.batches(DATA, 0, batch_size=8)
        for number, (inputs, target) in enumerate(list(taken) if ahead else taken):
            for _ in range(passes):
                (cross_entropy(model(inputs), target) / batches).backward()
            if number % batches == batches - 1:
                optimizer.step()
                optimizer.zero_grad()
            if number == 6 * batches - 1:
                break
        return counts

    for counts in run_sessions(topology_of(compute={"group_size": 2}), program):
        assert len(counts.samples) >= 2
        assert set(counts.samples) == {counted}


@pytest.mark.parametrize("divided", [False, True])
def test_workers_that_all_train_on_the_same_samples_are_told(divided: bool) -> None:
    def program(session: Session) -> None:
        model = network()
        model, optimizer = session.replicate(model, sgd(model))
        sampler = DistributedSampler(DATA, 2, session.rank) if divided else SequentialSampler(DATA)
        for inputs, target in DataLoader(DATA, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(inputs), target).backward()
            optimizer.step()

    warnings: list[str] = []
    run_sessions(topology_of(compute={"group_size": 2}), program, warnings)
    assert ["all workers have had the same loss" in text for text in warnings] == [True] * (not divided)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_replicate_says_what_it_takes() -> None:
    model = network()
    with zmqtrain.session() as session:
        for wrong in ((sgd(model), model), (model, StepLR(sgd(model), 1)), (model, None)):
            with pytest.raises(UsageError, match=r"takes a torch.nn.Module and a torch.optim.Optimizer"):
                session.replicate(*wrong)
        with pytest.raises(TaskError, match="ScriptModule, which takes no hooks"):
            session.replicate(torch.jit.script(model), sgd(model))
