"""A server's part of a checkpoint: its pieces and their optimizers' state, as named tensors and a plain value beside them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.norm_limit import NormLimit
from zmqtrain.server.rate_recovery import Recovery
from zmqtrain.server.shard_entry import ShardEntry
from zmqtrain.wire.payload import Value


def keep_pieces(
    entries: Mapping[int, ShardEntry], step: int, limit: NormLimit | None = None, recovery: Recovery | None = None
) -> tuple[dict[str, Tensor], dict[str, Value]]:
    """The part at ``step``: copies of tensors, named ``PIECE.values`` and ``PIECE.optimizer.KEY``, and the sidecar's values."""
    tensors = {f"{index}.{name}": tensor for index, entry in entries.items() for name, tensor in entry.tensors().items()}
    sidecar: dict[str, Value] = {"step": step, "versions": {str(index): entry.version for index, entry in entries.items()}}
    if limit is not None:
        sidecar["limit"] = limit.state()
    if recovery is not None:
        sidecar["recovery"] = recovery.state()
    return tensors, sidecar


def restore_pieces(
    entries: Mapping[int, ShardEntry],
    tensors: Mapping[str, Tensor],
    sidecar: Mapping[str, Value],
    limit: NormLimit | None = None,
    recovery: Recovery | None = None,
) -> int:
    """Restore what `keep_pieces` returned. Returns its step. Raises `CheckpointError` if the model was divided differently.

    A ``limit`` or a ``recovery`` stays new if the run that wrote the checkpoint had none."""
    step, versions = sidecar.get("step"), sidecar.get("versions")
    if not isinstance(step, int) or not isinstance(versions, dict) or not all(map(_is_version, versions.values())):
        raise CheckpointError(f"a model server's part of the checkpoint lacks its step and versions; it has {sidecar!r:.100}")
    by_piece: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        by_piece.setdefault(number, {})[key] = tensor
    for index, entry in entries.items():
        version = versions.get(str(index))
        entry.load(by_piece.get(str(index), {}), version if isinstance(version, int) else 0)
    if more := (versions.keys() | by_piece.keys()) ^ {str(index) for index in entries}:
        raise CheckpointError(
            f"piece {min(more)} is in the checkpoint or on this server, but not in both: resume with the model, group_size, "
            "shards, split_size and bucket_size of the run that wrote it"
        )
    if limit is not None and "limit" in sidecar:
        limit.load(sidecar["limit"])
    if recovery is not None and "recovery" in sidecar:
        recovery.load(sidecar["recovery"])
    return step


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62
