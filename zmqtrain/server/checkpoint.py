"""A server's part of a checkpoint: its pieces and their optimizers' state, as named tensors and a plain value beside them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zmqtrain.errors import CheckpointError
from zmqtrain.server.held import Held
from zmqtrain.wire.payload import Value


def keep_pieces(held: Mapping[int, Held], step: int) -> tuple[dict[str, Tensor], dict[str, Value]]:
    """The part at ``step``: copies of tensors, named ``PIECE.values`` and ``PIECE.optimizer.KEY``, and what goes beside them."""
    tensors = {f"{index}.{name}": tensor for index, piece in held.items() for name, tensor in piece.tensors().items()}
    return tensors, {"step": step, "versions": {str(index): piece.version for index, piece in held.items()}}


def restore_pieces(held: Mapping[int, Held], tensors: Mapping[str, Tensor], sidecar: Mapping[str, Value]) -> int:
    """Put back what `keep_pieces` gave. Returns its step. Raises `CheckpointError` where the model was cut in another way."""
    step, versions = sidecar.get("step"), sidecar.get("versions")
    if not isinstance(step, int) or not isinstance(versions, dict):
        raise CheckpointError(f"a model server's part of the checkpoint does not say its step and versions, but {sidecar!r:.100}")
    by_piece: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        by_piece.setdefault(int(number), {})[key] = tensor
    for index, piece in held.items():
        version = versions.get(str(index))
        kept: Mapping[str, Tensor] = by_piece.get(index, {})
        piece.load(kept, version if isinstance(version, int) else 0)
    return step
