"""A replica of plain numpy buckets with real arithmetic, and worlds of them over the in-memory network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from zmqtrain.exchange.base import Bucket, Exchange, Optimize, OptimizerSpec, Sharing
from zmqtrain.wire.tensor import TensorPayload

Array = np.ndarray[Any, np.dtype[np.float64]]


class NumpyReplica:
    """Linear regression, trained by SGD with momentum; the weights lie in buckets of the given sizes, in backward order."""

    def __init__(self, sizes: Sequence[int], seed: int, *, clip_norm: float = 0.0) -> None:
        random = np.random.default_rng(seed)
        self.weights = [random.standard_normal(size) for size in sizes]
        self.gradients = [np.zeros(size) for size in sizes]
        self.momentum = [np.zeros(size) for size in sizes]
        self.clip_norm = clip_norm
        self.ready: list[int] = []
        self.when = Optimize.APART
        self._open = [asyncio.Event() for _ in sizes]  # the bucket is ours
        self._due: set[int] = set()  # buckets to update when they are ours again
        self.aborted: BaseException | None = None
        self._buckets = [
            Bucket(index, TensorPayload.of(weight), TensorPayload.of(gradient), 0, (f"w{index}",))
            for index, (weight, gradient) in enumerate(zip(self.weights, self.gradients, strict=True))
        ]

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def hyperparameters(self) -> OptimizerSpec:
        return OptimizerSpec("torch.optim:SGD", ({"lr": 0.05, "momentum": 0.9},))

    def optimize(self, when: Optimize) -> None:
        self.when = when

    def share(self, sharing: Sharing) -> None: ...

    def parameters_ready(self, bucket: Bucket) -> None:
        self.ready.append(bucket.index)
        self._open[bucket.index].set()

    def abort(self, error: BaseException) -> None:
        self.aborted = error
        for each in self._open:
            each.set()

    def hand_over(self, exchange: Exchange, index: int) -> None:
        """The bucket's gradients are complete."""
        if self.when is Optimize.BEFORE:
            self._update(index)
        elif self.when is Optimize.AFTER:
            self._due.add(index)
        self._open[index].clear()
        exchange.bucket_ready(self._buckets[index])

    async def take_all(self) -> None:
        """As the next forward does, layer by layer."""
        for index, opened in reversed(list(enumerate(self._open))):
            await opened.wait()
            if self.aborted is not None:
                raise self.aborted
            if index in self._due:
                self._due.discard(index)
                self._update(index)
        for gradient in self.gradients:
            gradient[:] = 0.0

    async def update(self, *, hold: bool = False) -> None:
        await asyncio.sleep(0)
        norm = float(np.sqrt(sum(float(gradient @ gradient) for gradient in self.gradients)))
        if self.clip_norm and norm > self.clip_norm:
            for gradient in self.gradients:
                gradient *= self.clip_norm / norm
        for index in range(len(self.weights)):
            self._update(index)
            if not hold:
                self._open[index].set()

    def _update(self, index: int) -> None:
        self.momentum[index] *= 0.9
        self.momentum[index] += self.gradients[index]
        self.weights[index] -= 0.05 * self.momentum[index]

    def backward(self, inputs: Array, targets: Array, batch: int) -> None:
        """Add the gradient of the mean squared error over ``batch`` samples, of which ``inputs`` holds some."""
        error = inputs @ np.concatenate(self.weights) - targets
        start = 0
        for gradient in self.gradients:
            gradient += 2 * inputs[:, start : start + len(gradient)].T @ error / batch
            start += len(gradient)

    def flat(self) -> Array:
        return np.concatenate(self.weights)


class Data:
    """A batch of ``samples`` for each step, cut evenly for groups and their workers."""

    def __init__(self, width: int, samples: int, steps: int) -> None:
        random = np.random.default_rng(7)
        self.inputs = random.standard_normal((steps, samples, width))
        self.targets = random.standard_normal((steps, samples))

    def share(self, step: int, index: int, count: int) -> tuple[Array, Array]:
        return np.array_split(self.inputs[step], count)[index], np.array_split(self.targets[step], count)[index]


async def train_worker(
    exchange: Exchange, replica: NumpyReplica, data: Data, *, rank: int, groups: int, group_size: int, steps: range
) -> list[Array]:
    """Run the steps as a worker does; returns the weights after each."""
    await exchange.start(replica, restored=steps.start > 0)
    history: list[Array] = []
    samples = data.inputs.shape[1]
    for step in steps:
        exchange.begin_step(step)
        inputs, targets = data.share(step, rank, groups * group_size)
        replica.backward(inputs, targets, samples // groups)
        for bucket in replica.buckets:
            if exchange.exchanges(step):
                replica.hand_over(exchange, bucket.index)
            await asyncio.sleep(0)  # backward takes time
        await exchange.end_step()
        if exchange.exchanges(step):
            await replica.take_all()
        history.append(replica.flat())
    await exchange.settle()
    await exchange.stop()
    return history


def train_alone(
    sizes: Sequence[int], seed: int, data: Data, steps: range, *, clip_norm: float = 0.0, every: int = 1
) -> list[Array]:
    """One process on the whole batch; ``every`` > 1: with the mean gradient of so many steps at once."""
    replica = NumpyReplica(sizes, seed, clip_norm=clip_norm)
    history: list[Array] = []
    for step in steps:
        replica.backward(*data.share(step, 0, 1), data.inputs.shape[1] * every)
        if (step + 1) % every == 0:
            asyncio.run(replica.update())
            asyncio.run(replica.take_all())
        history.append(replica.flat())
    return history
