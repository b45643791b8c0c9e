"""A role's side of checkpoints: its part is sent to the coordinator, and comes back when a run is resumed.

A part is a set of named tensors and a sidecar of plain values. It is sent as messages with one tag, so they arrive in order: first
the manifest (the packed list of tensors and the sidecar, as bytes, and their CRC-32), then each tensor in the manifest's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgpack
import numpy as np

from zmqtrain.errors import CheckpointError, DamagedError, WireError, ZmqTrainError
from zmqtrain.membership.touch import repeated
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag
from zmqtrain.wire.dtypes import dtype_named
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload

COORDINATOR: PeerId = "coordinator"
#: Tags of parts: ``(SAVE, step, name)``, and perhaps a `Mark`, to the coordinator, ``(RESUME, name)`` back.
SAVE, RESUME = "checkpoint", "resume"
#: At the end of the tags of a run whose workers form other grids when some are lost: the number of the grid, counted from 0, and
#: its workers; empty for the first one, if it is the job's.
Mark = tuple[int, ...]
#: Requests that the coordinator's collector answers.
WRITTEN, COMMITTED, OPEN_PART = "checkpoint_written", "checkpoint_committed", "resume_part"
NOTHING = "checkpoint_nothing"
#: A key in the sidecar of a worker's part: the ranks whose parts belong to the checkpoint, if they may be fewer than all.
MEMBERS = "members"
#: A key in place of a part that the checkpoint lacks because its worker was lost: the rank of a neighbour.
STANDS_IN = "stands in"
#: A key in the sidecar of a worker's part: which samples a step takes.
COURSE = "course"
#: Errors that invalid values in a checkpoint may cause.
_OF_VALUES = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError)
#: Before the name of a part: as the run that wrote the checkpoint named it, whose groups may have had another size.
AS_KEPT = "kept/"
#: The tag of a model that belongs to no checkpoint, ``(ALONE, step, name)``, and the request that says that it is on disk.
ALONE, ALONE_WRITTEN = "model_alone", "model_alone_written"
#: A checkpoint is background traffic: its priority is below that of everything that a step waits for.
PRIORITY = -1
#: Tensors of a part that are being sent at a time, and their bytes, if it is more than one.
MOST_ON_THEIR_WAY, MOST_BYTES_ON_THEIR_WAY = 8, 1 << 25
#: After a manifest: its CRC-32. It travels as a tensor, of which the transport checks nothing (`zmqtrain.wire.message`).
_CHECK_BYTES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """One role's part of a checkpoint."""

    name: str  # "worker-3", "server-0", "model", "group-1"
    step: int  # number of completed steps
    tensors: Mapping[str, Payload]
    sidecar: Mapping[str, Value] = field(default_factory=dict)


async def send_part(
    endpoint: Endpoint,
    step: int,
    name: str,
    tensors: Mapping[str, Payload],
    sidecar: Mapping[str, Value],
    *,
    timeout_s: float,
    mark: Mark = (),
    coordinator: PeerId = COORDINATOR,
) -> None:
    """Send a part; returns when the coordinator has it on disk. The tensors must not change before.

    The checkpoint of the step is complete once all roles' parts are there (`wait_committed`). Raises `PeerTimeoutError`,
    `PeerLostError`, or the `CheckpointError` with which the coordinator answers.
    """
    await _send(endpoint, (SAVE, step, name, *mark), tensors, sidecar, WRITTEN, coordinator, timeout_s)


async def send_alone(
    endpoint: Endpoint,
    step: int,
    name: str,
    tensors: Mapping[str, Payload],
    sidecar: Mapping[str, Value],
    *,
    timeout_s: float,
    mark: Mark = (),
    coordinator: PeerId = COORDINATOR,
) -> None:
    """Like `send_part`, for a model that belongs to no checkpoint."""
    await _send(endpoint, (ALONE, step, name, *mark), tensors, sidecar, ALONE_WRITTEN, coordinator, timeout_s)


async def _send(
    endpoint: Endpoint,
    tag: Tag,
    tensors: Mapping[str, Payload],
    sidecar: Mapping[str, Value],
    written: str,
    to: PeerId,
    timeout_s: float,
) -> None:
    """Send tensors and wait for the answer, again if another coordinator has taken the first one's place meanwhile."""

    async def send() -> None:
        sent = deque([await endpoint.send(to, tag, pack_manifest(tensors, sidecar), priority=PRIORITY)])
        sizes: deque[int] = deque([0])
        for payload in tensors.values():
            # They may have been made for this, and are freed when they are there.
            while len(sent) > MOST_ON_THEIR_WAY or (sent and sum(sizes) + payload.nbytes > MOST_BYTES_ON_THEIR_WAY):
                await sent.popleft().wait_released()
                sizes.popleft()
            sent.append(await endpoint.send(to, tag, payload, priority=PRIORITY))
            sizes.append(payload.nbytes)
        await endpoint.request(to, written, *tag[1:], timeout=timeout_s)
        for message in sent:
            await message.wait_released()

    await repeated(endpoint, to, send, of_another=True)


async def wait_committed(endpoint: Endpoint, step: int, *, timeout_s: float, coordinator: PeerId = COORDINATOR) -> bool:
    """Wait until all parts of the step's checkpoint are there and it has its final name. Returns whether it was kept: False if the
    disk did not take it, and the run is to go on without. Raises `CheckpointError` if it was given up for another reason."""

    async def ask() -> bool:
        return (await endpoint.request(coordinator, COMMITTED, step, timeout=timeout_s)).meta is True

    return await repeated(endpoint, coordinator, ask)


