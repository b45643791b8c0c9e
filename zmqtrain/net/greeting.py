"""The first words between two peers: greetings and refusals. Sans-IO.

They must be understood between *all* releases, so that each end can tell the other why it refuses: a message of two frames, an
ordinary header (whose magic and version never change their place) and a msgpack map whose keys below never change their meaning.
Unknown keys are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgpack

from zmqtrain.errors import WireError
from zmqtrain.wire.message import WIRE_VERSION, Header, encode_header

#: A greeting holds two names, an address and a token.
MAX_GREETING_BYTES = 4096
#: Names of peers are part of ZeroMQ's routing identities, which are limited to 255 bytes.
MAX_PEER_BYTES = 200

RefusalCode = Literal["version", "token", "lost", "protocol", "epoch"]


@dataclass(frozen=True, slots=True)
class Hello:
    """A process announces itself and its end of the link."""

    peer: str
    to: str
    address: str
    token: str
    process: int
    """A random number of the process: a different one under the same name means a restart."""
    session: int
    """A random number of this end of the link: an abandoned link is never resumed."""
    known: int
    """The receiver's session as far as the sender knows it; 0 if not."""
    opened: bool
    """Whether the sender may already send; if not, it wants an answer."""
    control_window: int
    bulk_window: int
    region: int = 0
    """The shared memory that the sender has open; 0: none. Processes with the same one send each other descriptors of tensors."""
    epoch: int = 0
    """Of a process that leads the run: the number of its leadership; each successor has a higher one. 0: it does not lead."""
    newest: int = 0
    """The highest epoch that the sender knows of; 0: none."""
    version: int = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class Refusal:
    """There is no link between the two processes, and why."""

    peer: str
    to: str
    session: int
    """The session that is refused; a sender that does not know it cannot refuse it."""
    code: RefusalCode
    reason: str
    version: int = WIRE_VERSION


_KINDS: dict[str, type[Hello] | type[Refusal]] = {"hello": Hello, "refusal": Refusal}
#: Values of keys that earlier releases do not send.
_ABSENT = {"region": 0, "epoch": 0, "newest": 0}
_TYPES = {"str": str, "int": int, "bool": bool, "RefusalCode": str}


def encode_greeting(greeting: Hello | Refusal) -> list[bytes]:
    kind = "hello" if isinstance(greeting, Hello) else "refusal"
    # Not asdict, whose deep copies take noticeable time with thousands of simulated peers.
    values = {name: getattr(greeting, name) for name in type(greeting).__annotations__}
    body: bytes = msgpack.packb({"kind": kind, **values})
    return [encode_header(Header(kind, version=greeting.version)), body]


def decode_greeting(frames: Sequence[bytes | memoryview]) -> Hello | Refusal:
    """Decode a greeting or refusal. Raises `WireError` for anything else. The caller must check the version."""
    if len(frames) != 2 or len(frames[1]) > MAX_GREETING_BYTES:
        raise WireError("no greeting")
    try:
        body: Any = msgpack.unpackb(frames[1], max_array_len=0, max_map_len=64, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"invalid greeting: {error}") from error
    kind = _KINDS.get(str(body.get("kind"))) if isinstance(body, dict) else None
    if kind is None:
        raise WireError("no greeting")
    values: dict[str, Any] = {}
    for name, annotation in kind.__annotations__.items():
        value = body.get(name, _ABSENT.get(name))
        if type(value) is not _TYPES[annotation]:
            raise WireError(f"a {body['kind']} whose {name} is {value!r:.60}")
        values[name] = value
    if not 0 < len(values["peer"].encode()) <= MAX_PEER_BYTES:
        raise WireError("a greeting without a valid peer name")
    return kind(**values)
