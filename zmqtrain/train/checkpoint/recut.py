"""What exchanges and servers keep in checkpoints, bucket by bucket, is divided anew for a run on another grid."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from zmqtrain.collectives.group import bounds
from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.base import Exchange, Resumable
from zmqtrain.exchange.checkpoint_part import Part, kept_payload, kept_value, taking_back
from zmqtrain.train.checkpoint.layout import Layout, Wholes
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload

#: Fetches a part of the checkpoint by the name under which it was kept.
FetchPart = Callable[[str], Awaitable[Part]]
_OLD_GRID = "resume with the grid, group_size and bucket_size with which it was written"
_OLD_PIECES = "resume with the grid, group_size, bucket_size, shards and split_size with which it was written"


@dataclass(frozen=True, slots=True)
class Recut:
    """What an exchange of a run with the layout ``now`` begins with, from a checkpoint of a run with the layout ``was``."""

    was: Layout
    now: Layout
    state: Mapping[str, Value] = field(default_factory=dict)
    """As the exchange's `state_dict` would return it."""
    pieces: Callable[[int, int, int], tuple[dict[str, Tensor], int]] | None = None
    """With model servers: what a piece begins with, elements of one of this worker's buckets (its number, first and last), and its
    version."""
    step: int = 0

    def load_into(self, exchange: Exchange) -> None:
        """Call it before `Exchange.start`."""
        exchange.load_state_dict(self.state)
        if self.pieces is not None:
            assert isinstance(exchange, Resumable)
            exchange.hand_to_servers(self.pieces, self.step)


async def recut_averages(
    was: Layout, now: Layout, group: int, position: int, own: Part, fetch: FetchPart, *, whole: tuple[bool, bool]
) -> Recut:
    """The state of averaging (a center, an outer optimizer's), of which each worker of the group has kept its part, or all of it.
    ``whole``: whether it has kept all of it, and whether it needs all of it now. Raises `CheckpointError`."""
    if not _table(own, "exchange"):
        return Recut(was, now)
    wholes = Wholes()
    was_whole, now_whole = whole
    for member in (position,) if was_whole else range(was.group_size):
        part = own if was_whole else await fetch(f"worker-{group * was.group_size + member}")
        with taking_back(part.name):
            for name, value in _table(part, "exchange").items():
                kind, _, number = name.partition("/")
                if kind not in ("center", "last", "momentum"):
                    raise CheckpointError(
                        f"the checkpoint of step {own.step} has averages that were under way, or what rounding has lost "
                        f"([exchange.averaging] overlap_steps, deltas), of each worker's own part: {_OLD_GRID}"
                    )
                bucket = int(number)
                row = was.row_of(bucket, member)
                sharers = was.sharers(bucket, row)
                start, _ = (0, 0) if was_whole else bounds(was.numel(bucket, row), len(sharers))[sharers.index(member)]
                wholes.put(was, bucket, row, start, kind, kept_payload(name, value).tensor)
    found: dict[str, Value] = {}
    for bucket in range(len(now.buckets)):
        row = now.row_of(bucket, position)
        sharers = now.sharers(bucket, row)
        numel = now.numel(bucket, row)
        start, stop = (0, numel) if now_whole else bounds(numel, len(sharers))[sharers.index(position)]
        for kind in wholes.kinds:
            values = wholes.take(now, bucket, row, start, stop, kind)
            found[f"{kind}/{bucket}"] = kept_value(TensorPayload.of(_together(values, kind)))
    return Recut(was, now, found)


async def recut_servers(was: Layout, now: Layout, group: int, position: int, own: Part, fetch: FetchPart) -> Recut:
    """The model servers' pieces, which workers of the first group take apart and give to the servers again. Raises
    `CheckpointError`."""
    state = _table(own, "exchange")
    if not isinstance(state.get("pieces"), list):
        raise CheckpointError(f"the checkpoint does not say how model servers divided the model: {_OLD_PIECES}")
    _refuse_unsent(state.get("residuals"), _OLD_PIECES)
    firsts = {now.sharers(bucket, now.row_of(bucket, position))[0] for bucket in range(len(now.buckets))}
    if group or position not in firsts:
        return Recut(was, now, pieces=_none, step=own.step)
    numbers = [
        (bucket, row) for bucket, (_, rows) in enumerate(was.buckets) for row in range(max(1, len(rows)))
    ]  # as `zmqtrain.exchange.server_messages.Configuration` counts them
    wholes = Wholes()
    with taking_back(own.name):
        cut = [tuple(map(int, piece)) for piece in state["pieces"]]
        servers = 1 + max(server for *_, server in cut)
    for server in range(servers):
        part = await fetch(f"server-{server}")
        await asyncio.to_thread(_take_apart, part, cut, numbers, was, wholes)

    def piece(bucket: int, start: int, stop: int) -> tuple[dict[str, Tensor], int]:
        return _piece(wholes, now, bucket, now.row_of(bucket, position), start, stop)

    return Recut(was, now, pieces=piece, step=own.step)


