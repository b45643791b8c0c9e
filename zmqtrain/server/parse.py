"""Checks whether a message is a push that a server can use. Pure; each error says what is wrong, with which piece and sender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zmqtrain.errors import ProtocolError
from zmqtrain.exchange.server_messages import PushMeta, parse_push_tag
from zmqtrain.net.endpoint import PeerId, Tag
from zmqtrain.server.aggregator import Push
from zmqtrain.server.shard_entry import ShardEntry
from zmqtrain.wire.compress import decompress
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload


def parse_push(
    sender: PeerId,
    tag: Tag,
    payload: Payload,
    entries: Mapping[int, ShardEntry],
    groups: Sequence[Sequence[PeerId]],
    *,
    teams: bool = False,
) -> Push:
    """The push, decompressed. Whether its step is the group's next one is checked by the aggregator. Raises `ProtocolError`.

    ``teams``: who pushes a piece depends on who is there, so any worker of the group may."""
    index, step = parse_push_tag(tag)
    if index not in entries:
        raise ProtocolError(f"this server does not hold piece {index}; it holds {_some(list(entries))}")
    entry = entries[index]
    if isinstance(payload, TensorPayload | PhantomPayload) and not isinstance(payload, entry.payload_type):
        found, here = ("only a size", "its values") if isinstance(payload, PhantomPayload) else ("values", "only its size")
        raise ProtocolError(f"{sender} pushed {found} as piece {index}, but this server holds {here}")
    if isinstance(payload.meta, dict):
        numel = payload.meta.get("numel")
        if numel != entry.piece.numel:  # checked before anything of that size is allocated
            raise ProtocolError(f"a compressed push of piece {index} stands for {numel!r:.40} elements, not {entry.piece.numel}")
        payload = decompress(payload)
    meta = PushMeta.from_value(payload.meta)
    if not 0 <= meta.group < len(groups):
        raise ProtocolError(f"there is no group {meta.group}; groups are 0 to {len(groups) - 1}")
    owner = groups[meta.group][entry.piece.position]
    if owner != sender and not (teams and sender in groups[meta.group]):
        raise ProtocolError(f"{sender} pushed piece {index} of group {meta.group}, which only {owner} may push")
    if not 0 <= meta.version <= entry.version:
        raise ProtocolError(f"{sender} pushed piece {index} as read at version {meta.version}; versions are 0 to {entry.version}")
    entry.check_hyperparameters(meta.hyperparameters)
    if meta.nothing:
        return Push(meta.group, step, index, meta.version, None, meta.hyperparameters, life=meta.life, nothing=True)
    if not isinstance(payload, entry.payload_type) or payload.numel != entry.piece.numel or payload.dtype != entry.dtype:
        raise ProtocolError(
            f"{sender} pushed {payload.numel} elements of {payload.dtype or 'no type'} as piece {index}, "
            f"but it has {entry.piece.numel} of {entry.dtype}"
        )
    gradient = entry.gradient(payload)
    return Push(
        meta.group, step, index, meta.version, gradient, meta.hyperparameters, meta.passed_over, meta.life, meta.torn
    )  # fmt: skip


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return f"{shown}, ... ({len(numbers)} in total)" if len(numbers) > 8 else shown or "none"
