"""The beginning with model servers: the configuration that all workers derive alike, and the servers' first values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from zmqtrain.exchange.base import Bucket, OptimizerSpec
from zmqtrain.exchange.checkpoint_part import pack_manifest
from zmqtrain.exchange.members import Members
from zmqtrain.exchange.momentum import Compensation
from zmqtrain.exchange.pieces import Piece
from zmqtrain.exchange.server_changes import base_value
from zmqtrain.exchange.server_messages import BucketDescription, Configuration, divided, initial_tag, resumed_tag
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

#: Reads what a checkpoint has of a bucket, from one element to another: tensors by name, and their version.
PiecesOfCheckpoint: TypeAlias = Callable[[int, int, int], tuple[dict[str, Tensor], int]]


def configuration_of(
    buckets: Sequence[Bucket],
    optimizer: OptimizerSpec,
    given: OptimizerSpec,
    settings: ModelServerSettings,
    compensation: Compensation,
    members: Members | None,
    *,
    restored: bool,
    resumed: int | None,
) -> Configuration:
    """What servers are told before the first values.

    Args:
        buckets: the replica's.
        optimizer: what servers run, after compensation.
        given: the replica's own hyperparameters.
        members: of a run that survives losses.
        restored: whether servers have values of a checkpoint already.
        resumed: the step of the checkpoint whose values they get from workers.
    """
    slots = None if members is None or members.slots is None else base_value(members.slots, members.teams)
    described = _described(buckets)
    split_bytes, least_bytes = _sizes(described, settings)
    return Configuration(
        buckets=described,
        optimizer=optimizer,
        groups=settings.groups,
        servers=settings.servers,
        split_bytes=split_bytes,
        least_bytes=least_bytes,
        policy=settings.policy,
        bound=settings.bound,
        snapshot=settings.snapshot,
        clip_norm=settings.clip_norm if settings.policy == "sync" else 0.0,
        restored=restored,
        resumed=resumed,
        horizon=compensation.horizon,
        phantom=isinstance(buckets[0].parameters, PhantomPayload),
        elastic=slots,
        whole_groups=settings.whole_groups,
        rises=tuple(map(compensation.rise, given.groups)),
        ceilings=tuple(map(compensation.ceiling, given.groups)),
        limits=compensation.limits(given),
    )


def division(buckets: Sequence[Bucket], settings: ModelServerSettings) -> tuple[Piece, ...]:
    """The model divided into pieces, as the `Configuration` will divide it."""
    described = _described(buckets)
    return divided(described, len(settings.groups[0]), len(settings.servers), *_sizes(described, settings))


def _sizes(buckets: Sequence[BucketDescription], settings: ModelServerSettings) -> tuple[int, int]:
    return settings.pieces.of_model(sum(bucket.size.numel * bucket.size.itemsize for bucket in buckets))


def _described(buckets: Sequence[Bucket]) -> tuple[BucketDescription, ...]:
    return tuple(each for bucket in buckets for each in _descriptions(bucket))


def _descriptions(bucket: Bucket) -> list[BucketDescription]:
    """A bucket as servers know it: one description per row of the grid, if rows have different parts of the model."""
    dtype, group = bucket.parameters.dtype, bucket.parameter_group
    if bucket.rows is None:
        return [BucketDescription(bucket.parameters.numel, dtype, group, starts=bucket.starts)]
    rows = zip(bucket.rows.numels, bucket.rows.positions, bucket.rows.starts, strict=True)
    return [BucketDescription(numel, dtype, group, positions, starts if bucket.starts else ()) for numel, positions, starts in rows]


def numbers_of(buckets: Sequence[Bucket]) -> list[int]:
    """The number of each of this worker's buckets among those that servers know."""
    found, before = [], 0
    for bucket in buckets:
        found.append(before + (0 if bucket.rows is None else bucket.rows.own))
        before += 1 if bucket.rows is None else len(bucket.rows.numels)
    return found


async def send_initial(
    endpoint: Endpoint,
    servers: Sequence[PeerId],
    buckets: Sequence[Bucket],
    first: Mapping[int, Sequence[Piece]],
    checkpoint: PiecesOfCheckpoint | None,
) -> None:
    """Send servers their first values.

    Args:
        first: the pieces that this worker sends, by bucket.
        checkpoint: where they come from; by default from the buckets' parameters.
    """
    for index, own in first.items():
        for piece in own:
            server = servers[piece.server]
            if checkpoint is not None:
                tensors, version = await asyncio.to_thread(checkpoint, index, piece.start, piece.stop)
                await _send_resumed(endpoint, server, piece, tensors, version)
                continue
            part = buckets[index].parameters.part(piece.start, piece.stop)
            await endpoint.send(server, initial_tag(piece.index), part)


async def _send_resumed(endpoint: Endpoint, server: PeerId, piece: Piece, tensors: Mapping[str, Tensor], version: int) -> None:
    payloads = {name: TensorPayload.of(tensor) for name, tensor in tensors.items()}
    await endpoint.send(server, resumed_tag(piece.index), pack_manifest(payloads, {"version": version}))
    for payload in payloads.values():
        await endpoint.send(server, resumed_tag(piece.index), payload)
