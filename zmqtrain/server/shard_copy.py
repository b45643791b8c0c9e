"""One copy of a shard that several servers have: equal copies that carry out the same operations in the same order stay equal.

All arithmetic depends on the operations alone, and on nothing like time or the order of arrival, so copies are equal bit by bit on
processors that compute alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from zmqtrain.errors import ProtocolError
from zmqtrain.events import EventValue, Recorder
from zmqtrain.exchange.checkpoint_part import copy_of_received, pack_manifest, unpack_manifest
from zmqtrain.exchange.server_messages import Configuration, ReadMeta, kept_label, shown_tag
from zmqtrain.net.endpoint import PeerId
from zmqtrain.server.aggregator import Push
from zmqtrain.server.checkpoint import keep_pieces, restore_pieces
from zmqtrain.server.fill import make_entries
from zmqtrain.server.gate import Gate
from zmqtrain.server.lives import Lives, told_change
from zmqtrain.server.operations import Operation, own_copy
from zmqtrain.server.parse import parse_push
from zmqtrain.server.serving import ServerTools, Serving, Shard
from zmqtrain.server.shard_entry import Loan
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload


@dataclass(slots=True)
class Kept:
    """The state at a checkpoint that is not complete yet."""

    tensors: dict[str, Tensor]
    sidecar: dict[str, Value]
    shown: dict[int, Loan] = field(default_factory=dict)
    """The values of pieces, if workers read them."""


class CopyRecorder:
    """Records what a copy does; the auditor is told whose."""

    def __init__(self, recorder: Recorder, shard: int) -> None:
        self._recorder, self._shard = recorder, shard
        self.span, self.add_span = recorder.span, recorder.add_span

    def event(self, kind: str, /, *, step: int | None = None, **values: EventValue) -> None:
        self._recorder.event(kind, step=step, **values)

    def audit(self, what: str, /, **values: object) -> None:
        self._recorder.audit(what, shard=self._shard, **values)


class ShardCopy:
    """The copy. Hold its ``lock`` for everything."""

    def __init__(
        self, tools: ServerTools, configuration: Configuration, number: int, shard: Shard, *, first_step: int, gate: Gate
    ) -> None:
        """``number``: of the shard, whose pieces ``shard`` has already. ``gate``: what all that it sends must pass."""
        self.number, self.configuration, self.shard = number, configuration, shard
        self.recorder = CopyRecorder(tools.recorder, number)
        own = replace(tools, recorder=self.recorder, settings=replace(tools.settings, index=number))
        self.serving = Serving(own, configuration, shard, first_step=first_step, finished=frozenset(), gate=gate)
        self.lives = Lives(self.serving, configuration.groups, configuration.elastic)
        self.lock: asyncio.Lock = self.serving.lock
        self.done = 0
        """The number of the last operation that was carried out."""
        self.kept: dict[int, Kept] = {}
        """The checkpoints, by step, that are not complete yet."""
        self.kept_ever: set[int] = set()
        self._waiting: dict[tuple[int, int], Operation] = {}  # (piece, group) of pushes that are not applied yet

    def parse(self, operation: Operation) -> Push:
        """The push. Raises `ProtocolError`."""
        sender, tag = operation.arguments
        assert operation.payload is not None
        return parse_push(sender, tuple(tag), operation.payload, self.shard.entries, self.configuration.groups)

    async def perform(self, operation: Operation, number: int, push: Push | None = None) -> None:
        """Carry out the next operation. ``push``: what `parse` returns, if that is known."""
        arguments = operation.arguments
        match operation.kind:
            case "push":
                await self._push(operation, push or self.parse(operation))
            case "drop":
                await self.lives.drop(*arguments)
            case "change":
                await self.lives.change(told_change(arguments))
            case "rest":
                await self.lives.rest(*arguments)
            case "finish":
                self.lives.finish(*arguments)
            case "keep":
                self._keep(*arguments)
            case "free":
                self._free(*arguments)
            case _:
                raise ProtocolError(f"{operation.kind!r:.40} is not an operation on a shard")
        self.done = number
        if self._waiting and operation.kind in ("drop", "change", "rest"):  # others may have waited for these only
            keeps = self.serving.aggregator.keeps
            self._waiting = {where: each for where, each in self._waiting.items() if keeps(where[0])}

    async def _push(self, operation: Operation, push: Push) -> None:
        assert operation.payload is not None
        key = push.piece, push.group
        self._waiting[key] = operation
        await self.serving.push(push, operation.payload.nbytes)
        if not self.serving.aggregator.keeps(push.piece):
            for group in range(len(self.configuration.groups)):
                self._waiting.pop((push.piece, group), None)

    def _keep(self, step: int, show: bool) -> None:
        if step in self.kept_ever or not self.shard.entries:  # asked for once more, in place of a worker that was lost
            return
        self.kept_ever.add(step)
        entries = self.shard.entries
        kept = self.kept[step] = Kept(*keep_pieces(entries, step, self.shard.limit, self.shard.recovery))
        if show:
            kept.shown = {piece: entry.lend(ReadMeta(entry.version, 0).to_value()) for piece, entry in entries.items()}

    def _free(self, step: int) -> None:
        kept = self.kept.pop(step, None)
        if kept is not None:
            for loan in kept.shown.values():
                loan.give_back()

    def show(self, label: str, group: int) -> None:
        """Send the group the values of all pieces: those at a checkpoint if the label is one's, otherwise those of now."""
        kept = next((kept for step, kept in self.kept.items() if kept_label(step) == label), None)
        for piece, entry in self.shard.entries.items():
            loan = None if kept is None else kept.shown.get(piece)
            if loan is None:
                self.serving.send_values(group, piece, shown_tag(piece, label))
            else:
                self.serving.send(group, entry, Loan(loan.payload), shown_tag(piece, label))

    def state_held(self, *, backup: bool) -> None:
        """Tell the auditor the final state."""
        if backup:
            pieces = {index: (entry.piece, entry.memory()) for index, entry in self.shard.entries.items()}
            self.recorder.audit("backup", pieces=pieces)
        else:
            self.shard.state_held(self.recorder)

    # A copy for another server.

    def put_back(self, operations: Sequence[Operation]) -> None:
        """Pushes had arrived that are not applied yet."""
        pushes = [self.parse(operation) for operation in operations]
        of_piece: dict[int, list[int]] = {}
        for push in pushes:
            of_piece.setdefault(push.piece, []).append(push.group)
        for push, operation in zip(pushes, operations, strict=True):
            self.serving.aggregator.put_back(push, of_piece[push.piece])
            self._waiting[push.piece, push.group] = operation

    def packed(self) -> list[Payload]:
        """The messages from which another server makes an equal copy (`Incoming`). Their memory does not change."""
        shard, aggregator = self.shard, self.serving.aggregator
        tensors, pieces = keep_pieces(shard.entries, self.done, shard.limit, shard.recovery)
        payloads: dict[str, Payload] = {f"now/{name}": TensorPayload.of(tensor) for name, tensor in tensors.items()}
        for step, kept in self.kept.items():
            payloads |= {f"kept/{step}/{name}": TensorPayload.of(tensor) for name, tensor in kept.tensors.items()}
            payloads |= {f"shown/{step}/{piece}": own_copy(loan.payload) for piece, loan in kept.shown.items()}
        if self.configuration.phantom:
            payloads |= {f"size/{piece}": entry.memory() for piece, entry in shard.entries.items()}
        sidecar: dict[str, Any] = {
            "configuration": self.configuration.to_value(),
            "done": self.done,
            "pieces": pieces,
            "kept": [[step, kept.sidecar] for step, kept in self.kept.items()],
            "kept_ever": sorted(self.kept_ever),
            "aggregator": aggregator.state(),
            "lives": self.lives.state(),
            "staleness": [[*item] for item in shard.staleness.items()],
            "batches": [[*item] for item in shard.batches.items()],
            "last_staleness": [[*where, staleness] for where, staleness in shard.last_staleness.items()],
        }
        waiting = [operation.message(self.done, lasting=False, kind="pending") for operation in self._waiting.values()]
        return [
            pack_manifest(payloads, sidecar).with_meta(["begin", self.done]),
            *(payload.with_meta(["tensor", 0]) for payload in payloads.values()),
            *waiting,
            ValuePayload(["ready", self.done]),
        ]


