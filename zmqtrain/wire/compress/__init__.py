"""Compression of gradients on the wire.

A compressed payload is an ordinary payload whose ``meta`` is an envelope that says how to decompress it. So networks carry it like
any other, and `decompress` needs nothing but the message::

    sender    compressor.encode(key, payload)  ->  payload on the wire  ->  decompress(payload)    receiver

======== ========================================== ============================== =====================================
name     in the message                             size relative to float32       loss
======== ========================================== ============================== =====================================
none     the payload itself                         1                              nothing
fp16     float16                                    1/2                            precision beyond 11 bits; saturates
bf16     bfloat16                                   1/2                            precision beyond 8 bits
int8     float32 scale per block, int8 elements     1/4                            at most half a step of each block's scale
sign     float32 scale per block, one bit each      1/31                           nothing in the end: the rest is sent later
topk     int32 indices, their values                2 * ratio                      nothing in the end: the rest is sent later
powersgd matrices as factors, the rest as it is     rank * (m + n) / (m * n)       nothing in the end: the rest is sent later
======== ========================================== ============================== =====================================

Elements that are not finite stay so (int8 makes them NaN; sign the whole block, and powersgd the whole matrix), since zeros would
hide that a run diverges. Types that a codec cannot shrink (integers, and float16 with fp16) pass unchanged. Phantoms shrink as
tensors would.
"""

from zmqtrain.wire.compress.codecs import (
    Codec,
    Compressor,
    encode,
    make_codec,
    make_compressor,
)
from zmqtrain.wire.compress.decompress import decompress
from zmqtrain.wire.compress.dense import BLOCK
from zmqtrain.wire.compress.envelope import CODECS, LARGEST_REDUCTION, CodecName, shrinks
from zmqtrain.wire.compress.factors import Matrix
from zmqtrain.wire.compress.feedback import kept_of
from zmqtrain.wire.compress.sign import SIGN_BLOCK

__all__ = [
    "BLOCK",
    "CODECS",
    "LARGEST_REDUCTION",
    "SIGN_BLOCK",
    "Codec",
    "CodecName",
    "Compressor",
    "Matrix",
    "decompress",
    "encode",
    "kept_of",
    "make_codec",
    "make_compressor",
    "shrinks",
]
