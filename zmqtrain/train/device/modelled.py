"""A device that computes nothing but takes the time that a real one would, according to a profile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zmqtrain.events import Recorder
from zmqtrain.exchange.base import Bucket, Optimize, OptimizerSpec, Sharing
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.train.bucket_machine import BucketMachine, Do
from zmqtrain.train.device.memory import Memory, NoMemory
from zmqtrain.train.device.profile import Layer, Profile
from zmqtrain.train.slot import Slot
from zmqtrain.train.work import StepResult
from zmqtrain.waiting import in_time
from zmqtrain.wire.payload import Payload, Value

#: Less than this is what is left of a sleep by the rounding of numbers.
ROUNDING_S = 1e-9
#: Successive layers without a bucket between them are one sleep of at most this many seconds. A slowdown that begins during a
#: sleep takes effect after it.
ONE_SLEEP_S = 0.005


@dataclass(frozen=True, slots=True)
class SpeedFactor:
    """The speed of this device relative to its profile."""

    of_step: Callable[[int], float] = lambda step: 1.0
    """The factor on the times of a step (`zmqtrain.train.device.noise`)."""
    slowdown: Callable[[], float] = lambda: 1.0
    """The factor on the time of work that begins now."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Work without a wait or a handed-over bucket in it."""

    seconds: float
    take: int | None = None
    """Forward: the bucket whose parameters are needed first."""
    complete: tuple[int, ...] = ()
    """Backward: the buckets that may be handed over afterwards, in order."""


@dataclass(frozen=True, slots=True)
class Waited:
    """The times between a worker's forward and its backward."""

    seconds: float
    exposed_s: float
    """Seconds of waiting, without the time in which another process computed for this worker."""


#: Has another process compute the layers between a worker's forward and its backward. Arguments: the step, its samples, and a
#: function to call once everything has been sent.
Behind = Callable[[int, int, Callable[[], Awaitable[None]]], Awaitable[Waited]]


