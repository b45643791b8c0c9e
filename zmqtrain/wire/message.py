"""A message: a header and the bytes of a payload.

The header is a msgpack list. Its first two members, `MAGIC` and the version, never change, so that every release can tell
messages of every other release from garbage; the rest depends on the version::

    [magic, version, kind, sequence, message, dtype, shape, offset, nbytes, flags, acks, tag, meta], followed by its CRC-32

What a sender gives for a message, tag and meta, stands last: it is packed and checked when it is given, and appended as bytes.

Kinds ``tensor``, ``phantom`` and ``value`` are payloads; a link may define its own kinds, whose ``meta`` only it understands.
The flags and acks belong to the link, too: they say how it carries these bytes, and what it has received.

Decoding raises only `WireError`, for anything that is not a message within the limits. Encoding raises `ValueError` or
`TypeError` for a tag or value that the other side would refuse. Tuples within a ``meta`` arrive as lists.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, cast
from zlib import crc32

import msgpack

from zmqtrain.errors import WireError
from zmqtrain.wire.dtypes import DTYPES
from zmqtrain.wire.limits import DEFAULT_LIMITS, Limits
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import Buffer, TensorPayload
from zmqtrain.wire.value import ValuePayload
from zmqtrain.words import typed

MAGIC: Final = "zmqt"
WIRE_VERSION: Final = 4

TENSOR: Final = "tensor"
PHANTOM: Final = "phantom"
VALUE: Final = "value"

Tag: TypeAlias = tuple[str | int, ...]


class WireVersionError(WireError):
    """A message of another wire version. A caller that knows the peer turns it into `VersionMismatchError`."""

    def __init__(self, theirs: int) -> None:
        self.ours, self.theirs = WIRE_VERSION, theirs
        super().__init__(f"a message has wire version {theirs}, but this process uses {WIRE_VERSION}")


class Header(NamedTuple):
    """What precedes the bytes. A tuple and not a dataclass, since one is made for every message and chunk."""

    #: The kind of message: ``tensor``, ``phantom``, ``value``, or one of the link's own kinds.
    kind: str
    #: The tag that identifies the message.
    tag: Tag = ()
    #: The frame's number in its lane.
    sequence: int = 0
    #: The link's number of the message to which the bytes belong, if it is sent in chunks.
    message: int = 0
    #: Element type; empty if there are no elements.
    dtype: str = ""
    shape: tuple[int, ...] = ()
    #: The position in the message's body at which the bytes of this frame begin.
    offset: int = 0
    #: The size of the message's whole body; for phantoms, of the body that is not sent.
    nbytes: int = 0
    #: Bits that only the link understands (`zmqtrain.net.flags`); 0 for whole messages.
    flags: int = 0
    #: In an acknowledgement: what its sender has received and may be sent, in numbers that only the link understands.
    acks: tuple[int, ...] = ()
    meta: Value = None
    version: int = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class Message:
    """A header and the payload that came with it."""

    header: Header
    payload: Payload


_LENGTH: Final = 13
#: The most numbers in a header's ``acks``.
_ACKS: Final = 4
#: A header is followed by the CRC-32 of its bytes. TCP's own 16-bit checksum misses one error in some ten thousand, and a wrong
#: step or size does harm far from its origin. (Tensors have no checksum: that would cost as much as copying them.)
_CHECK_BYTES: Final = 4
#: The most bytes of the fields that the link fills in: names, a shape, a dozen numbers.
_REST_BYTES: Final = 1024
_pack = msgpack.packb
#: One packer for all headers saves `packb` from making one for each call. It is given only numbers,
#: strings and tuples of these: what may call Python code while it is packed, such as a dict's subclass, needs a packer of its own.
_pack_plain = msgpack.Packer().pack
#: The first bytes of every header of this version: a list of 13, the magic, the version.
_PREFIX: Final = bytes(_pack([MAGIC, WIRE_VERSION, *[None] * (_LENGTH - 2)])[: len(MAGIC) + 3])


#: How msgpack packs None, the usual ``meta``.
_NONE: Final = b"\xc0"


def encode_header(header: Header, limits: Limits = DEFAULT_LIMITS, label: bytes | None = None) -> bytes:
    """The header's bytes. Raises `ValueError` or `TypeError` if the other side would refuse its tag or ``meta``.

    ``label``: what `pack_label` returned for both.
    """
    if label is None:
        label = pack_label(header, limits)
    kind, _, sequence, message, dtype, shape, offset, nbytes, flags, acks, _, version = header
    data: bytes = _pack_plain((MAGIC, version, kind, sequence, message, dtype, shape, offset, nbytes, flags, acks, None, None))
    data = data[:-2] + label
    return data + crc32(data).to_bytes(_CHECK_BYTES, "little")


def pack_label(header: Header, limits: Limits = DEFAULT_LIMITS, packed: bytes | None = None) -> bytes:
    """The header's tag and ``meta`` as bytes; later changes to them have no effect.

    ``packed``: what `packed_value` returned for the same ``meta``.

    Raises `ValueError` or `TypeError` if the other side would refuse a header with these.
    """
    tag, meta = header.tag, header.meta
    try:
        _check_tag(tag, limits)
        if meta is not None and packed is None:
            check_value(meta, limits.depth, limits.items)
        label: bytes = _pack_plain(tag) + (_NONE if meta is None else _pack(meta) if packed is None else packed)
    except OverflowError as error:
        raise ValueError(f"the header of {header.kind} {tag} contains an integer of more than 64 bits") from error
    except WireError as error:
        raise ValueError(f"the header of {header.kind} {tag} cannot be sent: {error}") from error
    most = limits.header_bytes - _REST_BYTES
    if len(label) > most:
        raise ValueError(
            f"the header of {header.kind} {tag} takes {len(label):,} bytes, above the limit of {most:,}: "
            "send its meta as a tensor, or as a value of its own"
        )
    return label


def decode_header(data: Buffer, limits: Limits = DEFAULT_LIMITS) -> Header:
    """The header in ``data``, every field checked. Raises `WireError`; for another version `WireVersionError`."""
    size = len(data)
    if size > limits.header_bytes:
        raise WireError(f"a header has {size:,} bytes, above the limit of {limits.header_bytes:,}")
    if data[: len(_PREFIX)] != _PREFIX:
        _refuse(data)
    data, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if crc32(data) != int.from_bytes(check, "little"):
        raise WireError(f"a header of {size:,} bytes was damaged on the way")
    fields = _unpack(data, limits.items)
    _, _, kind, sequence, message, dtype, raw_shape, offset, nbytes, flags, raw_acks, raw_tag, meta = fields
    if type(kind) is not str or not 0 < len(kind) <= limits.tag_characters:
        raise WireError(f"the header's kind is {_shown(kind)}")
    if type(raw_tag) is not list:
        raise WireError(f"the header's tag is {_shown(raw_tag)}")
    _check_tag(raw_tag, limits)
    if not type(sequence) is type(message) is type(offset) is type(nbytes) is type(flags) is int or (
        sequence < 0 or message < 0 or offset < 0 or nbytes < 0 or flags < 0
    ):
        numbers = {"sequence": sequence, "message": message, "offset": offset, "nbytes": nbytes, "flags": flags}
        wrong = next(name for name, number in numbers.items() if type(number) is not int or number < 0)
        raise WireError(f"the header's {wrong} is {_shown(numbers[wrong])}")
    if type(raw_acks) is not list or len(raw_acks) > _ACKS:
        raise WireError(f"the header's acks are {_shown(raw_acks)}")
    for number in raw_acks:
        if type(number) is not int or number < 0:
            raise WireError(f"the header's acks contain {_shown(number)}")
    if nbytes > limits.message_bytes:
        raise WireError(f"a message claims to have {nbytes:,} bytes, above the limit of {limits.message_bytes:,}")
    if offset > nbytes:
        raise WireError(f"a frame claims to hold bytes from {offset} on in a message of {nbytes:,}")
    if type(raw_shape) is not list or len(raw_shape) > limits.dimensions:
        raise WireError(f"the header's shape is {_shown(raw_shape)}")
    if type(dtype) is not str:
        raise WireError(f"the header's dtype is {_shown(dtype)}")
    if dtype or kind in (TENSOR, PHANTOM):
        _check_elements(dtype, raw_shape, nbytes, limits)
    elif raw_shape:
        raise WireError(f"a header has the shape {raw_shape}, but no element type")
    if kind == VALUE and (dtype or nbytes > limits.value_bytes):
        raise WireError(f"a value claims to have {nbytes:,} bytes and type {_shown(dtype)}; the limit is {limits.value_bytes:,}")
    if meta is not None:
        check_value(meta, limits.depth, limits.items)
    tag, shape, acks = tuple(raw_tag), tuple(raw_shape), tuple(raw_acks)
    return Header(kind, tag, sequence, message, dtype, shape, offset, nbytes, flags, acks, meta)


def describe(
    payload: Payload, tag: Tag = (), *, sequence: int = 0, message: int = 0, limits: Limits = DEFAULT_LIMITS
) -> tuple[Header, Sequence[memoryview]]:
    """The header of a whole message and its body, not copied. ``header.nbytes`` is the body's size (except for phantoms)."""
    if type(payload) is ValuePayload:  # first: values are the most frequent
        packed = packed_value(payload, limits)
        if len(packed) <= limits.inline_value_bytes:
            return Header(VALUE, tag, sequence, message, meta=payload.meta), ()
        return Header(VALUE, tag, sequence, message, nbytes=len(packed), meta=crc32(packed)), (memoryview(packed),)
    if isinstance(payload, TensorPayload):
        header = Header(TENSOR, tag, sequence, message, payload.dtype, payload.shape, 0, payload.nbytes, meta=payload.meta)
        return header, payload.frames()
    assert isinstance(payload, PhantomPayload)
    return Header(PHANTOM, tag, sequence, message, payload.dtype, payload.shape, 0, payload.nbytes, meta=payload.meta), ()


