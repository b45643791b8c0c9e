"""A device that computes nothing, but takes the time that a real one would: bytes on the network are real, arithmetic is not.

The profile is a JSON file::

    {"layers": [{"name": "conv1", "numel": 1000, "forward_s": 0.01, "backward_s": 0.02}, ...],
     "update_s": 0.001, "evaluate_s": 0.5, "samples": 50000, "batch_size": 32}

in the order of the forward. Times are those of one worker's step; with ``batch_size`` they are of so many samples and grow with the
worker's. ``dtype`` of a layer defaults to float32.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.events import Recorder
from zmqtrain.exchange.base import Bucket, OptimizerSpec
from zmqtrain.train.buckets import ParameterInfo, plan_buckets
from zmqtrain.train.work import StepResult
from zmqtrain.wire.dtypes import dtype_named
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the modelled model."""

    name: str
    numel: int
    forward_s: float
    backward_s: float
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Profile:
    """How long a real device takes."""

    layers: tuple[Layer, ...]
    update_s: float = 0.0
    evaluate_s: float = 0.0
    samples: int = 1 << 20
    """Samples of the training data."""
    batch_size: int = 0
    """A worker's samples for which the times hold; 0: for any number."""
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec("torch.optim:SGD", ({"lr": 0.0},)))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Raises `UsageError` where the file is missing or is no profile."""
        try:
            values: dict[str, Any] = json.loads(Path(path).read_text())
            layers = tuple(Layer(**layer) for layer in values.pop("layers"))
            profile = cls(layers, **values)
            if not any(layer.numel for layer in layers):
                raise ValueError("no layer has parameters")
            for layer in layers:
                dtype_named(layer.dtype)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"[compute] profile {path} cannot be used: {type(error).__name__}: {error}") from error
        return profile

    def scaled(self, samples: int) -> float:
        """By what times are multiplied for a step of so many samples."""
        return samples / self.batch_size if self.batch_size else 1.0


class ModelledReplica:
    """Implements `zmqtrain.exchange.base.Replica` with memory but no model. Everything on the loop's thread."""

    def __init__(
        self,
        profile: Profile,
        *,
        bucket_bytes: int,
        overlap: bool,
        timeout_s: float,
        recorder: Recorder,
        memory: Callable[[int, str], Payload] | None = None,
    ) -> None:
        """``memory(numel, dtype)`` makes payloads; by default real ones."""
        self._profile, self._overlap, self._timeout_s, self._recorder = profile, overlap, timeout_s, recorder
        make = memory or _zeros
        infos = [
            ParameterInfo(layer.name, layer.numel, dtype_named(layer.dtype).itemsize, layer.dtype, 0) for layer in profile.layers
        ]
        plans = plan_buckets(infos, bucket_bytes)
        self._buckets = tuple(
            Bucket(index, make(plan.numel, plan.dtype), make(plan.numel, plan.dtype), 0, plan.names)
            for index, plan in enumerate(plans)
        )
        self._bucket_of = {name: bucket.index for bucket in self._buckets for name in bucket.names}
        self._open = [asyncio.Event() for _ in self._buckets]
        for gate in self._open:
            gate.set()
        self._error: BaseException | None = None
        self._on_ready: Callable[[Bucket], None] | None = None
        self.update_s = 0.0

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def hyperparameters(self) -> OptimizerSpec:
        return self._profile.optimizer

    def connect(self, on_ready: Callable[[Bucket], None]) -> None:
        self._on_ready = on_ready

    def parameters_ready(self, bucket: Bucket) -> None:
        self._open[bucket.index].set()

    def abort(self, error: BaseException) -> None:
        self._error = self._error or error
        for gate in self._open:
            gate.set()

    async def update(self, *, gradient_scale: float = 1.0, clip: bool = True) -> None:
        await asyncio.sleep(self._profile.update_s)
        self.update_s += self._profile.update_s
        for gate in self._open:
            gate.set()

    async def step(self, step: int, samples: int) -> StepResult:
        """Forward and backward, as long as the profile says, and waits between."""
        assert self._on_ready is not None, "connect() comes first"
        pace, scale = _Pace(), self._profile.scaled(samples)
        layers = self._profile.layers
        exposed_s = 0.0
        with self._recorder.span("forward", "compute", step=step):
            for layer in layers:
                if layer.name in self._bucket_of:
                    exposed_s += await self._take(self._bucket_of[layer.name], step, pace)
                await pace.work(layer.forward_s * scale)
        missing = [len(bucket.names) for bucket in self._buckets]
        following = 0
        with self._recorder.span("backward", "compute", step=step):
            for layer in reversed(layers):
                await pace.work(layer.backward_s * scale)
                if layer.name in self._bucket_of:
                    missing[self._bucket_of[layer.name]] -= 1
                while self._overlap and following < len(missing) and not missing[following]:
                    self._hand_over(following)
                    following += 1
        for index in range(following, len(missing)):
            self._hand_over(index)
        compute_s = scale * sum(layer.forward_s + layer.backward_s for layer in layers)
        return StepResult(0.0, samples, compute_s, exposed_s)

    async def take_all(self) -> None:
        pace = _Pace()
        for bucket in self._buckets:
            await self._take(bucket.index, -1, pace)

    def _hand_over(self, index: int) -> None:
        assert self._on_ready is not None
        self._open[index].clear()
        self._on_ready(self._buckets[index])

    async def _take(self, index: int, step: int, pace: _Pace) -> float:
        """Wait for the bucket's parameters. Returns the seconds."""
        waited_s = 0.0
        if not self._open[index].is_set():
            loop = asyncio.get_running_loop()
            start = loop.time()
            with self._recorder.span(f"parameters of bucket {index}", "wait", step=step):
                async with asyncio.timeout(self._timeout_s):
                    await self._open[index].wait()
            waited_s = loop.time() - start
            pace.restart()
        if self._error is not None:
            raise self._error
        return waited_s


class _Pace:
    """Sleeps for durations one after another, so that what one sleep is late does not add up."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._until = asyncio.get_running_loop().time()

    async def work(self, duration_s: float) -> None:
        self._until += duration_s
        left_s = self._until - asyncio.get_running_loop().time()
        if left_s > 0:
            await asyncio.sleep(left_s)


def _zeros(numel: int, dtype: str) -> Payload:
    payload = TensorPayload.empty(numel, dtype)
    for frame in payload.frames():
        frame[:] = bytes(frame.nbytes)
    return payload
