"""A small world of groups and servers in one process, and one process that computes the same on the whole batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zmqtrain.events import Recorder
from zmqtrain.exchange.base import Bucket, Optimize, OptimizerSpec, Sharing
from zmqtrain.exchange.model_server import ModelServerExchange
from zmqtrain.exchange.optimizer import describe_optimizer
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.server.model_server import ModelServer
from zmqtrain.server.settings import ServerCheckpoints, ServerSettings
from zmqtrain.topology.bucket_limit import PieceLimit
from zmqtrain.wire.tensor import TensorPayload

SIZES = (7, 40, 1, 23)


class LinearReplica:
    """``prediction = sum of features[b] @ parameters[b]``, with the mean squared error."""

    def __init__(
        self,
        optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
        *,
        sizes: Sequence[int] = SIZES,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        groups: Sequence[int] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.parameters = [torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for size in sizes]
        self.gradients = [torch.zeros(size, dtype=dtype) for size in sizes]
        self._buckets = tuple(
            Bucket(index, TensorPayload.of(p), TensorPayload.of(g), groups[index] if groups else 0, (f"p{index}",))
            for index, (p, g) in enumerate(zip(self.parameters, self.gradients, strict=True))
        )
        self.optimizer = optimizer(self.parameters)
        self.ready = [asyncio.Event() for _ in sizes]
        self.error: BaseException | None = None

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def hyperparameters(self) -> OptimizerSpec:
        return describe_optimizer(self.optimizer)

    def share(self, sharing: Sharing) -> None: ...

    def parameters_ready(self, bucket: Bucket) -> None:
        self.ready[bucket.index].set()

    def abort(self, error: BaseException) -> None:
        self.error = error
        for event in self.ready:
            event.set()

    def optimize(self, when: Optimize) -> None:
        raise AssertionError("the server runs the optimizer")

    async def update(self, *, hold: bool = False) -> None:
        raise AssertionError("servers run the optimizer")

    def backward(self, features: Sequence[Tensor], target: Tensor, batch: int) -> None:
        """Gradients of the mean loss over these samples, times their share of ``batch``."""
        prediction = sum((x @ p for x, p in zip(features, self.parameters, strict=True)), torch.zeros_like(target))
        for gradient, x in zip(self.gradients, features, strict=True):
            gradient.copy_(2.0 / batch * (x.T @ (prediction - target)))


def data(step: int, samples: int, sizes: Sequence[int] = SIZES, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    features = [torch.randn(samples, size, dtype=torch.float64, generator=generator).to(dtype) for size in sizes]
    return features, torch.randn(samples, dtype=torch.float64, generator=generator).to(dtype)


def one_process(
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    steps: int,
    samples: int,
    *,
    dtype: torch.dtype = torch.float64,
    given: torch.dtype | None = None,
    clip_norm: float = 0.0,
    decay: float = 1.0,
) -> list[Tensor]:
    """What the whole batch in one process comes to. ``given``: the type in which weights and samples were rounded before."""
    replica = LinearReplica(optimizer, dtype=dtype)
    for parameter in replica.parameters:
        parameter.copy_(parameter.to(given or dtype))
    for step in range(steps):
        features, target = data(step, samples, dtype=given or dtype)
        replica.backward([each.to(dtype) for each in features], target.to(dtype), samples)
        for parameter, gradient in zip(replica.parameters, replica.gradients, strict=True):
            parameter.grad = gradient.clone()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(replica.parameters, clip_norm)
        replica.optimizer.step()
        for group in replica.optimizer.param_groups:
            group["lr"] *= decay
    return replica.parameters


class World:
    """Servers and workers as coroutines."""

    def __init__(
        self,
        groups: int,
        size: int,
        servers: int,
        *,
        network: Any = None,
        checkpoints: Sequence[ServerCheckpoints] = (),
        recorders: Mapping[str, Recorder] | None = None,
        **settings: Any,
    ) -> None:
        """``recorders``: by the name of a role."""
        recorders = recorders or {}
        self.network = network or MemoryNetwork()
        self.endpoints: dict[str, Endpoint] = {}
        names = tuple(tuple(f"worker/{group * size + position}" for position in range(size)) for group in range(groups))
        self.settings = ModelServerSettings(
            0,
            0,
            names,
            tuple(f"server/{index}" for index in range(servers)),
            pieces=PieceLimit(settings.pop("split_bytes", 80)),
            **{"barrier_s": 20.0, "request_s": 20.0, **settings},
        )
        self.workers = tuple(name for members in names for name in members)
        self.servers = [
            ModelServer(
                self._open(f"server/{index}"),
                ServerSettings(index, self.workers, request_s=20.0, barrier_s=20.0),
                checkpoints=checkpoints[index] if checkpoints else None,
                recorder=recorders.get(f"server/{index}"),
            )
            for index in range(servers)
        ]
        self.exchanges = [
            ModelServerExchange(
                self._open(name),
                replace(self.settings, group=rank // size, position=rank % size),
                recorder=recorders.get(name),
            )
            for rank, name in enumerate(self.workers)
        ]

    def _open(self, name: str) -> Endpoint:
        endpoint = self.endpoints[name] = self.network.endpoint(name)
        return endpoint

    async def run(self, *workers: Any, server_delay_s: float = 0.0) -> list[Any]:
        """Run all servers, and one coroutine a worker; returns what the workers returned."""

        async def serve(server: ModelServer) -> None:
            await asyncio.sleep(server_delay_s)
            await server.run()

        try:
            async with asyncio.TaskGroup() as tasks:
                for server in self.servers:
                    tasks.create_task(serve(server))
                running = [tasks.create_task(worker) for worker in workers]
            return [task.result() for task in running]
        finally:
            await asyncio.gather(*(endpoint.close() for endpoint in self.endpoints.values()))


async def exchange_once(exchange: ModelServerExchange, replica: LinearReplica, step: int) -> None:
    """One step's exchange with the gradients that are there; returns when all parameters of the next step are."""
    exchange.begin_step(step)
    for bucket in replica.buckets:
        replica.ready[bucket.index].clear()
        exchange.bucket_ready(bucket)
        await asyncio.sleep(0)
    await exchange.end_step()
    for event in replica.ready:
        await event.wait()
    await exchange.settle()


async def train(
    exchange: ModelServerExchange,
    replica: LinearReplica,
    steps: int,
    samples: int,
    *,
    decay: float = 1.0,
    first: int = 0,
    keep_every: int = 0,
) -> list[Tensor]:
    """A worker that trains on its share of each step's samples, and has servers keep checkpoints."""
    settings = exchange._settings
    groups, size = len(settings.groups), len(settings.groups[0])
    dtype = replica.parameters[0].dtype
    await exchange.start(replica, restored=first > 0)
    for step in range(first, steps):
        features, target = data(step, samples, dtype=dtype)
        own = slice(settings.group * size + settings.position, samples, groups * size)
        replica.backward([x[own] for x in features], target[own], samples // groups)
        await exchange_once(exchange, replica, step)
        for group in replica.optimizer.param_groups:
            group["lr"] *= decay
        if keep_every and (step + 1) % keep_every == 0:
            if settings.group == settings.position == 0:
                await exchange.keep(step + 1, last=False)
            await exchange.read("", kept=step + 1)
    await exchange.settle()
    await exchange.stop()
    return replica.parameters
