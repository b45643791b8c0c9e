"""The first words between two peers: greetings and refusals. Sans-IO.

They must be understood between *all* releases, so that each end can tell the other why it refuses: a message of two frames, an
ordinary header (whose magic and version never change their place) and a msgpack map whose keys below never change their meaning.
Unknown keys are ignored. The first key, `check`, has the checksum of the map: what a greeting says of epochs and sessions is
believed, so a flipped bit must not say something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import intern
from typing import Any, Literal, NamedTuple, get_type_hints
from zlib import crc32

import msgpack

from zmqtrain.errors import WireError
from zmqtrain.wire.message import WIRE_VERSION, Header, encode_header

#: A greeting holds two names, an address and a token.
MAX_GREETING_BYTES = 4096
#: Names of peers are part of ZeroMQ's routing identities, which are limited to 255 bytes.
MAX_PEER_BYTES = 200

RefusalCode = Literal["version", "token", "lost", "protocol", "epoch"]


class Hello(NamedTuple):
    """A process announces itself and its end of the link. (A tuple, like `Header`: six are made for each pair of peers.)"""

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


class Refusal(NamedTuple):
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
#: For each kind: the name and type of each key, and its value if it is absent.
_KEYS = {
    kind: [(name, str if hint is RefusalCode else hint, _ABSENT.get(name)) for name, hint in get_type_hints(greeting).items()]
    for kind, greeting in _KINDS.items()
}


#: The key of the checksum, and what stands in its place while it is computed.
_CHECK, _NO_CHECK = "check", bytes(4)
_PLACE = msgpack.packb(_CHECK) + msgpack.packb(_NO_CHECK)[: -len(_NO_CHECK)]
"""What comes before the checksum."""


def encode_greeting(greeting: Hello | Refusal) -> list[bytes]:
    kind = "hello" if isinstance(greeting, Hello) else "refusal"
    body: bytes = msgpack.packb({_CHECK: _NO_CHECK, "kind": kind, **greeting._asdict()})
    start = body.index(_PLACE) + len(_PLACE)
    body = body[:start] + crc32(body).to_bytes(4, "big") + body[start + len(_NO_CHECK) :]
    return [encode_header(Header(kind, version=greeting.version)), body]


def _require_whole(body: bytes, check: object) -> None:
    """Raise `WireError` if the checksum says that the greeting was damaged; earlier releases send none."""
    if check is None:
        return
    start = body.find(_PLACE) + len(_PLACE)
    before = body[:start] + _NO_CHECK + body[start + len(_NO_CHECK) :]
    if not isinstance(check, bytes) or crc32(before).to_bytes(4, "big") != check:
        raise WireError("a greeting that was damaged on the way")


def decode_greeting(frames: Sequence[bytes | memoryview]) -> Hello | Refusal:
    """Decode a greeting or refusal. Raises `WireError` for anything else. The caller must check the version."""
    if len(frames) != 2 or len(frames[1]) > MAX_GREETING_BYTES:
        raise WireError("no greeting")
    try:
        body: Any = msgpack.unpackb(frames[1], max_array_len=0, max_map_len=64, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"invalid greeting: {error}") from error
    kind = body.get("kind") if isinstance(body, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise WireError("no greeting")
    _require_whole(bytes(frames[1]), body.get(_CHECK))
    values: list[Any] = []
    for name, expected, absent in _KEYS[kind]:
        value = body.get(name, absent)
        if type(value) is not expected:
            raise WireError(f"a {kind} whose {name} is {value!r:.60}")
        # Greetings are kept, and the same names come again and again, with thousands of simulated links.
        values.append(intern(value) if expected is str else value)
    greeting = _KINDS[kind](*values)
    if not 0 < len(greeting.peer.encode()) <= MAX_PEER_BYTES:
        raise WireError("a greeting without a valid peer name")
    return greeting
