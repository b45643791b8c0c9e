"""The receiver's side of all codecs: the message says everything."""

from __future__ import annotations

from zmqtrain.errors import WireError
from zmqtrain.wire.compress.dense import open_dense
from zmqtrain.wire.compress.envelope import ENVELOPE, RAW, open_unchanged, shrinks
from zmqtrain.wire.compress.factors import open_factors
from zmqtrain.wire.compress.sign import open_sign
from zmqtrain.wire.compress.topk import open_topk
from zmqtrain.wire.dtypes import DTYPES
from zmqtrain.wire.payload import Payload


def decompress(payload: Payload, codec: str | None = None) -> Payload:
    """Undo a compressor's ``encode`` (of ``codec``, if given). Raises `WireError` if the payload is not the result of one."""
    envelope = payload.meta
    if type(envelope) is not dict or not envelope.keys() >= ENVELOPE:
        raise WireError(f"{payload!r} is not compressed")
    name, dtype, numel, meta = (envelope[field] for field in ("codec", "dtype", "numel", "meta"))
    if type(name) is not str or (codec is not None and name not in (codec, RAW)):
        raise WireError(f"{payload!r} is compressed with {name!r}, but {codec or 'a codec'} was expected")
    if type(dtype) is not str or dtype not in DTYPES or type(numel) is not int or numel < 0:
        raise WireError(f"{payload!r} stands for {numel!r:.40} elements of type {dtype!r:.40}")
    if name == RAW:
        return open_unchanged(payload, dtype, numel, meta)
    if not shrinks(name, dtype):
        raise WireError(f"{payload!r} is compressed with {name!r} from {dtype!r}, which no codec does")
    match name:
        case "topk":
            return open_topk(payload, dtype, numel, envelope.get("count"), meta)
        case "sign":
            return open_sign(payload, dtype, numel, meta)
        case "powersgd":
            return open_factors(payload, dtype, numel, envelope.get("rank"), envelope.get("matrices"), meta)
    return open_dense(name, payload, dtype, numel, meta)