class ModelledReplica:
    """Implements `zmqtrain.exchange.base.Replica` without a model. Everything runs on the event loop's thread."""

    def __init__(
        self,
        profile: Profile,
        *,
        bucket_bytes: int | BucketLimit,
        overlap: bool,
        timeout_s: float,
        recorder: Recorder,
        memory: Memory | None = None,
        speed_factor: SpeedFactor | None = None,
        behind: Behind | None = None,
        slot: Slot | None = None,
    ) -> None:
        """
        Args:
            memory: allocates and fills the payloads; by default zeros in full size.
            behind: has the layers after this worker's own computed by another process.
            slot: the slot shared with other workers, held while this worker computes.
        """
        self._profile, self._timeout_s, self._recorder = profile, timeout_s, recorder
        self._memory = memory or NoMemory.real(profile.optimizer)
        self._speed_factor = speed_factor or SpeedFactor()
        self._behind, self._slot = behind, slot
        make = self._memory.payload
        plans = profile.bucket_plans(bucket_bytes)
        self._buckets = tuple(
            Bucket(index, make(plan, parameters=True), make(plan, parameters=False), 0, plan.names)
            for index, plan in enumerate(plans)
        )
        bucket_of = {name: bucket.index for bucket in self._buckets for name in bucket.names}
        self._forward = tuple(_forward(profile.layers, bucket_of))
        self._backward = tuple(_backward(profile.layers, self._buckets, overlap))
        self._machine = BucketMachine([bucket.names for bucket in self._buckets], overlap=overlap)
        self._answered = [asyncio.Event() for _ in self._buckets]  # since the bucket was handed over
        numel = sum(bucket.parameters.numel for bucket in self._buckets)
        self._update_s = [profile.update_s * bucket.parameters.numel / numel for bucket in self._buckets]
        self._sharing: Sharing | None = None
        self._backward_s = 0.0  # when the backward of the next bucket began
        self._adding = [False] * len(self._buckets)  # whether the next gradient is added to an existing one
        self._on_ready: Callable[[Bucket], None] | None = None
        self.update_s = 0.0

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def hyperparameters(self) -> OptimizerSpec:
        return self._memory.optimizer

    def connect(self, on_ready: Callable[[Bucket], None]) -> None:
        self._on_ready = on_ready

    def optimize(self, when: Optimize) -> None:
        self._machine.when = when

    def share(self, sharing: Sharing) -> None:
        self._sharing = sharing

    def judged(self, finite: bool, step: int) -> bool:
        return finite

    def parameters_ready(self, bucket: Bucket) -> None:
        self._machine.answered(bucket.index)
        self._answered[bucket.index].set()

    def abort(self, error: BaseException) -> None:
        self._machine.abort(error)
        for answered in self._answered:
            answered.set()

    async def update(self, *, hold: bool = False) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(self._profile.update_s * self._speed_factor.slowdown())
        self.update_s += loop.time() - start
        for bucket in self._buckets:
            self._memory.update(bucket, self._gradients(bucket))
            if self._sharing is not None:
                self._sharing.taken(bucket.index)
            if not hold:
                self.parameters_ready(bucket)

    async def beside(self) -> tuple[Mapping[str, Payload], Mapping[str, Value]]:
        await self.take_all()
        return {}, {}

    async def take_beside(self, tensors: Mapping[str, Payload], values: Mapping[str, Value]) -> None:
        return None

    async def step(self, step: int, samples: int, *, hand_over: bool = True) -> StepResult:
        """Forward and backward, taking as long as the profile says, and the waits between them. Without ``hand_over`` the gradients
        are only accumulated."""
        assert self._on_ready is not None, "connect() comes first"
        clock = asyncio.get_running_loop().time
        start, pace = clock(), _Pace()
        scale = self._profile.scaled(samples) * self._speed_factor.of_step(step)
        exposed_s = await self._take_slot(step, pace)
        with self._recorder.span("forward", "compute", step=step):
            for stretch in self._forward:
                if stretch.take is not None:
                    exposed_s += await self._take(stretch.take, step, pace)
                await pace.work(stretch.seconds * scale * self._speed_factor.slowdown())
        waited: Waited | None = None
        if self._behind is not None:
            with self._recorder.span("wait for the FC server", "wait", step=step):
                waited = await self._behind(step, samples, self._give_slot)
            exposed_s += waited.exposed_s + await self._take_slot(step, pace)
            pace.restart()
        if self._sharing is not None:
            before = clock()
            await self._sharing.writable()
            exposed_s += clock() - before
            pace.restart()
        self._backward_s = clock()
        self._machine.begin_backward(last=hand_over)
        with self._recorder.span("backward", "compute", step=step):
            for stretch in self._backward:
                await pace.work(stretch.seconds * scale * self._speed_factor.slowdown())
                for index in stretch.complete:
                    await self._complete(index, step, pace)
            self._machine.end_backward()
            await self._hand_over(step, pace)
        await self._give_slot()
        idle_s = exposed_s if waited is None else exposed_s + waited.seconds - waited.exposed_s
        fc_wait_s = None if waited is None else waited.seconds
        return StepResult(None, samples, clock() - start - idle_s, exposed_s, fc_wait_s)

    async def evaluate(self, share: float) -> None:
        """Take as long as the evaluation of this share of the data."""
        await asyncio.sleep(self._profile.evaluate_s * share * self._speed_factor.slowdown())

    async def take_all(self) -> None:
        pace = _Pace()
        for bucket in self._buckets:
            await self._take(bucket.index, -1, pace)

    async def _take_slot(self, step: int, pace: _Pace) -> float:
        """Wait for this worker's turn on the slot. Returns the seconds waited."""
        if self._slot is None:
            return 0.0
        clock = asyncio.get_running_loop().time
        start = clock()
        await self._slot.take(step)
        pace.restart()
        return clock() - start

    async def _give_slot(self) -> None:
        if self._slot is not None:
            await self._slot.give()

    async def _complete(self, index: int, step: int, pace: _Pace) -> None:
        """The backward has computed the bucket's gradients."""
        bucket, now = self._buckets[index], asyncio.get_running_loop().time()
        self._recorder.add_span(f"backward of bucket {index}", "compute", self._backward_s, now, step=step)
        self._memory.backward(bucket, step, add=self._adding[index])
        self._adding[index] = True
        for name in bucket.names:
            if self._machine.gradient(index, name):
                await self._hand_over(step, pace)
        self._backward_s = asyncio.get_running_loop().time()

    async def _hand_over(self, step: int, pace: _Pace) -> None:
        assert self._on_ready is not None
        for do, index in self._machine.hand_over():
            if do is Do.UPDATE:
                await self._update(index, step, pace)
            elif do is Do.HAND_OVER:
                self._answered[index].clear()
                if self._sharing is not None:
                    self._sharing.produced(index)
                self._on_ready(self._buckets[index])

    async def _update(self, index: int, step: int, pace: _Pace) -> None:
        with self._recorder.span(f"update of bucket {index}", "compute", step=step):
            await pace.work(self._update_s[index] * self._speed_factor.slowdown())
        self._memory.update(self._buckets[index], self._gradients(self._buckets[index]))
        if self._sharing is not None:
            self._sharing.taken(index)

    def _gradients(self, bucket: Bucket) -> Payload:
        """The gradients for an update of the bucket."""
        return bucket.gradients if self._sharing is None else self._sharing.sums[bucket.index]

    async def _take(self, index: int, step: int, pace: _Pace) -> float:
        """Wait for the bucket's parameters. Returns the seconds waited."""
        waited_s = 0.0
        todo = self._machine.take(index)
        if todo is None:
            loop = asyncio.get_running_loop()
            start = loop.time()
            with self._recorder.span(f"parameters of bucket {index}", "wait", step=step):
                held = self._slot is not None and self._slot.held
                await self._give_slot()
                async with in_time("the exchange", f"the parameters of bucket {index}", self._timeout_s):
                    await self._answered[index].wait()
                if held:
                    await self._take_slot(step, pace)
            waited_s = loop.time() - start
            pace.restart()
            todo = self._machine.take(index)
            assert todo is not None, "an answer, or an error, has come"
        for do in todo:
            if do is Do.UPDATE:
                await self._update(index, step, pace)
            elif do is Do.FORGET:
                self._adding[index] = False
        return waited_s