def without_unsent(own: Part) -> Part:
    """A worker's part without the gradients that compression has not sent: a new run begins with none."""
    return replace(own, sidecar={**own.sidecar, "exchange": {**_table(own, "exchange"), "residuals": {}}})


def refuse_unsent_parts(own: Part) -> None:
    """Raise `CheckpointError` if all-reduce has kept anything of buckets that were others."""
    _refuse_unsent(_table(own, "exchange"), _OLD_GRID)


def _refuse_unsent(kept: object, advice: str) -> None:
    if kept:
        raise CheckpointError(f"the checkpoint has gradients that compression has not sent, of each worker's own part: {advice}")


def _take_apart(
    part: Part, cut: Sequence[tuple[int, ...]], numbers: Sequence[tuple[int, int]], was: Layout, wholes: Wholes
) -> None:
    """Put a server's part into ``wholes``. ``cut``: each piece's bucket (as servers count them), first and last element, and
    server; ``numbers``: the bucket and row of each bucket that servers know."""
    with taking_back(part.name):
        for name, tensor in tensors_of(part).items():
            index, _, key = name.partition(".")
            described, start, stop, _ = cut[int(index)]
            _put(wholes, was, *numbers[described], start, stop, key, tensor)
        for index, version in _table(part, "versions").items():
            described, start, stop, _ = cut[int(index)]
            for name, _ in wholes.spans(was, *numbers[described], start, stop):
                wholes.put_scalar(name, "version", torch.tensor(int(version)))


def _none(bucket: int, start: int, stop: int) -> tuple[dict[str, Tensor], int]:
    raise AssertionError("another worker gives the servers this piece")


def _put(wholes: Wholes, was: Layout, bucket: int, row: int, start: int, stop: int, key: str, tensor: Tensor) -> None:
    """A piece's tensor, as `zmqtrain.server.shard_entry.ShardEntry.tensors` names it: ``values``, ``ahead``, ``optimizer.KEY``, or
    ``part.N.KEY`` of the Nth parameter in the piece."""
    spans = wholes.spans(was, bucket, row, start, stop)
    if key.startswith("part."):
        _, number, key = key.split(".", 2)
        spans = [spans[int(number)]]
        start, key = start + spans[0][1], f"optimizer.{key}"
    if tensor.dim():
        wholes.put(was, bucket, row, start, key, tensor)
        return
    for name, _ in spans:
        wholes.put_scalar(name, key, tensor)


def _piece(wholes: Wholes, now: Layout, bucket: int, row: int, start: int, stop: int) -> tuple[dict[str, Tensor], int]:
    """A new piece's tensors and its version."""
    names = [name for name, _ in wholes.spans(now, bucket, row, start, stop)]
    taken = {kind: wholes.take(now, bucket, row, start, stop, kind) for kind in wholes.kinds}
    lacking = [name for name, values in zip(names, taken.get("values", [None] * len(names)), strict=True) if values is None]
    if lacking:
        raise CheckpointError(
            f"in the run that wrote the checkpoint, model servers had nothing of {lacking[0]}: it was frozen there, or was not in "
            'the model. Begin with its model alone ([job] weights names its folder, optimizer_state = "new", without --resume)'
        )
    versions = [int(version) for version in taken.pop("version") if version is not None]
    tensors: dict[str, Tensor] = {}
    for kind in ("values", "ahead"):
        values = taken.pop(kind, [])
        if any(value is not None for value in values):
            tensors[kind] = _together(values, kind)
    alike = all(map(_alike, taken.values()))
    for kind, values in taken.items():
        if not alike:  # optimizers have passed over some of the parameters
            key = kind.removeprefix("optimizer.")
            tensors |= {f"part.{number}.{key}": value for number, value in enumerate(values) if value is not None}
        elif values[0] is not None:
            tensors[kind] = values[0] if not values[0].dim() else _together(values, kind)
    return tensors, max(versions)


def _alike(values: list[Tensor | None]) -> bool:
    """Whether a piece's parameters have all something for each element, all the same number, or all nothing."""
    first = values[0]
    if first is None or first.dim():
        return all((value is None) == (first is None) and (value is None or value.dim() > 0) for value in values)
    return all(value is not None and not value.dim() and torch.equal(value, first) for value in values)


def _table(part: Part, name: str) -> dict[str, Any]:
    found: Any = part.sidecar.get(name)
    if not isinstance(found, dict):
        raise CheckpointError(f"the checkpoint's part {part.name} has {found!r:.60} as its {name}: use an earlier checkpoint")
    return found


def _together(values: list[Tensor | None], kind: str) -> Tensor:
    if any(value is None for value in values):
        raise CheckpointError(f"the checkpoint lacks the {kind} of a parameter: use an earlier checkpoint")
    return torch.cat([value for value in values if value is not None])


def tensors_of(part: Part) -> dict[str, Tensor]:
    """The part's tensors, which alias the part."""
    tensors = {}
    for name, payload in part.tensors.items():
        assert isinstance(payload, TensorPayload)
        tensors[name] = payload.tensor
    return tensors
