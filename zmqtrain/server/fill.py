"""How a server gets what it begins with: from worker 0, from a checkpoint, or from workers that have read one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from zmqtrain.arena.arena import Arena
from zmqtrain.exchange.checkpoint_part import taking_back, unpack_manifest
from zmqtrain.exchange.norm_limit import NormLimit
from zmqtrain.exchange.server_messages import Configuration, initial_tag, resumed_tag
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.server.checkpoint import keep_pieces, restore_pieces
from zmqtrain.server.phantom_shard import PhantomEntry
from zmqtrain.server.rate_recovery import Recovery
from zmqtrain.server.serving import ServerTools, Shard
from zmqtrain.server.shard import TensorEntry
from zmqtrain.server.shard_entry import ShardEntry
from zmqtrain.waiting import in_time
from zmqtrain.wire.tensor import TensorPayload


def make_entries(shard: Shard, configuration: Configuration, index: int, arena: Arena | None = None) -> None:
    """Create the pieces of the server with this number, without values. ``arena``: the memory that they are in, if there is one."""
    make: Callable[..., ShardEntry] = PhantomEntry
    if not configuration.phantom:
        make = partial(
            TensorEntry, arena=arena, horizon=configuration.horizon, rises=configuration.rises, ceilings=configuration.ceilings
        )
    for piece in configuration.pieces():
        if piece.server == index:
            bucket = configuration.buckets[piece.bucket]
            entry = make(piece, bucket.dtype, bucket.parameter_group, configuration.optimizer, starts=bucket.starts_in(piece))
            shard.entries[piece.index] = entry
    if configuration.limits and not configuration.phantom:
        shard.limit = NormLimit(shard.entries)
    ceiling = max(configuration.ceilings, default=1.0)
    if ceiling > 1 and shard.entries and not configuration.phantom:
        shard.recovery = Recovery(shard.entries, len(configuration.groups), ceiling)


async def fill(shard: Shard, configuration: Configuration, tools: ServerTools) -> int:
    """Wait for the values of all pieces. Returns the first step."""
    endpoint, barrier_s = tools.endpoint, tools.settings.barrier_s
    if not shard.entries and tools.checkpoints is not None:
        _, sidecar = keep_pieces({}, 0)
        tools.background.run(tools.checkpoints.hold_nothing(sidecar))  # workers wait only for other servers
        return 0
    if configuration.restored and tools.checkpoints is not None:
        tensors, sidecar = await tools.checkpoints.restore()
        return restore_pieces(shard.entries, tensors, sidecar, shard.limit, shard.recovery)
    for entry in shard.entries.values():
        source = configuration.groups[0][configuration.buckets[entry.piece.bucket].first]
        if configuration.resumed is not None:
            async with in_time(source, f"piece {entry.piece.index} of the checkpoint", barrier_s):
                await _resume(endpoint, entry, source)
            continue
        wait = endpoint.receive(source, initial_tag(entry.piece.index), into=entry.memory())
        async with in_time(source, f"the initial parameters of piece {entry.piece.index}", barrier_s):
            await wait
    return configuration.resumed or 0


async def _resume(endpoint: Endpoint, entry: ShardEntry, source: PeerId) -> None:
    """Begin a piece with what a worker has put together for it from a checkpoint."""
    tag, receive = resumed_tag(entry.piece.index), endpoint.receive
    listed, sidecar = unpack_manifest(await receive(source, tag))
    tensors: dict[str, Tensor] = {}
    for name, _, shape in listed:
        payload = await receive(source, tag)
        assert isinstance(payload, TensorPayload)
        tensors[name] = payload.tensor.clone().view(shape)  # the transport may own the memory
    with taking_back(f"piece {entry.piece.index}"):
        entry.load(tensors, int(sidecar["version"]))
