"""``python -m benchmarks server``: push and pull of 100 MB by two workers on one model server over TCP, beside MXNet's kvstore.

And how much of the exchange a layer-wise overlapped step hides.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from benchmarks.case import Case, case_of
from benchmarks.processes import Place, run_processes
from zmqtrain.arena import Arena
from zmqtrain.errors import ZmqTrainError
from zmqtrain.net.node import Node

if TYPE_CHECKING:
    import torch

    from zmqtrain.exchange.base import Bucket, Optimize, OptimizerSpec, Sharing
    from zmqtrain.exchange.model_server import ModelServerExchange
    from zmqtrain.wire.payload import Payload, Value

PolicyName = Literal["sync", "async"]

MODEL_BYTES = 100_000_000
BUCKET_BYTES = 4 << 20
WORKERS = 2
ROUNDS = 8
#: The first rounds warm up: they connect, and take memory.
WARM_UP = 2
#: Modelled seconds a bucket, forward and backward, for the overlapped step: as long, in all, as the exchange itself takes.
FORWARD_S, BACKWARD_S = 0.005, 0.010
#: MXNet must have measured in this time.
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Work:
    """What one process is to do."""

    peer: str
    workers: tuple[str, ...]
    policy: PolicyName
    model_bytes: int
    rounds: int
    overlap: bool = True
    modelled: bool = False
    """Whether buckets become ready one by one, as in a backward, or all at once."""


def bench_server(
    *,
    mxnet_python: str | None = None,
    mxnet_script: str | None = None,
    model_bytes: int = MODEL_BYTES,
    rounds: int = ROUNDS,
    policies: Sequence[PolicyName] = ("sync", "async"),
    exposed: bool = True,
) -> Iterator[Case]:
    """A case for each staleness policy, then (``exposed``) the exposed communication with and without overlap.

    ``mxnet_python`` is a Python that has MXNet, and ``mxnet_script`` the script that measures it: called with that Python, the
    numbers of workers and servers and the kvstore's mode, it prints a JSON line a worker with ``median_ms``. Values are medians
    over the rounds, of the slower worker.
    """
    workers = tuple(f"worker/{rank}" for rank in range(WORKERS))
    for policy in policies:
        results = _run([Work(peer, workers, policy, model_bytes, rounds) for peer in (*workers, "server/0")])
        value = max(statistics.median(seconds for seconds, _ in rounds_of) for rounds_of in results) * 1e3
        peer = _mxnet(mxnet_python, mxnet_script, policy) if mxnet_python and mxnet_script else None
        yield _timed(f"push+pull {model_bytes / 1e6:g} MB, {WORKERS} workers, 1 server, {policy}", value, "mxnet", peer)
    if not exposed:
        return
    waits: dict[bool, float] = {}
    for overlap in (False, True):
        work = [Work(peer, workers, "async", model_bytes, rounds, overlap, True) for peer in (*workers, "server/0")]
        waits[overlap] = max(statistics.median(wait for _, wait in rounds_of) for rounds_of in _run(work)) * 1e3
    yield _timed(f"exposed communication, {model_bytes / 1e6:g} MB, overlapped", waits[True], "overlap off", waits[False])


def _timed(case: str, value: float, peer: str, peer_value: float | None) -> Case:
    ratio = None if peer_value is None else peer_value / max(value, 1e-3)  # all of it may be hidden
    return case_of("server", case, value, "ms", peer, peer_value, ratio or 0.0, digits=3)


def _mxnet(python: str, script: str, policy: PolicyName) -> float:
    """Median milliseconds of the slower of MXNet's workers."""
    command = ["bash", script, python, str(WORKERS), "1", f"dist_{policy}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise ZmqTrainError(f"{' '.join(command)} printed no result (exit status {done.returncode}):\n{done.stderr[-2000:]}")
    return max(float(line["median_ms"]) for line in lines)


#: Of one worker, for each round: its seconds, and those of them that its compute thread would have waited.
Rounds: TypeAlias = list[tuple[float, float]]


def _run(work: Sequence[Work]) -> list[Rounds]:
    """Run each in a process of its own; what the workers measured."""
    region = Arena.create(len(work))
    places = [Place(arena=region.path, slot=slot) for slot in range(len(work))]
    results = run_processes([(one.peer, one) for one in work], _take_part, places)
    region.close()
    return [result for result in results if result is not None]


async def _take_part(node: Node, work: Work) -> Rounds | None:
    import torch

    torch.set_num_threads(1)  # more would take the processors that the others need
    if work.peer.startswith("server/"):
        await _serve(work, node)
        return None
    return await _measure(work, node)


async def _serve(work: Work, node: Node) -> None:
    from zmqtrain.server.model_server import ModelServer
    from zmqtrain.server.settings import ServerSettings

    await ModelServer(node, ServerSettings(0, work.workers), arena=node.settings.arena).run()


async def _measure(work: Work, node: Node) -> Rounds:
    from zmqtrain.exchange.model_server import ModelServerExchange
    from zmqtrain.exchange.server_settings import ModelServerSettings

    replica = _Replica(work.model_bytes, node.settings.arena)
    groups = tuple((worker,) for worker in work.workers)
    settings = ModelServerSettings(
        group=work.workers.index(work.peer),
        position=0,
        groups=groups,
        servers=("server/0",),
        policy=work.policy,
        overlap=work.overlap,
    )
    exchange = ModelServerExchange(node, settings)
    await exchange.start(replica)
    clock = time.perf_counter  # the loop's own clock may tick in milliseconds only
    measured: Rounds = []
    for step in range(work.rounds):
        start = clock()
        waited = await _modelled_step(exchange, replica, step) if work.modelled else await _plain_step(exchange, replica, step)
        measured.append((clock() - start, waited))
    await exchange.settle()
    _check(replica, work)
    await exchange.stop()
    return measured[WARM_UP:]


async def _plain_step(exchange: ModelServerExchange, replica: _Replica, step: int) -> float:
    """All gradients at once, then wait for all parameters: what a push and a pull are."""
    exchange.begin_step(step)
    for bucket in replica.buckets:
        exchange.bucket_ready(bucket)
    await exchange.end_step()
    await exchange.settle()
    return 0.0


async def _modelled_step(exchange: ModelServerExchange, replica: _Replica, step: int) -> float:
    """Forward and backward take modelled time a bucket; the forward waits for each bucket as it reaches it."""
    clock = time.perf_counter  # the loop's own clock may tick in milliseconds only
    waited = 0.0
    exchange.begin_step(step)
    for bucket in reversed(replica.buckets):
        start = clock()
        await replica.ready[bucket.index].wait()
        waited += clock() - start
        await asyncio.sleep(FORWARD_S)
    for bucket in replica.buckets:
        await asyncio.sleep(BACKWARD_S)
        replica.ready[bucket.index].clear()
        exchange.bucket_ready(bucket)
    start = clock()
    await exchange.end_step()
    return waited + clock() - start


def _check(replica: _Replica, work: Work) -> None:
    """Gradients are ones and the rate is 1, so parameters count updates."""
    expected = -float(work.rounds)
    if work.policy == "sync" and not all(bool((parameters == expected).all()) for parameters in replica.parameters):
        raise ZmqTrainError("the model server's arithmetic is wrong")


class _Replica:
    """Buckets of one large model, without the model."""

    def __init__(self, model_bytes: int, arena: Arena | None) -> None:
        import torch

        from zmqtrain.exchange.base import Bucket
        from zmqtrain.train.shared import allocate_in
        from zmqtrain.wire.tensor import TensorPayload

        sizes = [min(BUCKET_BYTES, model_bytes - start) // 4 for start in range(0, model_bytes, BUCKET_BYTES)]
        allocate = allocate_in(arena)
        self.parameters: list[torch.Tensor] = [allocate(size, torch.float32) for size in sizes]
        gradients = [allocate(size, torch.float32).fill_(1.0) for size in sizes]
        self._buckets = tuple(
            Bucket(index, TensorPayload.of(parameters), TensorPayload.of(gradients[index]), 0, (f"p{index}",))
            for index, parameters in enumerate(self.parameters)
        )
        self.ready = [asyncio.Event() for _ in sizes]

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def hyperparameters(self) -> OptimizerSpec:
        from zmqtrain.exchange.base import OptimizerSpec

        return OptimizerSpec("torch.optim:SGD", ({"lr": 1.0},))

    def share(self, sharing: Sharing) -> None: ...

    def judged(self, finite: bool, step: int) -> bool:
        return finite

    def parameters_ready(self, bucket: Bucket) -> None:
        self.ready[bucket.index].set()

    def abort(self, error: BaseException) -> None:
        for ready in self.ready:
            ready.set()

    def optimize(self, when: Optimize) -> None:
        raise AssertionError("the server runs the optimizer")

    async def update(self, *, hold: bool = False) -> None:
        raise AssertionError("the server runs the optimizer")

    async def beside(self) -> tuple[Mapping[str, Payload], Mapping[str, Value]]:
        raise AssertionError("nobody joins late")

    async def take_beside(self, tensors: Mapping[str, Payload], values: Mapping[str, Value]) -> None:
        raise AssertionError("nobody joins late")
