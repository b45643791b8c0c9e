"""``python -m benchmarks host``: sums that the processes of one host make in shared memory, beside gloo in the same processes,
alternating; and whole training steps, beside steps without any communication."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from benchmarks.case import Case, case_of, size_text
from benchmarks.models import SEQUENCE, WIDTH
from benchmarks.processes import run_processes
from zmqtrain.arena import Arena
from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import barrier
from zmqtrain.errors import ZmqTrainError
from zmqtrain.net.endpoint import Endpoint

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


WORLDS = (2, 4, 8)
SIZES = (100_000_000, 4_000_000, 64_000)
ROUNDS = 9
#: Model, workers, samples a worker, steps a turn, turns.
MODELS = (
    ("alexnet", 2, 8, 3, 5),
    ("alexnet", 2, 32, 2, 4),
    ("vgg16", 2, 4, 1, 4),
    ("transformer", 2, 8, 3, 5),
    ("alexnet", 4, 8, 2, 4),
    ("transformer", 4, 8, 2, 4),
)
#: Seconds that a worker waits for the others.
PATIENCE_S = 120.0

Side: TypeAlias = Literal["bare sums", "shared memory", "zmq", "gloo", "alone", "ddp gloo", "ddp zmq", "ours"]


@dataclass(frozen=True, slots=True)
class Work:
    """What one process is to measure."""

    rank: int
    world: int
    arena: str
    store: str
    """File by which torch.distributed's processes find each other."""
    model: str = ""
    batch: int = 0
    steps: int = 0
    turns: int = 0


def bench_host(
    *,
    worlds: Sequence[int] = WORLDS,
    models: Sequence[tuple[str, int, int, int, int]] = MODELS,
    mpi_python: str | None = None,
    mpi_script: str | None = None,
) -> Iterator[Case]:
    """All-reduce by number of processes and size: of tensors that lie in shared memory, and of any tensors by the ``zmq`` backend
    of torch.distributed. Then steps of models with workers of one thread each. Values are medians of the slowest process.

    ``mpi_python`` is a Python that has mpi4py, and ``mpi_script`` what times it: called by ``mpirun`` with that Python, it prints a
    JSON line a size with ``bytes`` and ``median_ms``.
    """
    for world in worlds:
        mpi = _mpi(mpi_python, mpi_script, world) if mpi_python and mpi_script else {}
        sums = _measured(world, _sums, Work(0, world, "", ""))
        for size in SIZES:
            text = f"all-reduce {size_text(size)}, {world} processes"
            of = {side: sums[side, size] for side in ("bare sums", "shared memory", "zmq", "gloo")}
            yield _timed(f"{text}: in shared memory", of["shared memory"], "gloo", of["gloo"])
            yield _timed(f"{text}: the same", of["shared memory"], "bare sums", of["bare sums"])
            if size in mpi:
                yield _timed(f"{text}: in shared memory", of["shared memory"], "Open MPI", mpi[size])
            yield _timed(f"{text}: zmq backend", of["zmq"], "gloo", of["gloo"])
    for model, workers, batch, steps, turns in models:
        taken = _measured(workers, _steps, Work(0, workers, "", "", model, batch, steps, turns))
        text = f"step of {model}, batch {batch}, {workers} workers"
        ours = taken["ours", 0]
        yield _timed(text, ours, "without communication", taken["alone", 0])
        yield _timed(text, ours, "DistributedDataParallel, gloo", taken["ddp gloo", 0])
        if ("ddp zmq", 0) in taken:
            yield _timed(f"{text}, DistributedDataParallel with zmq", taken["ddp zmq", 0], "with gloo", taken["ddp gloo", 0])


#: Of one process: side and size -> seconds of each turn.
Times: TypeAlias = dict[tuple[Any, int], list[float]]


def _measured(world: int, role: Callable[[Endpoint, Work], Awaitable[Times]], work: Work) -> dict[tuple[Any, int], float]:
    """Medians of the slowest process's time."""
    region = Arena.create(world)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        works = [
            (f"worker/{rank}", Work(rank, world, region.path, store, work.model, work.batch, work.steps, work.turns))
            for rank in range(world)
        ]
        times: list[Times] = run_processes(works, role)
    region.close()
    return {
        key: statistics.median(max(each[key][turn] for each in times) for turn in range(len(times[0][key]))) for key in times[0]
    }


