"""A worker's work on a modelled device. No torch, no task, no checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import barrier, broadcast
from zmqtrain.data.background import AtOnce
from zmqtrain.data.blocks import PhantomContents
from zmqtrain.data.division import Span, length_of
from zmqtrain.data.partition import Partition, even_bounds
from zmqtrain.data.ring_loader import RingLoader
from zmqtrain.events import EventValue
from zmqtrain.exchange.base import Bucket, Exchange
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.train.batches import ring_loader
from zmqtrain.train.callbacks import Callbacks
from zmqtrain.train.device.memory import SmallMemory, differences, divided, exact, expected_parameters, make_memory, numbers_of
from zmqtrain.train.device.modelled import ModelledReplica, SpeedFactor
from zmqtrain.train.device.noise import Noise
from zmqtrain.train.device.profile import Profile
from zmqtrain.train.remote_layers import ModelledRemoteLayers
from zmqtrain.train.shares import Shares
from zmqtrain.train.slot import Slot
from zmqtrain.train.work import ModelState, StepResult
from zmqtrain.wire.payload import Value


class ModelledWork:
    """Implements `zmqtrain.train.work.Work` by waiting.

    Payloads are what ``[simulation] payload`` says, and real if it is not set: a simulation sets it before it starts workers.
    """

    def __init__(
        self, context: RoleContext, members: Members, profile: Profile, remote: ModelledRemoteLayers | None = None
    ) -> None:
        """``profile``: of the layers that this worker computes. ``remote``: the layers after them, if another process has them."""
        topology, placement, role = context.topology, context.placement, context.role
        compute, seed = topology.compute, topology.job.seed
        self._context, self._members = context, members
        self._profile, self._remote = profile, remote
        payload = topology.simulation.payload or "real"
        self._memory = make_memory(payload, self._profile, topology, role.index, context.arena, late=members.late)
        noise = Noise(compute.noise.kind, compute.noise.spread, compute.noise.straggler_chance, compute.noise.straggler_factor)
        self._replica = ModelledReplica(
            self._profile,
            bucket_bytes=BucketLimit.of(context.topology),
            overlap=compute.overlap,
            timeout_s=context.timeouts.barrier_s,
            recorder=context.recorder,
            memory=self._memory,
            speed_factor=SpeedFactor(lambda step: noise.factor(seed, role.index, step), context.slowdown),
            behind=remote,
            slot=Slot.of(context),
        )
        self._partition = Partition(self._profile.samples, placement.groups, placement.group_size, compute.batch_size, seed, "none")
        self.shares = Shares.of(topology, placement, role)
        self._ring: RingLoader | None = None
        if topology.data.shuffle == "ring":
            contents = PhantomContents(topology.data.sample_size or 0)
            self._ring = ring_loader(context, self._profile.samples, members, contents, AtOnce())
        if isinstance(self._memory, SmallMemory) and members.survives:
            if topology.exchange.kind == "model_server" or members.takes_turns:
                self._memory.place = self._place
            if members.divides:
                self._memory.spans = members.spans
            elif divided(topology):
                self._memory.spans = self._spans
        self._update_s = 0.0
        self._steps = 0
        self._loading_s = topology.network.loading().get(role.host, 0.0)
        self._loads_since: float | None = None  # when the loader began with the next batch
        self.callbacks = Callbacks((), role.index)

    @property
    def lr(self) -> None:
        return None

    async def begin_alike(self, group: Group, restored: bool) -> None:
        return None

    async def compare(self, done: int, first: int) -> None:
        return None

    async def call_back(self) -> None:
        return None

    @property
    def replica(self) -> ModelledReplica:
        return self._replica

    @property
    def whole_updates(self) -> bool:
        return False

    @property
    def steps_per_epoch(self) -> int:
        return self._partition.steps_per_epoch

    def end(self, epochs: int) -> int | None:
        return self._partition.end(epochs)

    def trained(self, step: int) -> int:
        return self._partition.trained(step)

    async def take_course(self, endpoint: Endpoint) -> None:
        return None

    def _place(self, step: int) -> tuple[int, int]:
        """The rank and the step to which this worker's batch belongs as long as nobody is lost."""
        slot = self._members.turn(step)
        assert slot is not None, f"this worker does not train step {step}"
        of, group = slot.place(self._context.placement.groups)
        return group, of

    def _spans(self, step: int) -> Sequence[Span]:
        """This worker's samples of its team's batch, by their positions in the run."""
        number = step * self._context.placement.groups + self._context.role.group
        if self._members.slots is not None:
            slot = self._members.turn(step)
            assert slot is not None, f"this worker does not train step {step}"
            number = slot.number
        start, stop = even_bounds(self._partition.batch_size, *reversed(self._members.share(step)))
        before = number * self._partition.batch_size
        return [(before + start, before + stop)]

    async def more(self, step: int) -> bool:
        return self._members.slots is None or self._members.slot(step) is not None

    def epoch(self, step: int) -> int:
        if self._members.divides:
            return self._members.spans(step)[0][0] // (self.steps_per_epoch * self._partition.step_samples)
        of = step if self._members.slots is None else self._place(step)[1]
        return of // self.steps_per_epoch

    @property
    def evaluates(self) -> bool:
        return self._profile.evaluate_s > 0

    def describe(self) -> dict[str, EventValue]:
        return {"parameters": self._profile.numel, "buckets": len(self._replica.buckets), "device": "modelled"}

    def connect(self, on_ready: Callable[[Bucket], None]) -> None:
        self._replica.connect(on_ready)

    async def restore(self, endpoint: Endpoint, exchange: Exchange) -> int | None:
        return None

    @property
    def keeps(self) -> bool:
        return False

    async def save(self, endpoint: Endpoint, exchange: Exchange, step: int) -> None:
        return None

    async def keep_merged(self, step: int, *, save: bool) -> None:
        return None

    async def model_state(self, step: int, *, copied: bool, to: int = 0) -> ModelState:
        return {}

    async def send_model(
        self, endpoint: Endpoint, step: int, state: ModelState, about: Mapping[str, Value], *, alone: bool
    ) -> None:
        return None

    async def train_step(self, step: int, *, ahead: bool, hand_over: bool = True) -> StepResult:
        if self._remote is not None:
            self._remote.begin_step(step)
        data_s = await self._load()
        samples = await self._samples(step)
        result = replace(await self._replica.step(step, samples, hand_over=hand_over), data_s=data_s)
        if self._ring is not None:
            self._ring.used(step)
        self._steps = step + 1
        return result

    async def _samples(self, step: int) -> int:
        if self._ring is not None:
            return len((await self._ring.block(step)).ids)
        if self._members.splits:
            return length_of(self._spans(step))
        if not self._members.divides:
            return self.shares.samples(step)
        return length_of(self._members.spans(step))

    async def _load(self) -> float:
        """Wait for the batch, which was loaded during the previous step. Returns how long."""
        if not self._loading_s:
            return 0.0
        clock = asyncio.get_running_loop().time
        asked = clock()
        since = asked if self._loads_since is None else self._loads_since
        await asyncio.sleep(max(0.0, since + self._loading_s - asked))
        self._loads_since = clock()
        return self._loads_since - asked

    def after_step(self) -> None:
        return None

    def sat_out(self, step: int) -> None:
        return None

    def updating_s(self) -> float:
        before, self._update_s = self._update_s, self._replica.update_s
        return self._update_s - before

    async def quiet(self) -> None:
        await self._replica.take_all()

    async def evaluate(self, group: Group, tag: str, *, still: bool = False) -> dict[str, float]:
        await self.quiet()
        await self._replica.evaluate(1.0 / group.size)
        await barrier(group, (tag, "done"))
        return {}

    def state_mean(self, group: Group) -> None:
        self._state_model(group)
        if isinstance(self._memory, SmallMemory) and group.size == self._context.placement.world_size:
            self._state_values(self._memory)

    async def make_equal(self, group: Group, tag: str) -> float:
        """With small payloads, report whether the parameters have their expected values, and compare them with the first
        member's."""
        if not isinstance(self._memory, SmallMemory):
            return 0.0
        self._state_model(group)
        self._state_values(self._memory)
        spread = 0.0
        for bucket in self._replica.buckets:
            mine = numbers_of(bucket.parameters)
            before_it = mine.copy()
            await broadcast(group, bucket.parameters, (tag, bucket.index))
            spread = max(spread, float(np.abs(mine - before_it).max(initial=0.0)))
        return spread

    async def close(self, timeout_s: float) -> None:
        if self._remote is not None:
            await self._remote.close()
        if self._ring is not None:
            await self._ring.close(timeout_s)

    def _state_model(self, group: Group) -> None:
        if isinstance(self._memory, SmallMemory):
            values = self._memory.values(self._replica.buckets)
            self._context.recorder.audit("model", values=values, members=group.members)

    def _state_values(self, memory: SmallMemory) -> None:
        context = self._context
        topology = context.topology
        late = self._members.late  # it may have begun with the last step
        known = not late and exact(topology) and (topology.exchange.kind != "model_server" or topology.exchange.policy == "sync")
        if known:
            expected = expected_parameters(self._profile, topology, self._steps)
            context.recorder.audit("values", wrong=differences(memory.values(self._replica.buckets), expected))