class Incoming:
    """A copy that is arriving from the server of its shard. Give it all messages of `ShardCopy.packed`, in order."""

    def __init__(self, head: PeerId, manifest: Payload) -> None:
        """``head``: who sends it."""
        self.head = head
        listed, self._sidecar = unpack_manifest(manifest)
        self._listed = listed
        self._tensors: list[Payload] = []
        self._pending: list[Operation] = []

    def take(self, payload: Payload) -> bool:
        """Take the next message. Returns whether it was the last one. Raises `ProtocolError`."""
        match payload.meta:
            case ["tensor", _] if len(self._tensors) < len(self._listed):
                _, _, shape = self._listed[len(self._tensors)]
                phantom = not isinstance(payload, TensorPayload)
                self._tensors.append(payload if phantom else copy_of_received(payload, shape))
            case ["pending", *_]:
                _, _, operation = Operation.of(payload)
                assert operation.payload is not None
                self._pending.append(replace(operation, payload=own_copy(operation.payload)))
            case ["ready", _] if len(self._tensors) == len(self._listed):
                return True
            case _:
                raise ProtocolError(f"{self.head} sent {payload.meta!r:.60} in the middle of a copy of a shard")
        return False

    def copy(self, tools: ServerTools, number: int, gate: Gate) -> ShardCopy:
        """The copy, once everything is there."""
        sidecar = self._sidecar
        configuration = Configuration.from_value(sidecar["configuration"])
        shard = Shard()
        make_entries(shard, configuration, number)
        found: dict[str, dict[str, Payload]] = {}
        for (name, _, _), payload in zip(self._listed, self._tensors, strict=True):
            kind, _, rest = name.partition("/")
            found.setdefault(kind, {})[rest] = payload
        restore_pieces(shard.entries, _tensors(found.get("now", {})), sidecar["pieces"], shard.limit, shard.recovery)
        shard.staleness.update(dict(sidecar["staleness"]))
        shard.batches.update(dict(sidecar["batches"]))
        shard.last_staleness.update({(group, piece): staleness for group, piece, staleness in sidecar["last_staleness"]})
        shard.sensors.watch(shard.entries.values(), len(configuration.groups))
        copy = ShardCopy(tools, configuration, number, shard, first_step=0, gate=gate)
        copy.serving.aggregator.load(sidecar["aggregator"])
        copy.lives.load(sidecar["lives"])
        copy.done = sidecar["done"]
        copy.kept_ever.update(sidecar["kept_ever"])
        for step, about in sidecar["kept"]:
            copy.kept[step] = Kept(_tensors(_under(f"{step}/", found.get("kept", {}))), about)
            for piece, payload in _under(f"{step}/", found.get("shown", {})).items():
                version = about["versions"][piece]
                copy.kept[step].shown[int(piece)] = Loan(payload.with_meta(ReadMeta(version, 0).to_value()))
        copy.put_back(self._pending)
        return copy


def _under(prefix: str, found: Mapping[str, Payload]) -> dict[str, Payload]:
    return {name.removeprefix(prefix): payload for name, payload in found.items() if name.startswith(prefix)}


def _tensors(payloads: Mapping[str, Payload]) -> dict[str, Tensor]:
    return {name: payload.tensor for name, payload in payloads.items() if isinstance(payload, TensorPayload)}
