"""What a worker keeps so that its gradients travel compressed to model servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.base import Bucket
from zmqtrain.exchange.checkpoint_part import kept_payload, kept_value, require_like
from zmqtrain.exchange.matrices import matrices_of
from zmqtrain.exchange.pieces import Piece
from zmqtrain.wire.compress import Compressor, Matrix, make_compressor
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload


class PushCompression:
    """Compresses the gradients of this worker's pieces, each as a stream of its own. Call `load_state_dict`, if at all, before
    `start`."""

    def __init__(self, name: str, ratio: float, rank: int) -> None:
        """``ratio``: the share of elements that top-k sends; ``rank``: of PowerSGD's factors."""
        self._compressor: Compressor = make_compressor(name, ratio, rank)
        self._matrices: dict[int, tuple[Matrix, ...]] = {}  # piece -> those in it, if they matter
        self._unsent: dict[str, TensorPayload] = {}  # from the checkpoint that the run resumes

    def start(self, buckets: Sequence[Bucket], numbers: Sequence[int], cut: Sequence[Piece], position: int) -> None:
        """``numbers``: the number of each bucket among those that servers know, by which ``cut`` names them; ``position``: of this
        worker in its group. Raises `CheckpointError` if what was kept does not fit, and `UsageError`."""
        of = dict(zip(numbers, buckets, strict=True))
        if self._compressor.name == "powersgd":
            pieces = [piece for piece in cut if piece.bucket in of]
            self._matrices = {piece.index: matrices_of(of[piece.bucket], piece.start, piece.stop) for piece in pieces}
        fits: dict[str, TensorPayload] = {}
        for piece in cut if self._unsent else ():
            if piece.position == position and piece.bucket in of:
                kept_as = "float64" if of[piece.bucket].gradients.dtype == "float64" else "float32"
                sizes = self._compressor.kept(str(piece.index), piece.numel, self._matrices.get(piece.index, ()))
                fits |= {key: TensorPayload.empty(numel, kept_as) for key, numel in sizes.items()}
        for key, kept in self._unsent.items():
            if key not in fits:
                raise CheckpointError(
                    f"the checkpoint has an unsent gradient of piece {key!r:.40}, which this worker lacks: resume with the "
                    "[exchange] compression with which it was written"
                )
            require_like(f"the unsent gradient of piece {key}", kept, fits[key])
        if self._unsent:
            self._compressor.load_state_dict({key: kept.tensor for key, kept in self._unsent.items()})
            self._unsent = {}

    async def message(self, piece: Piece, gradient: Payload, arithmetic: Arithmetic) -> Payload:
        """What is sent for the gradient of the piece."""
        key, matrices = str(piece.index), self._matrices.get(piece.index, ())
        return await arithmetic.do(partial(self._compressor.encode, key, gradient, matrices), gradient)

    def state_dict(self) -> dict[str, Value]:
        """What compression has not sent yet, and what it needs beside that."""
        payloads = {key: TensorPayload.of(tensor) for key, tensor in self._compressor.state_dict().items()}
        return {key: kept_value(payload) for key, payload in payloads.items()}

    def load_state_dict(self, state: Mapping[str, Value]) -> None:
        self._unsent = {key: kept_payload(f"the unsent gradient of piece {key}", kept) for key, kept in state.items()}