def open_body(header: Header, body: Buffer, limits: Limits = DEFAULT_LIMITS) -> Payload:
    """The payload of a message whose whole body has arrived; a tensor aliases ``body``. Raises `WireError`."""
    if header.kind == TENSOR:
        return TensorPayload.received(body, header.dtype, header.shape, header.meta)
    if header.kind == PHANTOM and not len(body) and header.dtype in DTYPES:
        return PhantomPayload(math.prod(header.shape), header.dtype, header.meta)
    if header.kind == VALUE:
        if len(body) != header.nbytes:
            raise WireError(f"{len(body):,} bytes were received for a value of {header.nbytes:,}")
        if header.nbytes and crc32(body) != header.meta:
            raise WireError(f"a value of {header.nbytes:,} bytes was damaged on the way")
        return ValuePayload(unpack_value(body, limits) if header.nbytes else header.meta)
    raise WireError(f"{len(body):,} bytes of kind {_shown(header.kind)} are not a payload")


def encode(payload: Payload, tag: Tag = (), *, sequence: int = 0, message: int = 0) -> list[bytes | memoryview]:
    """All frames of a message that is sent whole: the header, and the body's frames, not copied."""
    header, body = describe(payload, tag, sequence=sequence, message=message)
    return [encode_header(header), *body]


