"""Marks in the header of a piece, which say how a link carries its bytes: flags, and the topics of the endpoint's own messages."""

from __future__ import annotations

from typing import Final

from zmqtrain.errors import WireError
from zmqtrain.wire.message import PHANTOM, TENSOR, VALUE, Header

#: The piece was sent beyond the window, because the peer waits for it.
BEYOND: Final = 1
#: The phantom's bytes follow in pieces of their own.
FOLLOWS: Final = 2
#: The body is a descriptor of shared memory.
SHARED: Final = 4
#: That memory does not change until the message has been used, so the receiver need not copy it.
LASTING: Final = 8
#: The kind of a piece that continues a message.
CHUNK: Final = "chunk"

#: Topics of requests and of what answers them.
REQUEST: Final = "@request"
ANSWER: Final = "@answer"
ERROR: Final = "@error"
_OWN: Final = frozenset({REQUEST, ANSWER, ERROR})

_PIECES = frozenset({TENSOR, PHANTOM, VALUE, CHUNK})
_ALL = BEYOND | FOLLOWS | SHARED | LASTING


def check_flags(kind: str, flags: int) -> None:
    """Raise `WireError` for flags that a message of this kind can never have."""
    alone = (flags & LASTING and not flags & SHARED) or (flags & FOLLOWS and kind != PHANTOM)
    if flags & ~_ALL or kind not in _PIECES or alone:
        raise WireError(f"a message of kind {kind!r:.60} has the invalid flags {flags}")


def shows_by_itself(header: Header) -> bool:
    """Whether a message on the control lane is a request or an answer: what follows it shows that it has arrived, and nobody waits
    for an acknowledgement."""
    return header.kind == VALUE and bool(header.tag) and header.tag[0] in _OWN
