"""A model under DistributedDataParallel, as exchanges see it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zmqtrain.arena import Arena
from zmqtrain.errors import TaskError, UsageError
from zmqtrain.exchange.base import Bucket, Exchange, Optimize, OptimizerSpec, Sharing
from zmqtrain.exchange.optimizer import describe_optimizer
from zmqtrain.train.bucket_machine import BucketMachine, Do
from zmqtrain.train.buckets import ParameterInfo, plan_buckets
from zmqtrain.train.gates import Gates
from zmqtrain.train.shared import allocate_in
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload

SETTING = "timeout_s= of ModelServers"
#: Of each parameter so many elements are compared with what servers have, if nothing else says that it was changed.
SAMPLE = 64


class DdpReplica:
    """Implements `zmqtrain.exchange.base.Replica` with buckets of its own, which are copies of gradients and parameters, since the
    buckets of DistributedDataParallel change after the first step."""

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
        self._optimizer, self._share = optimizer, 1.0 / group_size
        self._places: dict[int, tuple[int, str, Tensor]] = {}  # parameter -> bucket, name, and the place of its gradient
        self._parameters: list[list[tuple[Tensor, Tensor]]] = []  # bucket -> the model's tensors, and the copies that servers write
        self._machine = BucketMachine([plan.names for plan in plans])
        self._gates = Gates(
            self._machine,
            timeout_s,
            condition=threading.Condition(),
            clock=time.monotonic,
            peer="the model servers",
            setting=SETTING,
        )
        buckets = []
        allocate = allocate_in(arena)
        for index, plan in enumerate(plans):
            dtype = named[plan.names[0]].dtype
            parameters, gradients = allocate(plan.numel, dtype), allocate(plan.numel, dtype)
            self._parameters.append([])
            for name, start, stop in zip(plan.names, plan.offsets, plan.offsets[1:], strict=False):
                parameter = named[name]
                parameters[start:stop].view(parameter.shape).copy_(parameter.detach())
                self._parameters[index].append((parameter, parameters[start:stop].view(parameter.shape)))
                self._places[id(parameter)] = index, name, gradients[start:stop].view(parameter.shape)
            shapes = tuple(tuple(named[name].shape) for name in plan.names)
            flat = TensorPayload.of(parameters), TensorPayload.of(gradients)
            buckets.append(Bucket(index, *flat, plan.group, plan.names, shapes=shapes))
        self.buckets: Sequence[Bucket] = buckets
        self._steps = 0
        self._begun = False
        self._taken: list[list[tuple[int, int]]] = []  # bucket -> the parameters' versions and places when they were taken
        self._changed: str | None = None

    def connect(self, loop: asyncio.AbstractEventLoop, exchange: Exchange) -> None:
        self._loop, self._exchange = loop, exchange

    # Called by the exchange, on the loop's thread.

    def hyperparameters(self) -> OptimizerSpec:
        return describe_optimizer(self._optimizer)

    def optimize(self, when: Optimize) -> None:
        assert when is Optimize.APART, "servers run the optimizer"

    def share(self, sharing: Sharing) -> None:
        raise AssertionError("gradients go to servers")

    def judged(self, finite: bool, step: int) -> bool:
        return finite

    def parameters_ready(self, bucket: Bucket) -> None:
        self._gates.answered(bucket.index)

    def abort(self, error: BaseException) -> None:
        self._gates.abort(error)

    async def update(self, *, hold: bool = False) -> None:
        raise AssertionError("servers run the optimizer")

    async def beside(self) -> tuple[Mapping[str, Payload], Mapping[str, Value]]:
        raise AssertionError("the ranks of DistributedDataParallel stay the same")

    async def take_beside(self, tensors: Mapping[str, Payload], values: Mapping[str, Value]) -> None:
        raise AssertionError("the ranks of DistributedDataParallel stay the same")

    # Called in the caller's threads.

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take this rank's gradient, which is not averaged. Complete buckets are sent, in order.

        Raises `TaskError` if it has already arrived in this step: its bucket may have been sent."""
        if not self._begun:
            # Read now, and not after the previous step: a schedule has changed them since.
            self._begun = True
            self._changed, self._taken = self._changed_since_taken(), []
            self._machine.begin_backward(last=True)
            step, self._steps = self._steps, self._steps + 1
            self._loop.call_soon_threadsafe(self._exchange.begin_step, step)
        index, name, place = self._places[id(parameter)]
        try:
            complete = self._machine.gradient(index, name)
        except ValueError:
            raise TaskError(
                f"the parameter {name!r} got its gradient twice in one step, so the first one may have been sent: call "
                "ModelServers.step() after each backward, and put backwards that only accumulate gradients within no_sync()"
            ) from None
        place.copy_(gradient)
        if self._share != 1.0:
            place.mul_(self._share)
        if complete:
            for do, ready in self._machine.hand_over():
                if do is Do.HAND_OVER:
                    self._loop.call_soon_threadsafe(self._exchange.bucket_ready, self.buckets[ready])

    async def finish_step(self) -> None:
        """Wait until all parameters have arrived."""
        if not self._begun or not self._machine.all_handed_over:
            raise RuntimeError(
                "call ModelServers.step() after loss.backward(), and not within no_sync(); if you did, backward did not reach some "
                "parameters: freeze them (requires_grad_(False)) before the model is wrapped"
            )
        await self._exchange.end_step()
        await self._exchange.settle()
        self._begun = False

    def require_taken(self) -> None:
        """Raise `UsageError` if a parameter was not the one that was taken when this step's backward began."""
        if self._changed is not None:
            raise UsageError(
                f"the parameter {self._changed!r} was changed since ModelServers last set it (loaded, clamped, or by a step of the "
                "optimizer itself), but the parameters are the servers', which would set it back: load a model before you make "
                "ModelServers, and call servers.step() in place of optimizer.step()"
            )

    def accept(self) -> None:
        """The parameters are meant to be others than those that were taken, until the next ones are."""
        self._taken = []

    def _changed_since_taken(self) -> str | None:
        """The name of a parameter that the program has changed, if there is one. What is as before is no change, such as weights
        that were exchanged for an evaluation; what goes through ``.data`` is looked for in a sample."""
        for bucket, parameters, taken in zip(self.buckets, self._parameters, self._taken, strict=False):
            for name, (parameter, copy), seen in zip(bucket.names, parameters, taken, strict=True):
                mine, theirs = parameter.detach(), copy
                if seen == _place_of(parameter):
                    every = max(1, parameter.numel() // SAMPLE)
                    mine, theirs = mine.reshape(-1)[::every], theirs.reshape(-1)[::every]
                if not torch.equal(mine, theirs.to(mine.device)):
                    return name
        return None

    def take(self) -> None:
        """Copy the servers' parameters to the model."""
        for index, parameters in enumerate(self._parameters):
            todo, _ = self._gates.take(index)
            if Do.FETCH in todo:
                with torch.no_grad():
                    for parameter, copy in parameters:
                        parameter.copy_(copy)
        self._taken = [[_place_of(parameter) for parameter, _ in parameters] for parameters in self._parameters]


def _place_of(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()
