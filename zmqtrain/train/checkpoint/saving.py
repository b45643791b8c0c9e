"""A worker's part of checkpoints: what is saved, and how it is restored.

Which part holds what depends on who owns it. Servers keep their own pieces; of workers with equal state, the first one keeps it.
The learning-rate schedule is not saved: it is replayed from the start, which gives the same state for any class of schedule.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.base import Exchange, Resumable
from zmqtrain.exchange.checkpoint_part import (
    AS_KEPT,
    COURSE,
    MEMBERS,
    STANDS_IN,
    Mark,
    Part,
    fetch_part,
    send_alone,
    send_part,
    taking_back,
)
from zmqtrain.exchange.grid_era import FetchPart
from zmqtrain.heap import give_back, returning_blocks
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.train.checkpoint.folder import MODEL, WITHOUT_RESUME
from zmqtrain.train.checkpoint.handed_over import HandedOver
from zmqtrain.train.checkpoint.layout import Layout
from zmqtrain.train.checkpoint.payloads import Payloads
from zmqtrain.train.checkpoint.recut import (
    Recut,
    recut_averages,
    recut_servers,
    refuse_unsent_parts,
    tensors_of,
    without_unsent,
)
from zmqtrain.train.checkpoint.regroup import has_unsent, mean_state, regrouped
from zmqtrain.train.checkpoint.settings import BATCH_SIZE, require_optimizer
from zmqtrain.train.checkpoint.spool import Spool
from zmqtrain.train.course import Course
from zmqtrain.train.device.base import Device
from zmqtrain.train.divided import PartConverter
from zmqtrain.train.optimizer_state import ANOTHER_MODEL, load_optimizer_state, optimizer_state
from zmqtrain.train.random_state import random_state, restore_random_state
from zmqtrain.train.replica import TorchReplica
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload

#: Says that the worker's part has all of what averaging keeps.
WHOLE = "whole"
#: What `torch.compile` adds to the names of a module's parameters.
COMPILED = "_orig_mod."
#: Freed blocks of this size and more go back at once while whole tensors are gathered and sent: the heap would keep a hole of each.
_RETURNED_BYTES = 1 << 20


#: Takes a part: its name, its tensors, and its values.
_Put = Callable[[str, Mapping[str, Tensor], Mapping[str, Any]], Awaitable[None]]


class Keeps(Protocol):
    """A position in data (`zmqtrain.train.batches.Batches`)."""

    @property
    def common(self) -> bool: ...

    def state_dict(self) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: object) -> None: ...

    def course(self) -> Course: ...

    def take_course(self, course: Course, step: int, state: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Saver:
    """This worker's identity, as far as checkpoints depend on it."""

    endpoint: Endpoint
    kind: Literal["allreduce", "model_server", "gossip", "averaging"]
    rank: int
    group: int
    position: int
    timeout_s: float
    size: tuple[int, int] = (1, 1)
    """The workers of a group, and among how many of them it divides its batch."""
    groups: int = 1
    data: Keeps | None = None
    """The worker's position in its data."""
    settings: Mapping[str, Value] = field(default_factory=dict)
    """What must be as it was when a run is resumed (`settings_to_resume`)."""
    merged: bool = False
    """Whether this worker has only some layers of the model."""
    any_first: bool = False
    """Whether any worker may turn out to be the first one that is there, from which the others take their parameters."""
    members: tuple[int, ...] | None = None
    """The ranks that train, if these may be fewer than the run's workers."""
    mark: Mark = ()
    """Of the grid on which the run trains, if it may be another one than the job's."""
    source: FetchPart | None = None
    """Where parts come from; ``None``: from the coordinator."""
    whole: bool = False
    """Whether each worker of a group keeps all of what averaging keeps, and not a part of it."""

    async def save(self, step: int, replica: TorchReplica, exchange: Exchange, device: Device) -> None:
        """Send this worker's parts of the checkpoint at ``step``, except the run's model; on return they are on disk. Nothing may
        change in the meantime.

        All workers of a group that divides its model call it together."""
        await self._keep(step, replica, exchange, device, PartConverter.of(replica.model), partial(self._send, step))

    async def hand_over(
        self, into: HandedOver | None, step: int, replica: TorchReplica, exchange: Exchange, device: Device, parts: PartConverter
    ) -> None:
        """As `save`, and with the run's model, for other workers instead of the coordinator. ``parts`` says who calls it together;
        the first of them hands over what it then has ``into`` that, the others into nothing."""

        async def put(name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
            if into is not None:
                into.put(name, tensors, values)

        parts.require_all(_state(replica.model))
        await self._keep(step, replica, exchange, device, parts, put)
        await put(MODEL, await device.run(lambda: _gathered(parts, _state(replica.model))), {"step": step})

    async def _keep(
        self, step: int, replica: TorchReplica, exchange: Exchange, device: Device, parts: PartConverter, put: _Put
    ) -> None:
        values: dict[str, Any] = {"step": step, "settings": dict(self.settings)}
        if self.members is not None:
            values[MEMBERS] = list(self.members)
        if self.kind != "model_server":
            own = optimizer_state(replica.model, replica.optimizer) | (_parameters(replica) if self._apart else {})
            state = await device.run(lambda: _gathered(parts, own))
            if self._keeps_group:
                await put(self._group_part, state, values)
        tensors, random = random_state(device.torch_device)
        buffers = {f"buffer/{name}": buffer for name, buffer in replica.model.named_buffers()}
        tensors |= await device.run(lambda: parts.whole(buffers))
        values |= {"random": random, "exchange": exchange.state_dict()}
        values |= {"layout": self._layout(replica).to_value(), "columns": self.size[1]}
        if self.whole:
            values[WHOLE] = True
        if replica.loss_scale is not None:
            values["loss_scale"] = replica.loss_scale.state()
        if self.data is not None:
            values |= {"data": self.data.state_dict(), COURSE: self.data.course().to_value()}
        added = _added_up(exchange, step)
        if added is not None:
            # These are each worker's own, even if the model is divided, as are the gradients that it will add to them.
            tensors |= {f"gradient/{name}": gradient for name, gradient in replica.memory.added_up().items()}
            values |= {"added up": added, "weight": replica.weight}
        await put(f"worker-{self.rank}", tensors, values)

    async def begin_with_weights(self, replica: TorchReplica, exchange: Exchange, *, state: bool) -> None:
        """Fill the model from what ``[job] weights`` names. ``state``: begin with what the optimizer had kept there, too. Apart
        from that the run begins at step 0."""
        others = await self._restore_into(MODEL, _state(replica.model), PartConverter.of(replica.model))
        if others and not self.merged:
            raise CheckpointError(
                f"[job] weights: the checkpoint's model has {min(others)}, but this model does not: {ANOTHER_MODEL}"
            )
        if state:
            await self._begin_with_state(replica, exchange)
        replica.memory.publish()

    async def _begin_with_state(self, replica: TorchReplica, exchange: Exchange) -> None:
        """What the optimizer had kept in the checkpoint named by ``[job] weights``, wherever this run's optimizers are."""
        own = await self._of_any_worker()
        assert own is not None, "the weights are a checkpoint"
        require_optimizer(own.sidecar.get("settings"), self.settings)
        parts = PartConverter.of(replica.model)
        if self.kind == "model_server":
            with taking_back(own.name):
                was, now = Layout.from_value(own.sidecar.get("layout")), self._layout(replica)
            found = await recut_servers(was, now, self.group, self.position, without_unsent(own), self._kept)
            replace(found, step=0).load_into(exchange)
        elif self._apart:
            load_optimizer_state(replica.model, replica.optimizer, await self._joined_state(self._groups_of(own), parts))
        else:
            kept = await self._restore_into(AS_KEPT + self._group_part, {}, parts)
            load_optimizer_state(replica.model, replica.optimizer, kept)

    async def restore(self, replica: TorchReplica, exchange: Exchange, device: Device) -> int | None:
        """Restore this worker's parts. Returns the step to continue with, or ``None`` if the run begins afresh.

        Parameters that the exchange distributes when it starts (from rank 0, or from servers) are not read here.
        """
        own = await self._fetch(f"worker-{self.rank}")
        if own is None:
            return None
        neighbour = own.sidecar.get(STANDS_IN)
        if isinstance(neighbour, int):
            await self._begin_like(neighbour, replica, exchange)
            return own.step
        self._require_settings(own)
        self._take_course(own)
        was = self._groups_of(own)
        parts = PartConverter.of(replica.model)
        tensors = tensors_of(own)
        buffers = dict(replica.model.named_buffers())
        _fill(own.name, {f"buffer/{name}": buffer for name, buffer in buffers.items()}, parts.cut(tensors))
        if self.kind == "allreduce" and (self.rank == 0 or self.any_first or parts.divided):
            others = await self._restore_into(MODEL, _state(replica.model), parts)
            if others:
                raise CheckpointError(f"the checkpoint's model has {min(others)}, but this model does not: {ANOTHER_MODEL}")
        frozen = {name.removeprefix("frozen/") for name in replica.untrained(buffers=False)}
        if self.kind == "model_server" and frozen and (self.rank == 0 or self.any_first):  # the servers do not have these
            targets = {name: tensor for name, tensor in _state(replica.model).items() if name in frozen}
            await self._restore_into(MODEL, targets, parts)
        if self._apart and was != self.groups:
            await self._restore_into(MODEL, _state(replica.model), parts)
            load_optimizer_state(replica.model, replica.optimizer, await self._joined_state(was, parts))
        elif self.kind != "model_server":
            into = _parameters(replica) if self._apart else {}
            load_optimizer_state(replica.model, replica.optimizer, await self._restore_into(self._group_part, into, parts))
        replica.memory.publish()
        recut = await self._recut(own, replica, exchange)
        state = {} if recut is not None else await self._exchange_state(was, own, exchange)
        with taking_back(own.name):
            if replica.loss_scale is not None:
                replica.loss_scale.load(own.sidecar.get("loss_scale"))
            if recut is not None:
                recut.load_into(exchange)
            else:
                exchange.load_state_dict(state)
            if self.data is not None:
                self.data.load_state_dict(own.sidecar.get("data"))
            self._restore_gradients(own, tensors, replica, exchange)
            resized = recut is not None and recut.was.group_size != recut.now.group_size
            if was == self.groups and not resized:  # otherwise two may have begun with the same part
                restore_random_state(device.torch_device, tensors, own.sidecar["random"])  # type: ignore[arg-type]
        return own.step

    async def take_course(self) -> None:
        """For a worker that comes late to a run: which samples a step takes, if the run was resumed."""
        part = await self._of_any_worker()
        if part is not None:
            self._take_course(part)

    async def _of_any_worker(self) -> Part | None:
        """The part of the first worker that was there when the checkpoint was written; ``None`` if the run begins afresh."""
        part = await self._fetch(AS_KEPT + "worker-0")
        while part is not None and isinstance(neighbour := part.sidecar.get(STANDS_IN), int):
            part = await self._fetch(f"{AS_KEPT}worker-{neighbour}")
        return part

    def _take_course(self, own: Part) -> None:
        course = _course_of(own)
        if self.data is not None and course is not None:
            with taking_back(own.name):
                self.data.take_course(course, own.step, own.sidecar.get("data"))

    def _groups_of(self, own: Part) -> int:
        """The number of groups of the run that wrote the checkpoint."""
        course = _course_of(own)
        return self.groups if course is None else course.groups

    async def _joined_state(self, was: int, parts: PartConverter) -> dict[str, Tensor]:
        """The optimizer's state of this group, which has the run's model: of ``was`` groups, the mean over those that come together
        in this one, or the one that this one is a copy of."""
        first = self.group % was
        groups = range(first, was, self.groups) if self.group < was else (first,)
        found = [await self._restore_into(f"{AS_KEPT}group-{group}", {}, parts) for group in groups]
        there = [state for state in found if state]  # a part has parameters, too, unless its group was lost
        if not there:
            neighbour = (await self._kept(f"group-{first}")).sidecar[STANDS_IN]
            assert isinstance(neighbour, int)
            there = [await self._restore_into(AS_KEPT + self._group_part_of(neighbour), {}, parts)]
        return mean_state([{name: each for name, each in state.items() if name.startswith("optimizer/")} for state in there])

    async def _exchange_state(self, was: int, own: Part, exchange: Exchange) -> dict[str, Any]:
        """The exchange's state for this number of groups, where there were ``was``."""
        if was == self.groups:
            with taking_back(own.name):
                return dict(own.sidecar["exchange"])  # type: ignore[arg-type]
        size, everyone = self.size[0], self.kind == "allreduce"  # whose workers all exchange the same elements
        ranks = range(was * size) if everyone else range(self.position, was * size, size)
        kept: Any = own.sidecar["exchange"]
        others: list[Any] = []
        with taking_back(own.name):
            if has_unsent(self.kind, kept):
                others = [(await self._kept(f"worker-{rank}")).sidecar.get("exchange", {}) for rank in ranks]
            now = self.groups * (size if everyone else 1)
            # Each push is applied by itself, or as a part of a mean.
            share = 1.0 if self.kind != "model_server" or exchange.synchronous else was / self.groups
            return regrouped(self.kind, own.step, kept, others, ranks=now, share=share)

    def _require_settings(self, own: Part) -> None:
        """Raise `CheckpointError` unless the run trains on from where the checkpoint's has stopped."""
        kept = own.sidecar.get("settings", {})
        for name, mine in self.settings.items():
            was = kept.get(name, mine) if isinstance(kept, Mapping) else None
            if was != mine and not (name == BATCH_SIZE and COURSE in own.sidecar):  # which says where other batches go on
                raise CheckpointError(
                    f"the checkpoint of step {own.step} was written with {name} = {was!r:.60}, but this run has {mine!r}, so it "
                    f"would not train on from there: restore the old value, or {WITHOUT_RESUME}"
                )

    def _layout(self, replica: TorchReplica) -> Layout:
        return Layout.of(replica, PartConverter.of(replica.model).shards, self.size[0])

    async def _recut(self, own: Part, replica: TorchReplica, exchange: Exchange) -> Recut | None:
        """What the exchange begins with, if the checkpoint was written with other parts of the model, buckets or pieces of servers;
        else ``None``. Raises `CheckpointError` for what cannot be divided anew."""
        kept = own.sidecar.get("layout")
        if kept is None:  # of a release that resumed on the same grid only
            return None
        with taking_back(own.name):
            was, now = Layout.from_value(kept), self._layout(replica)
        course = _course_of(own)
        groups = self._groups_of(own)
        regrouped = self.data is not None and course is not None and not course.divides_as(self.data.course())
        others = (was.group_size, was.parameters, own.sidecar.get("columns")) != (now.group_size, now.parameters, self.size[1])
        if (others or regrouped) and own.sidecar.get("added up") is not None:
            raise CheckpointError(
                f"the checkpoint of step {own.step} was written between two exchanges of gradients ([exchange] every), when each "
                "worker has added up its own: resume with the groups, batch_size, grid and group_size with which it was written, "
                "or from a checkpoint right after an exchange"
            )
        if was == now and not self._held_otherwise(own, replica, exchange):
            return None
        common = self.data is not None and self.data.common
        reads_apart = own.sidecar.get("data") is not None and not common and (course is None or course.since is None)
        if self.size[1] != own.sidecar.get("columns") and reads_apart:
            was_columns = f"{own.sidecar.get('columns')!r:.20}"
            raise CheckpointError(
                "the checkpoint says how far each worker has read its stream, which is divided in another way among the "
                f"{self.size[1]} of a group now: resume with {was_columns} ([compute] group_size, or the columns of the grid)"
            )
        fetch = self._kept
        if self.kind == "averaging":
            wholes = bool(own.sidecar.get(WHOLE)), self.whole
            return await recut_averages(was, now, self.group % groups, self.position, own, fetch, whole=wholes)
        if self.kind == "model_server":
            return await recut_servers(was, now, self.group, self.position, own, fetch)
        if self.kind == "allreduce":
            refuse_unsent_parts(own)
        return Recut(was, now)

    def _held_otherwise(self, own: Part, replica: TorchReplica, exchange: Exchange) -> bool:
        """Whether others keep the model, bucket by bucket, than when the checkpoint was written."""
        if self.kind == "averaging":
            return bool(own.sidecar.get(WHOLE)) != self.whole
        if not isinstance(exchange, Resumable):
            return False
        kept: Any = own.sidecar.get("exchange")
        pieces = kept.get("pieces") if isinstance(kept, Mapping) else None
        return isinstance(pieces, list) and pieces != exchange.division(replica)

    async def _kept(self, name: str) -> Part:
        """A part as the run that wrote the checkpoint named it."""
        part = await self._fetch(AS_KEPT + name)
        assert part is not None, "the run resumes a checkpoint"
        return part

    @staticmethod
    def _restore_gradients(own: Part, tensors: Mapping[str, Tensor], replica: TorchReplica, exchange: Exchange) -> None:
        """Restore the gradients that were added up since the last exchange."""
        was, now = own.sidecar.get("added up"), _added_up(exchange, own.step)
        if was != now:
            raise CheckpointError(
                f"the checkpoint of step {own.step} was written {_in_words(was)}, but in this run that step comes "
                f"{_in_words(now)}: resume with the old value of [exchange] every, or from another checkpoint"
            )
        added = {name.removeprefix("gradient/"): tensor for name, tensor in tensors.items() if name.startswith("gradient/")}
        replica.memory.go_on_adding_to(added)
        replica.weight = float(own.sidecar.get("weight", 0.0))  # type: ignore[arg-type]

    async def _begin_like_served(self, neighbour: int, replica: TorchReplica, exchange: Exchange) -> None:
        """As `_begin_like`, with servers: a worker's own are only the buffers, and where its data goes on, which all share."""
        own = await self._kept(f"worker-{neighbour}")
        self._take_course(own)
        buffers = {f"buffer/{name}": buffer for name, buffer in replica.model.named_buffers()}
        _fill(own.name, buffers, PartConverter.of(replica.model).cut(tensors_of(own)))
        replica.memory.publish()
        recut = await self._recut(own, replica, exchange)
        with taking_back(own.name):
            if replica.loss_scale is not None:
                replica.loss_scale.load(own.sidecar.get("loss_scale"))
            if recut is not None:
                recut.load_into(exchange)
            if self.data is not None:
                self.data.load_state_dict(own.sidecar.get("data"))

    async def _begin_like(self, neighbour: int, replica: TorchReplica, exchange: Exchange) -> None:
        """The checkpoint was written after this worker was lost: begin with a neighbour's state. With gossip the
        parameters are those of the run's model."""
        parts = PartConverter.of(replica.model)
        if self.kind == "model_server":
            await self._begin_like_served(neighbour, replica, exchange)
            return
        own = await self._kept(f"worker-{neighbour}")
        self._take_course(own)
        was = self._groups_of(own)
        await self._restore_into(MODEL, _state(replica.model), parts)
        if self._apart and was != self.groups:
            optimizer = await self._joined_state(was, parts)
        else:
            into = _parameters(replica) if self.kind == "averaging" else {}
            others = await self._restore_into(AS_KEPT + self._group_part_of(neighbour), into, parts)
            optimizer = {name: tensor for name, tensor in others.items() if name.startswith("optimizer/")}
        load_optimizer_state(replica.model, replica.optimizer, optimizer)
        replica.memory.publish()
        if own.sidecar.get("added up") is not None:
            raise CheckpointError(
                f"the checkpoint of step {own.step} was written between two exchanges of gradients ([exchange] every), while a "
                "worker was lost: resume from a checkpoint right after an exchange"
            )
        recut = await self._recut(own, replica, exchange)
        state = {} if recut is not None else await self._exchange_state(was, own, exchange)
        if was == self.groups:  # what was lost by rounding is each worker's own
            state = {name: value for name, value in state.items() if not name.startswith("lost/")}
        with taking_back(own.name):
            if replica.loss_scale is not None:
                replica.loss_scale.load(own.sidecar.get("loss_scale"))
            if recut is not None:
                recut.load_into(exchange)
            else:
                exchange.load_state_dict(state)
            if self.data is not None and self.data.common:
                self.data.load_state_dict(own.sidecar.get("data"))

    @property
    def _apart(self) -> bool:
        """Whether each group has a model of its own."""
        return self.kind in ("averaging", "gossip")

    @property
    def _group_part(self) -> str:
        return self._group_part_of(self.rank)

    def _group_part_of(self, rank: int) -> str:
        """The part with the optimizer's state of a worker."""
        return f"group-{rank // self.size[0]}" if self._apart else "group-0"

    @property
    def _keeps_group(self) -> bool:
        if self.kind == "allreduce":  # all have the same state; the first who is there keeps it
            return self.rank == (min(self.members) if self.members else 0)
        own = range(self.group * self.size[0], (self.group + 1) * self.size[0])
        return self._apart and self.rank == min((rank for rank in self.members or () if rank in own), default=own.start)

    async def _send(self, step: int, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        with _lean(tensors):
            await send_part(self.endpoint, step, name, Payloads(tensors), values, timeout_s=self.timeout_s, mark=self.mark)

    async def _fetch(
        self, name: str, into: Mapping[str, Payload] | None = None, keep: Callable[[str, Payload], Payload] | None = None
    ) -> Part | None:
        if self.source is not None:
            return await self.source(name, into, keep)
        return await fetch_part(self.endpoint, name, timeout_s=self.timeout_s, into=into, keep=keep)

    async def _restore_into(self, name: str, targets: Mapping[str, Tensor], parts: PartConverter) -> dict[str, Tensor]:
        """Fill ``targets`` from the part; targets in plain host memory are received in place. Returns the part's other tensors.

        Those of a divided model are cut, one after another as they come: the whole model is never in memory."""

        def cut(key: str, received: Payload) -> Payload:
            assert isinstance(received, TensorPayload)
            key = plain_name(key) if name == MODEL else key
            shard = parts.shards.get(key)
            if key in targets and shard is not None and tuple(received.tensor.shape) != shard.shape:
                raise CheckpointError(  # whose whole may be as large as this worker's part
                    f"the checkpoint's {key} has the shape {list(received.tensor.shape)}, but the model's has {list(shard.shape)}: "
                    f"{ANOTHER_MODEL}"
                )
            return TensorPayload.of(parts.cut({key: received.tensor})[key])

        whole = {} if parts.divided else targets
        plain = {key: t for key, t in whole.items() if t.device.type == "cpu" and t.is_contiguous()}
        into = {key: TensorPayload.of(tensor) for key, tensor in plain.items()}
        part = await self._fetch(name, into, cut if parts.divided else None)
        if part is None:
            raise CheckpointError(f"the checkpoint has no part {name}: use an earlier checkpoint")
        tensors = tensors_of(part)
        if name == MODEL:  # which another program may have written
            tensors = {plain_name(key): tensor for key, tensor in tensors.items()}
        _fill(name, targets, {key: tensor for key, tensor in tensors.items() if key in targets})
        return {key: tensor for key, tensor in tensors.items() if key not in targets}


def _course_of(own: Part) -> Course | None:
    """Which samples a step took; ``None`` if the checkpoint is of a release that did not say it."""
    with taking_back(own.name):
        return Course.from_value(own.sidecar[COURSE]) if COURSE in own.sidecar else None  # type: ignore[arg-type]


def _added_up(exchange: Exchange, step: int) -> list[Value] | None:
    """Over how many steps gradients have been added up before ``step``, and how many are still to come; ``None`` if not at all."""
    since = 0
    while since < step and not exchange.exchanges(step - 1 - since):
        since += 1
    if not since:
        return None
    to_come = 1
    while not exchange.exchanges(step - 1 + to_come):
        to_come += 1
    return [since, to_come]


def _in_words(added: object) -> str:
    match added:
        case [since, to_come]:
            return f"{since!r:.20} steps after an exchange of gradients and {to_come!r:.20} before the next"
    return "right after an exchange of gradients"


def whole_state(model: nn.Module, *, copied: bool, to: int = 0) -> Mapping[str, Tensor]:
    """The model's ordinary state_dict, with the task's names, and whole even if the model is divided. Called in the compute thread.

    All workers of a group that divides the model call it together; that of position ``to`` has the state, and the others none.
    Without ``copied``, tensors may alias the model's."""
    parts, state = PartConverter.of(model), _state(model)
    if parts.divided:
        return _gathered(parts, state, to)
    return {name: tensor.detach().clone() if copied else tensor for name, tensor in state.items()}


def _gathered(parts: PartConverter, tensors: Mapping[str, Tensor], to: int = 0) -> Mapping[str, Tensor]:
    """Whole tensors, on the group's worker ``to``: not in its memory, where they may not fit beside its part of the model."""
    if not parts.divided:
        return tensors
    give_back()
    with returning_blocks(_RETURNED_BYTES):
        return Spool(parts.gathered(tensors, to))


async def send_model(
    endpoint: Endpoint,
    step: int,
    state: Mapping[str, Tensor],
    about: Mapping[str, Value],
    *,
    alone: bool,
    timeout_s: float,
    mark: Mark = (),
) -> None:
    """Send the run's model at ``step``, as a part of its checkpoint or ``alone``; on return it is on disk."""
    values = {"step": step, **about}
    with _lean(state):
        send = send_alone if alone else send_part
        await send(endpoint, step, MODEL, Payloads(state), values, timeout_s=timeout_s, mark=mark)


def _lean(state: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Around the sending of tensors that are not in memory before."""
    return returning_blocks(_RETURNED_BYTES) if isinstance(state, Spool) else nullcontext()


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The model's ordinary state_dict, named as if nothing were compiled. Tensors alias the model's."""
    return {plain_name(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def plain_name(name: str) -> str:
    """The name of a parameter or buffer, without what `torch.compile` adds to it."""
    return name.replace(COMPILED, "")


def _parameters(replica: TorchReplica) -> dict[str, Tensor]:
    return {f"parameter/{name}": parameter.detach() for name, parameter in replica.model.named_parameters()}


def _fill(part: str, targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy each of ``tensors`` into the target of the same name. Raises `CheckpointError` if they do not fit."""
    for name, target in targets.items():
        source = tensors.get(name)
        if source is None:
            raise CheckpointError(f"the checkpoint's part {part} has no {name}: {ANOTHER_MODEL}")
        if source.dtype != target.dtype or source.shape != target.shape:
            raise CheckpointError(
                f"the checkpoint's {name} is {source.dtype} {list(source.shape)}, but the model's is {target.dtype} "
                f"{list(target.shape)}: {ANOTHER_MODEL}"
            )
        if source.data_ptr() != target.data_ptr():
            with torch.no_grad():
                target.copy_(source)
