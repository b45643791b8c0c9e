"""The codecs by name, and compressors made of them.

See `zmqtrain.wire.compress` for the table of codecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from zmqtrain.wire.compress.decompress import decompress
from zmqtrain.wire.compress.dense import DenseCodec
from zmqtrain.wire.compress.envelope import CODECS, CodecName, envelope_of, shrinks, unchanged
from zmqtrain.wire.compress.factors import Matrix
from zmqtrain.wire.compress.feedback import kept_of, with_kept
from zmqtrain.wire.compress.powersgd import PowerSgdCompressor
from zmqtrain.wire.compress.sign import SignCodec
from zmqtrain.wire.compress.topk import TopKCodec
from zmqtrain.wire.payload import Payload, Value

if TYPE_CHECKING:
    import torch


class Codec(Protocol):
    """How elements travel, and nothing that lasts. `decompress` is the other side."""

    name: CodecName

    def form(self, numel: int, dtype: str) -> tuple[str, int, dict[str, Value]] | None:
        """Element type and number of elements of what is sent for ``numel`` elements of ``dtype``, and what the envelope says
        beside that; ``None`` if they are sent as they are."""
        ...

    def pack(self, flat: torch.Tensor, dtype: str) -> torch.Tensor:
        """What is sent. ``flat``: the elements, perhaps more precise than ``dtype``, in which the receiver gets them."""
        ...

    def unpack(self, packed: torch.Tensor, numel: int, dtype: str) -> torch.Tensor:
        """Decode packed elements, as the receiver does. Returns a flat tensor."""
        ...

    def of_mean(self, count: int) -> Codec:
        """The codec for the mean of ``count`` payloads that this codec has encoded."""
        ...


class Compressor(Protocol):
    """A sender's side of a codec. What it keeps between steps (with error feedback) belongs in checkpoints."""

    name: CodecName

    def encode(self, key: str, payload: Payload, matrices: Sequence[Matrix] = ()) -> Payload:
        """The payload to send for ``payload``. ``key`` identifies the stream of which it is one step: the same bucket or piece in
        each step, always of the same size. ``matrices``: those among its elements, in ascending order; only PowerSGD asks for them.
        The result may alias ``payload`` (if nothing shrinks), which must not change until it is sent."""
        ...

    def decode(self, payload: Payload) -> Payload:
        """The flat payload that ``encode`` was given, with the sender's element type and ``meta``, as far as the codec preserves
        it.

        May alias what was received. Raises `WireError` for a payload that ``encode`` of this codec cannot have made.
        """
        ...

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the next steps need beside their gradients, above all what has not been sent yet; empty for codecs that keep
        nothing. Tensors alias the compressor's own."""
        ...

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None: ...

    def kept(self, key: str, numel: int, matrices: Sequence[Matrix] = ()) -> dict[str, int]:
        """The names that `state_dict` has of a stream once it has begun, and the number of elements of each."""
        ...


def make_codec(name: str, ratio: float = 0.01) -> Codec:
    """The codec called ``name``, for compressors and for those who keep what it loses themselves. Raises `ValueError`."""
    match name:
        case "fp16" | "bf16" | "int8":
            return DenseCodec(name)
        case "sign":
            return SignCodec()
        case "topk":
            return TopKCodec(ratio)
    raise ValueError(f"there is no codec {name!r}")


def encode(codec: Codec, payload: Payload, pack: Callable[[torch.Tensor, str], torch.Tensor] | None = None) -> Payload:
    """The payload in the codec's form, as far as that shrinks it. ``pack``: in place of the codec's own."""
    form = codec.form(payload.numel, payload.dtype) if shrinks(codec.name, payload.dtype) else None
    if form is None:
        return unchanged(payload)
    (dtype, numel, more), packed, of = form, pack or codec.pack, payload.dtype
    return payload.mapped(dtype, numel, lambda flat: packed(flat, of), {**envelope_of(codec.name, payload), **more})


def make_compressor(name: str, ratio: float = 0.01, rank: int = 4) -> Compressor:
    """The compressor called ``name``. ``ratio``: the share of elements that top-k sends. ``rank``: of PowerSGD's factors. Raises
    `ValueError`."""
    match name:
        case "none":
            return NoCompressor()
        case "fp16" | "bf16" | "int8":
            return PlainCompressor(make_codec(name))
        case "sign" | "topk":
            return FeedbackCompressor(make_codec(name, ratio))
        case "powersgd":
            return PowerSgdCompressor(rank)
    raise ValueError(f"there is no compression {name!r}; choose one of {', '.join(CODECS)}")


class _KeepsNothing:
    """The part of a compressor that keeps nothing between steps: what its codec loses is lost."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        return None

    def kept(self, key: str, numel: int, matrices: Sequence[Matrix] = ()) -> dict[str, int]:
        return {}


class NoCompressor(_KeepsNothing):
    """Sends payloads unchanged."""

    name: CodecName = "none"

    def encode(self, key: str, payload: Payload, matrices: Sequence[Matrix] = ()) -> Payload:
        return payload

    def decode(self, payload: Payload) -> Payload:
        return payload


class PlainCompressor(_KeepsNothing):
    """Sends each payload in its codec's form."""

    def __init__(self, codec: Codec) -> None:
        self.name, self._codec = codec.name, codec

    def encode(self, key: str, payload: Payload, matrices: Sequence[Matrix] = ()) -> Payload:
        return encode(self._codec, payload)

    def decode(self, payload: Payload) -> Payload:
        return decompress(payload, self.name)


class FeedbackCompressor:
    """Adds what the codec loses of one step to the next one's elements (error feedback).

    So over all steps, what was sent plus what is kept equals what was given. Needs memory for one residual per key (float32, or
    float64 for float64).
    """

    def __init__(self, codec: Codec) -> None:
        self.name, self._codec = codec.name, codec
        self._residuals: dict[str, torch.Tensor] = {}

    def encode(self, key: str, payload: Payload, matrices: Sequence[Matrix] = ()) -> Payload:
        return encode(self._codec, payload, partial(self._packed, key))

    def _packed(self, key: str, gradient: torch.Tensor, dtype: str) -> torch.Tensor:
        whole = with_kept(self._residuals, key, gradient)
        packed = self._codec.pack(whole, dtype)
        self._residuals[key] = kept_of(whole, self._codec.unpack(packed, whole.numel(), dtype))
        return packed

    def decode(self, payload: Payload) -> Payload:
        return decompress(payload, self.name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._residuals)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._residuals = {key: residual.clone() for key, residual in state.items()}

    def kept(self, key: str, numel: int, matrices: Sequence[Matrix] = ()) -> dict[str, int]:
        return {key: numel}