async def _sums(node: Endpoint, work: Work) -> Times:
    import torch
    import torch.distributed as dist

    import zmqtrain.c10d  # noqa: F401 - registers the backend
    from zmqtrain.host.accumulator import Accumulator
    from zmqtrain.host.member import ArenaMember
    from zmqtrain.host.sums import sum_into
    from zmqtrain.wire.tensor import TensorPayload

    torch.set_num_threads(1)  # more would take the processors that the other ranks need
    dist.init_process_group("gloo", init_method=f"file://{work.store}", rank=work.rank, world_size=work.world)
    ours = dist.new_group(backend="zmq")
    group, arena = _group(node, work), Arena.join(work.arena, work.rank)
    blocks = [arena.allocate(size) for size in SIZES]
    tensors = [torch.frombuffer(block.memory, dtype=torch.float32) for block in blocks]
    member = ArenaMember(_team(arena, work))
    accumulator = Accumulator(member)
    done: asyncio.Queue[BaseException | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def summed(_index: int, error: BaseException | None) -> None:
        loop.call_soon_threadsafe(done.put_nowait, error)

    shared = member.complete(accumulator.start([TensorPayload.of(tensor) for tensor in tensors], summed))
    started = [sums.tensor for sums in shared if isinstance(sums, TensorPayload)]
    times: Times = {}
    for index, size in enumerate(SIZES):
        private = torch.empty(size // 4)
        scratch = [torch.rand(size // 4) for _ in range(work.world)]
        mine = [each[slice(*bounds(each.numel(), work.world)[work.rank])] for each in scratch]

        async def in_memory(index: int = index) -> None:
            accumulator.produced(index)
            error = await done.get()
            if error is not None:
                raise error

        sides: dict[Side, Callable[[], Awaitable[object]]] = {
            "bare sums": lambda mine=mine: asyncio.to_thread(_alone, lambda: sum_into(mine[:1], mine)),  # type: ignore[misc]
            "shared memory": in_memory,
            "zmq": lambda private=private: asyncio.to_thread(dist.all_reduce, private, group=ours),  # type: ignore[misc]
            "gloo": lambda private=private: asyncio.to_thread(dist.all_reduce, private),  # type: ignore[misc]
        }
        expected = work.world * (work.world + 1) / 2
        for turn in range(-2, ROUNDS):
            for place in range(len(sides)):
                side = list(sides)[(place + turn) % len(sides)]
                result = {"shared memory": started[index], "bare sums": None}.get(side, private)
                member.complete(accumulator.writable())
                for tensor in (tensors[index], private):
                    tensor.fill_(work.rank + 1)
                await barrier(group, ("begin",))
                start = time.perf_counter()
                await sides[side]()
                taken = time.perf_counter() - start
                await barrier(group, ("end",))
                if result is not None and not bool((result == expected).all()):
                    raise ZmqTrainError(f"the sum of {size} bytes by {side} is wrong")
                if side == "shared memory":
                    accumulator.taken()
                if turn >= 0:
                    times.setdefault((side, size), []).append(taken)
    await barrier(group, ("done",))
    member.close(10)
    dist.destroy_process_group()
    return times


async def _steps(node: Endpoint, work: Work) -> Times:
    """Models begin with the same parameters, and their losses must stay the same, too."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import zmqtrain.c10d  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work.store}", rank=work.rank, world_size=work.world)
    generator = torch.Generator().manual_seed(work.rank)
    shape = (SEQUENCE, WIDTH) if work.model == "transformer" else (3, 224, 224)
    inputs = torch.randn(work.batch, *shape, generator=generator)
    target = torch.randint(1000, (work.batch,), generator=generator)

    def torch_steps(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], Awaitable[list[float]]]:
        model, optimizer = _model(work.model)
        wrapped = wrap(model)
        return lambda: asyncio.to_thread(_alone, lambda: _train(wrapped, optimizer, inputs, target, work.steps))

    sides: dict[Side, Callable[[], Awaitable[list[float]]]] = {
        "alone": torch_steps(lambda model: model),
        "ddp gloo": torch_steps(DistributedDataParallel),
        "ours": await _ours(node, work, inputs, target),
    }
    if work.model != "vgg16":  # more copies of larger models take more memory than many machines have
        zmq = dist.new_group(backend="zmq")
        sides["ddp zmq"] = torch_steps(lambda model: DistributedDataParallel(model, process_group=zmq))
    group = _group(node, work)
    times: Times = {}
    losses: dict[Side, list[float]] = {side: [] for side in sides}
    for turn in range(-1, work.turns):
        for place in range(len(sides)):
            side = list(sides)[(place + turn) % len(sides)]
            await barrier(group, ("begin",))
            start = time.perf_counter()
            losses[side] += await sides[side]()
            taken = (time.perf_counter() - start) / work.steps
            if turn >= 0:
                times.setdefault((side, 0), []).append(taken)
    for side in set(sides) - {"alone"}:
        if not all(abs(one - other) <= 1e-5 * abs(other) for one, other in zip(losses[side], losses["ddp gloo"], strict=True)):
            raise ZmqTrainError(f"losses of {side} differ from DistributedDataParallel's: {losses[side]}, {losses['ddp gloo']}")
    await barrier(group, ("done",))
    dist.destroy_process_group()
    return times


async def _ours(node: Endpoint, work: Work, inputs: Tensor, target: Tensor) -> Callable[[], Awaitable[list[float]]]:
    """Steps of a worker as in a launched job."""
    from torch.nn import functional

    from zmqtrain.exchange.allreduce import AllReduceExchange
    from zmqtrain.exchange.sums import HostSums
    from zmqtrain.host.member import ArenaMember
    from zmqtrain.train.device.cpu import CpuDevice
    from zmqtrain.train.replica import TorchReplica
    from zmqtrain.train.shared import allocate_in

    arena = Arena.join(work.arena, work.rank)
    device, (model, optimizer) = CpuDevice(1), _model(work.model)
    replica = TorchReplica(model, optimizer, device, allocate=allocate_in(arena))
    sums = HostSums(
        _group(node, work), ArenaMember(_team(arena, work)), None, slices=work.world, scale=1.0 / work.world, in_place=True
    )  # fmt: skip
    exchange = AllReduceExchange(sums, by_bucket=True)
    replica.connect(exchange.bucket_ready)
    await exchange.start(replica)
    done = 0

    def step(number: int) -> float:
        replica.begin_step(number)
        loss = functional.cross_entropy(model(inputs), target)
        value = loss.item()
        replica.begin_backward(last=True)
        loss.backward()  # type: ignore[no-untyped-call]
        replica.end_backward()
        return value

    async def steps() -> list[float]:
        nonlocal done
        losses = []
        for _ in range(work.steps):
            exchange.begin_step(done)
            losses.append(await device.run(partial(step, done)))
            await exchange.end_step()
            done += 1
        await exchange.settle()
        await device.run(replica.take_all)
        return losses

    return steps


def _model(name: str) -> tuple[nn.Module, Optimizer]:
    import torch

    from benchmarks import models

    torch.manual_seed(0)
    model: nn.Module = getattr(models, name)()
    return model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def _train(model: nn.Module, optimizer: Optimizer, inputs: Tensor, target: Tensor, steps: int) -> list[float]:
    from torch.nn import functional

    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), target)
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return losses


def _alone(do: Callable[[], Any]) -> Any:
    """In a thread that uses one processor."""
    import torch

    torch.set_num_threads(1)
    return do()


def _group(node: Endpoint, work: Work) -> Group:
    members = tuple(f"worker/{rank}" for rank in range(work.world))
    return Group(node, members, work.rank, "bench", timeout_s=PATIENCE_S)


def _team(arena: Arena, work: Work) -> Any:
    from zmqtrain.host.team import Team

    names = [f"worker/{rank}" for rank in range(work.world)]
    return Team(arena, range(work.world), work.rank, names=names, timeout_s=PATIENCE_S)


def _mpi(python: str, script: str, world: int) -> dict[int, float]:
    """Seconds that MPI's all-reduce takes, by size."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(world), python, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise ZmqTrainError(f"{' '.join(command)} printed no result (exit status {done.returncode}):\n{done.stderr[-2000:]}")
    return {int(line["bytes"]): float(line["median_ms"]) / 1e3 for line in lines}


def _timed(case: str, value_s: float, peer: str, peer_s: float) -> Case:
    return case_of("host", case, 1e3 * value_s, "ms", peer, 1e3 * peer_s, digits=3)