class _Pace:
    """Sleeps for successive durations so that the delays of single sleeps do not add up."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._until = asyncio.get_running_loop().time()

    async def work(self, duration_s: float) -> None:
        self._until += duration_s
        clock = asyncio.get_running_loop().time
        left_s = self._until - clock()
        while left_s > ROUNDING_S:  # uvloop's timers may go off a millisecond early
            await asyncio.sleep(left_s)
            left_s = self._until - clock()


def _forward(layers: Sequence[Layer], bucket_of: dict[str, int]) -> Iterator[Stretch]:
    taken: set[int] = set()
    take, seconds = None, 0.0
    for layer in layers:
        bucket = bucket_of.get(layer.name)
        new = bucket is not None and bucket not in taken
        if new or seconds >= ONE_SLEEP_S:
            if take is not None or seconds:
                yield Stretch(seconds, take)
            take, seconds = None, 0.0
        if new:
            assert bucket is not None
            taken.add(bucket)
            take = bucket
        seconds += layer.forward_s
    yield Stretch(seconds, take)


def _backward(layers: Sequence[Layer], buckets: Sequence[Bucket], overlap: bool) -> Iterator[Stretch]:
    """The layers in reverse order, divided where the machine hands buckets over."""
    bucket_of = {name: bucket.index for bucket in buckets for name in bucket.names}
    machine = BucketMachine([bucket.names for bucket in buckets], overlap=overlap)
    machine.begin_backward(last=True)
    seconds = 0.0
    for layer in reversed(layers):
        seconds += layer.backward_s
        complete: tuple[int, ...] = ()
        if layer.name in bucket_of and machine.gradient(bucket_of[layer.name], layer.name):
            complete = _handed_over(machine)
        if complete or seconds >= ONE_SLEEP_S:
            yield Stretch(seconds, None, complete)
            seconds = 0.0
    machine.end_backward()
    complete = _handed_over(machine)
    if seconds or complete:
        yield Stretch(seconds, None, complete)


def _handed_over(machine: BucketMachine) -> tuple[int, ...]:
    return tuple(bucket for do, bucket in machine.hand_over() if do is Do.HAND_OVER)