def decode(frames: Sequence[Buffer], limits: Limits = DEFAULT_LIMITS) -> Message:
    """The message in ``frames``. A tensor aliases its frame, if it is in one frame. Raises `WireError`."""
    if not 0 < len(frames) <= limits.frames:
        raise WireError(f"a message has {len(frames)} frames; there must be 1 to {limits.frames}")
    header = decode_header(frames[0], limits)
    if header.flags:
        raise WireError(f"a whole message has the flags {header.flags}, but must have none")
    received = sum(len(frame) for frame in frames[1:])
    expected = 0 if header.kind == PHANTOM else header.nbytes
    if header.offset or received != expected:
        raise WireError(f"{received:,} bytes from {header.offset:,} on were received, but a whole message has {expected:,}")
    body = frames[1] if len(frames) == 2 else b"".join(frames[1:])
    return Message(header, open_body(header, body, limits))


def pack_value(value: Value, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The value as bytes. Raises `TypeError` or `ValueError` if `unpack_value` would refuse them."""
    try:
        data: bytes = _pack(value)
        check_value(value, limits.depth, limits.value_items)
    except OverflowError as error:
        raise ValueError("the value contains an integer of more than 64 bits") from error
    except WireError as error:
        raise ValueError(f"the value cannot be sent: {error}") from error
    if len(data) > limits.value_bytes:
        raise ValueError(f"the value takes {len(data):,} bytes, above the limit of {limits.value_bytes:,}: send it as a tensor")
    return data


def packed_value(payload: ValuePayload, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The payload's value as bytes, made once: a view of thousands of members goes to each of them. Raises like `pack_value`."""
    if payload.packed is None or payload.packed[0] is not payload.meta:
        payload.packed = payload.meta, pack_value(payload.meta, limits)
    return payload.packed[1]


def unpack_value(data: Buffer, limits: Limits = DEFAULT_LIMITS) -> Value:
    """The value in ``data``. Raises `WireError`."""
    if len(data) > limits.value_bytes:
        raise WireError(f"a value has {len(data):,} bytes, above the limit of {limits.value_bytes:,}")
    value: Value = _unpack(data, limits.value_items)
    check_value(value, limits.depth, limits.value_items)
    return value


def check_value(value: object, depth: int, items: int) -> None:
    """Raise `WireError` if ``value`` is not a `Value`, is nested deeper than ``depth``, or has more than ``items`` members in one
    list or map."""
    if type(value) in _SCALARS:
        return
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise WireError(f"a map has the key {_shown(key)}, which is not a string")
        members: Collection[object] = value.values()
    elif type(value) in (list, tuple):
        members = cast("Collection[object]", value)
    elif isinstance(value, _NEARLY_SCALARS):
        return
    else:
        raise WireError(f"{typed(value)} cannot be sent")
    if depth <= 0:
        raise WireError("a value is nested too deeply")
    if len(members) > items:
        raise WireError(f"a list or map has {len(members)} members, above the limit of {items}")
    for member in members:
        if type(member) not in _SCALARS:
            check_value(member, depth - 1, items)


_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
#: Enumerations, numpy's float64 and the like are sent as their base types.
_NEARLY_SCALARS: Final = (int, float, str, bytes, bytearray, memoryview)


def _shown(value: object) -> str:
    """A foreign value for an error's text. `repr` of deeply nested lists would overflow the stack."""
    if isinstance(value, (str, bytes)):
        return repr(value[:60])
    return repr(value) if type(value) in _SCALARS else typed(value)


def _check_tag(tag: Sequence[Any], limits: Limits) -> None:
    if len(tag) > limits.tag_items:
        raise WireError(f"a tag has {len(tag)} items, above the limit of {limits.tag_items}")
    for item in tag:
        kind = type(item)
        if kind is not int and ((kind is not str and not isinstance(item, str)) or len(item) > limits.tag_characters):
            raise WireError(f"a tag contains {_shown(item)}; its items must be whole numbers and short strings")


def _check_elements(dtype: str, shape: list[Any], nbytes: int, limits: Limits) -> None:
    info = DTYPES.get(dtype)
    if info is None:
        raise WireError(f"a header has the unknown element type {_shown(dtype)}")
    count = extent = info.itemsize
    for length in shape:
        if type(length) is not int or length < 0:
            raise WireError(f"a header has a shape with the length {_shown(length)}")
        count *= length
        extent *= length or 1  # a length of 0 must not hide others that overflow
    if extent > limits.message_bytes:
        raise WireError(f"a header has the shape {shape} of {dtype}, above the limit of {limits.message_bytes:,} bytes")
    if count != nbytes:
        raise WireError(f"a header has {nbytes:,} bytes for {dtype}{shape}, which needs {count:,}")


def _unpack(data: Buffer, items: int) -> Any:
    try:
        return msgpack.unpackb(data, max_array_len=items, max_map_len=items, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"{len(data):,} bytes are not msgpack within the limits: {error}") from error


def _refuse(data: Buffer) -> NoReturn:
    """Raise the reason why bytes that do not begin like a header of this version are refused."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)), max_ext_len=0, max_array_len=64, max_map_len=0)
    try:
        unpacker.feed(data)
        length = unpacker.read_array_header()
        magic = unpacker.unpack()
        version = unpacker.unpack()
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"{len(data):,} bytes are not a message of zmqtrain") from error
    if magic != MAGIC or type(version) is not int:
        raise WireError(f"{len(data):,} bytes are not a message of zmqtrain")
    if version != WIRE_VERSION:
        raise WireVersionError(version)
    raise WireError(f"a header has {length} fields, but in version {WIRE_VERSION} it has {_LENGTH}")
