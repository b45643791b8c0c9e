"""A model under DistributedDataParallel, as exchanges see it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.arena import Arena
from zmqtrain.errors import PeerTimeoutError
from zmqtrain.exchange.base import Bucket, Exchange, Optimize, OptimizerSpec, Sharing
from zmqtrain.exchange.optimizer import describe_optimizer
from zmqtrain.train.buckets import ParameterInfo, plan_buckets
from zmqtrain.train.shared import allocate_in
from zmqtrain.wire.tensor import TensorPayload

SETTING = "timeout_s= of ModelServers"


class DdpReplica:
    """Implements `zmqtrain.exchange.base.Replica` with buckets of its own: copies of gradients and parameters, since the buckets of
    DistributedDataParallel change after the first step."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, group_size: int, bucket_bytes: int, arena: Arena | None, timeout_s: float
    ) -> None:
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        named = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() and id(p) in group_of}
        plans = plan_buckets(
            [
                ParameterInfo(name, p.numel(), p.element_size(), str(p.dtype).removeprefix("torch."), group_of[id(p)])
                for name, p in named.items()
            ],
            bucket_bytes,
        )
        self._optimizer, self._share, self._timeout_s = optimizer, 1.0 / group_size, timeout_s
        self._places: dict[int, tuple[int, Tensor]] = {}  # parameter -> its bucket, and where its gradient goes
        self._parameters: list[tuple[Tensor, Tensor]] = []  # the model's own, and the copy that the servers write
        self._missing: list[set[int]] = [{id(named[name]) for name in plan.names} for plan in plans]
        self._waiting = [set(missing) for missing in self._missing]
        self._next = 0
        buckets = []
        allocate = allocate_in(arena)
        for index, plan in enumerate(plans):
            dtype = named[plan.names[0]].dtype
            parameters, gradients = allocate(plan.numel, dtype), allocate(plan.numel, dtype)
            for name, start, stop in zip(plan.names, plan.offsets, plan.offsets[1:], strict=False):
                parameter = named[name]
                parameters[start:stop].view(parameter.shape).copy_(parameter.detach())
                self._parameters.append((parameter, parameters[start:stop].view(parameter.shape)))
                self._places[id(parameter)] = index, gradients[start:stop].view(parameter.shape)
            buckets.append(Bucket(index, TensorPayload.of(parameters), TensorPayload.of(gradients), plan.group, plan.names))
        self.buckets: Sequence[Bucket] = buckets
        self._steps = 0
        self._begun = False
        self._ready = 0
        self._all_ready = threading.Event()
        self._error: BaseException | None = None

    def connect(self, loop: asyncio.AbstractEventLoop, exchange: Exchange) -> None:
        self._loop, self._exchange = loop, exchange

    # For the exchange, on the loop's thread.

    def hyperparameters(self) -> OptimizerSpec:
        return describe_optimizer(self._optimizer)

    def optimize(self, when: Optimize) -> None:
        assert when is Optimize.APART, "servers run the optimizer"

    def share(self, sharing: Sharing) -> None:
        raise AssertionError("gradients go to servers")

    def judged(self, finite: bool, step: int) -> bool:
        return finite

    def parameters_ready(self, bucket: Bucket) -> None:
        self._ready += 1
        if self._ready == len(self.buckets):
            self._all_ready.set()

    def abort(self, error: BaseException) -> None:
        self._error = self._error or error
        self._all_ready.set()

    async def update(self, *, gradient_scale: float = 1.0, clip: bool = True, hold: bool = False) -> None:
        raise AssertionError("servers run the optimizer")

    # For the caller's threads.

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """A gradient is there: this rank's, averaged with nobody's. Complete buckets go on their way, in order."""
        if not self._begun:
            # Now, and not after the step before: a schedule has moved on since.
            self._begun, self._ready = True, 0
            self._all_ready.clear()
            step, self._steps = self._steps, self._steps + 1
            self._loop.call_soon_threadsafe(self._exchange.begin_step, step)
        index, place = self._places[id(parameter)]
        place.copy_(gradient)
        if self._share != 1.0:
            place.mul_(self._share)
        self._waiting[index].discard(id(parameter))
        while self._next < len(self.buckets) and not self._waiting[self._next]:
            self._loop.call_soon_threadsafe(self._exchange.bucket_ready, self.buckets[self._next])
            self._next += 1

    async def finish_step(self) -> None:
        """Until all parameters are there."""
        if not self._begun or self._next < len(self.buckets):
            raise RuntimeError("ModelServers.step() comes after loss.backward(), and not within no_sync()")
        await self._exchange.end_step()
        await self._exchange.settle()
        self._begun, self._next = False, 0
        self._waiting = [set(missing) for missing in self._missing]

    def take(self) -> None:
        """The model's parameters become the servers'."""
        if not self._all_ready.wait(self._timeout_s):
            raise PeerTimeoutError("the model servers", "parameters", self._timeout_s, SETTING)
        if self._error is not None:
            raise self._error
        with torch.no_grad():
            for parameter, copy in self._parameters:
                parameter.copy_(copy)
