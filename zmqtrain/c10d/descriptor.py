"""What a rank says of a collective before it takes part: ranks that disagree get an error instead of mixed values."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zmqtrain.c10d.errors import MismatchError
from zmqtrain.c10d.order import PROGRAM, OtherStreamError

_FORMAT = struct.Struct("<24s16sqqqqq")
#: Bytes of a packed descriptor.
NBYTES = _FORMAT.size


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One collective as a rank calls it. Those of all ranks must be equal."""

    kind: str
    """The operation's name in torch."""
    number: int
    """How many collectives of the group and of the stream this rank called before, and itself."""
    dtype: torch.dtype | None = None
    numel: int = -1
    """Elements of each rank's tensor; -1 where they may differ, or there are none."""
    root: int = -1
    detail: int = 0
    """A checksum of what else must be equal: the lengths of parts, the reduce operation."""
    stream: int = PROGRAM
    """Whose order it keeps (`zmqtrain.c10d.order`)."""

    def pack(self) -> bytes:
        """Encode the descriptor. Returns ``NBYTES`` bytes."""
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        kind = self.kind.encode()[:24]
        return _FORMAT.pack(kind, dtype.encode()[:16], self.number, self.numel, self.root, self.detail, self.stream)


def checksum(*what: object) -> int:
    """The same number on all ranks for the same content."""
    return zlib.crc32(repr(what).encode())


def told(packed: bytes) -> str:
    """A packed descriptor for an error's text."""
    kind, dtype, number, numel, root, _, stream = _FORMAT.unpack(packed)
    text = bytes(kind).rstrip(b"\0").decode()
    if dtype.strip(b"\0"):
        of = bytes(dtype).rstrip(b"\0").decode()
        text += f" of {numel} x {of}" if numel >= 0 else f" of {of}"
    return text + (f" from rank {root}" if root >= 0 else "") + f" (collective {number}{' of a callback' * (stream != PROGRAM)})"


def require_equal(packed: Sequence[bytes], names: Sequence[str], *, more: str = "") -> None:
    """Raise `MismatchError` if the ranks' descriptors differ, and `OtherStreamError` if they are of different streams.

    ``names``: of the ranks. ``more``: what else this rank knows.
    """
    if all(each == packed[0] for each in packed):
        return
    streams = [_FORMAT.unpack(each)[-1] for each in packed]
    if any(stream != streams[0] for stream in streams):
        raise OtherStreamError(streams[0])
    calls: dict[bytes, list[str]] = {}
    for each, name in zip(packed, names, strict=True):
        calls.setdefault(each, []).append(name)
    texts = [told(each) for each in calls]
    same = len(set(texts)) == 1  # only the checksums differ
    lines = [f"{_listed(who)}: {text}" for who, text in zip(calls.values(), texts, strict=True)]
    raise MismatchError(
        f"the ranks of a process group called different operations ({'; '.join(lines)})"
        + (", with other lengths of parts, or another reduce operation" if same else "")
        + ". All must call the same operations in the same order, with the same sizes and dtypes; threads that call at the "
        "same time need a group each. "
        + (more or "TORCH_DISTRIBUTED_DEBUG=DETAIL adds this rank's shapes and the line that called")
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