async def send_nothing(
    endpoint: Endpoint, name: str, sidecar: Mapping[str, Value], *, timeout_s: float, coordinator: PeerId = COORDINATOR
) -> None:
    """Announce that this role's part of every checkpoint is empty, and is represented by ``sidecar``."""

    async def announce() -> None:
        await endpoint.request(coordinator, NOTHING, name, dict(sidecar), timeout=timeout_s)

    await repeated(endpoint, coordinator, announce)


async def fetch_part(
    endpoint: Endpoint,
    name: str,
    *,
    timeout_s: float,
    into: Mapping[str, Payload] | None = None,
    keep: Callable[[str, Payload], Payload] | None = None,
    coordinator: PeerId = COORDINATOR,
) -> Part | None:
    """This role's part of the checkpoint from which the run is resumed; ``None`` if it starts afresh.

    Tensors named by ``into`` are received in that memory, so that they need no second copy. ``keep(name, tensor)``: what is kept of
    each of the others, which come one after another. Raises `CheckpointError` if one does not fit.
    """
    answer = await endpoint.request(coordinator, OPEN_PART, name, timeout=timeout_s)
    if answer.meta is None:
        return None
    assert isinstance(answer.meta, int)
    listed, sidecar = unpack_manifest(await endpoint.receive(coordinator, (RESUME, name)))
    tensors: dict[str, Payload] = {}
    for tensor, dtype, shape in listed:
        target = None if into is None else into.get(tensor)
        if target is not None and (target.dtype, shape_of(target)) != (dtype, shape):
            raise CheckpointError(
                f"the checkpoint's {name} has {tensor} as {dtype} {list(shape)}, but here it is {target.dtype} "
                f"{list(shape_of(target))}: it belongs to another model; use a checkpoint of this model, or start without it"
            )
        received = await endpoint.receive(coordinator, (RESUME, name), into=target)
        if target is None:  # the transport may own the received memory
            received = copy_of_received(received, shape)
            received = received if keep is None else keep(tensor, received)
        tensors[tensor] = received
    return Part(name, answer.meta, tensors, sidecar)


def pack_manifest(tensors: Mapping[str, Payload], sidecar: Mapping[str, Value]) -> TensorPayload:
    """The list of tensors and the sidecar, as bytes, since they may be larger than a header."""
    listed = [[name, payload.dtype, list(shape_of(payload))] for name, payload in tensors.items()]
    packed = msgpack.packb([listed, dict(sidecar)])
    return TensorPayload.of(np.frombuffer(packed + crc32(packed).to_bytes(_CHECK_BYTES, "little"), np.uint8))


def unpack_manifest(payload: Payload) -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, Any]]:
    """The tensors (name, dtype, shape) in the order in which they follow, and the sidecar. Raises `DamagedError`, and
    `CheckpointError` if it was packed otherwise."""
    content = b"".join(payload.frames())
    packed, check = content[:-_CHECK_BYTES], content[-_CHECK_BYTES:]
    if crc32(packed) != int.from_bytes(check, "little"):
        raise DamagedError("the list of tensors of a part")
    try:
        listed, sidecar = msgpack.unpackb(packed, strict_map_key=False)
        return [(str(name), str(dtype), tuple(int(size) for size in shape)) for name, dtype, shape in listed], dict(sidecar)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CheckpointError(f"a part of a checkpoint arrived with an unreadable manifest: {error}") from error


@contextmanager
def taking_back(part: str) -> Iterator[None]:
    """A context that restores values of a checkpoint's part, which may have been tampered with: errors that they cause become
    `CheckpointError`."""
    try:
        yield
    except ZmqTrainError as error:
        if isinstance(error, WireError):
            raise CheckpointError(f"the checkpoint's part {part} cannot be restored: {error}; use an earlier checkpoint") from error
        raise
    except _OF_VALUES as error:
        what = f"{type(error).__name__}: {error!s:.200}"
        raise CheckpointError(f"the checkpoint's part {part} cannot be restored: {what}; use an earlier checkpoint") from error


def require_like(name: str, kept: Payload, like: Payload) -> None:
    """Raise `CheckpointError` unless ``kept``, stored as ``name``, has the size and dtype of ``like``."""
    if (kept.numel, kept.dtype) != (like.numel, like.dtype):
        raise CheckpointError(
            f"the checkpoint has {kept.numel} elements of {kept.dtype} as {name}, but {like.numel} of {like.dtype} are needed: it "
            "belongs to another model or another division of it; start without --resume, or with the settings with which it was "
            "written"
        )


def kept_payload(name: str, value: Value) -> TensorPayload:
    """A tensor stored in a sidecar as `[dtype, bytes]`: one dimension. Raises `CheckpointError`."""
    match value:
        case [str(dtype), bytes(content)]:
            with taking_back(name):
                itemsize = dtype_named(dtype).itemsize
                return TensorPayload.received(bytearray(content), dtype, (len(content) // itemsize,))
    raise CheckpointError(f"the checkpoint has an invalid {name}: {value!r:.100}; use an earlier checkpoint")


def kept_value(payload: Payload) -> Value:
    """A tensor as it stands in a sidecar, for `kept_payload`."""
    return [payload.dtype, b"".join(payload.frames())]


def shape_of(payload: Payload) -> tuple[int, ...]:
    shape = getattr(payload, "shape", None)
    return (payload.numel,) if shape is None else tuple(shape)


def copy_of_received(received: Payload, shape: tuple[int, ...]) -> Payload:
    """The same content in memory of its own."""
    copied = bytearray(b"".join(received.frames()))
    return TensorPayload.received(copied, received.dtype, shape, received.meta)
