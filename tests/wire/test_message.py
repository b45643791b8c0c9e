"""Messages survive the way there; nothing else does, and says so by `WireError` alone."""

from __future__ import annotations

import enum
import math
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from zlib import crc32

import msgpack
import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

import zmqtrain.wire
from zmqtrain.errors import WireError
from zmqtrain.wire.dtypes import DTYPES, torch_dtype
from zmqtrain.wire.limits import DEFAULT_LIMITS, Limits
from zmqtrain.wire.message import (
    MAGIC,
    WIRE_VERSION,
    Header,
    WireVersionError,
    decode,
    decode_header,
    describe,
    encode,
    encode_header,
    open_body,
    pack_value,
    packed_value,
    unpack_value,
)
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

TAGS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20), max_size=8).map(tuple)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=20
)
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(st.sampled_from(list(DTYPES)), SHAPES, TAGS, VALUES, st.booleans(), st.binary(min_size=16, max_size=16))
def test_tensors_arrive_bit_by_bit(
    dtype: str, shape: tuple[int, ...], tag: tuple[str | int, ...], meta: Any, through_numpy: bool, seed: bytes
) -> None:
    raw = (seed * 6**4)[: math.prod(shape) * DTYPES[dtype].itemsize]
    if dtype == "bool":
        raw = bytes(byte & 1 for byte in raw)
    source = TensorPayload.received(bytearray(raw), dtype, shape)
    from_numpy = through_numpy and not DTYPES[dtype].raw
    source = TensorPayload.of(source.numpy() if from_numpy else source.tensor, meta)
    message = decode(encode(source, tag, sequence=3, message=4))
    assert message.header[:7] == Header("tensor", tag, 3, 4, dtype, shape)[:7]
    received = message.payload
    assert isinstance(received, TensorPayload)
    assert (received.meta, received.shape, received.tensor.dtype) == (meta, shape, torch_dtype(dtype))
    assert b"".join(received.frames()) == raw


@given(VALUES, TAGS)
def test_values_and_phantoms_arrive(meta: Any, tag: tuple[str | int, ...]) -> None:
    value = decode(encode(ValuePayload(meta), tag))
    assert isinstance(value.payload, ValuePayload)
    assert (value.payload.meta, value.header.tag) == (meta, tag)
    phantom = decode(encode(PhantomPayload(2**30, "float16", meta), tag)).payload
    assert isinstance(phantom, PhantomPayload)
    assert (phantom.numel, phantom.dtype, phantom.meta) == (2**30, "float16", meta)


def test_large_values_travel_as_a_body() -> None:
    meta = {"events": [{"step": step, "loss": step / 7} for step in range(20_000)]}
    header, body = describe(ValuePayload(meta))
    assert header.nbytes == body[0].nbytes > DEFAULT_LIMITS.header_bytes
    assert decode(encode(ValuePayload(meta))).payload.meta == meta


def test_a_body_may_come_in_pieces() -> None:
    source = TensorPayload.of(np.arange(1000, dtype="int64"))
    header, body = encode(source)
    message = decode([header, body[:17], body[17:4000], body[4000:]])
    assert isinstance(message.payload, TensorPayload)
    assert message.payload.numpy().tolist() == list(range(1000))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_copy_from_64_kib_up(dtype: str) -> None:
    source = torch.ones(65536 // torch_dtype(dtype).itemsize).to(torch_dtype(dtype))
    header, body = encode(TensorPayload.of(source))
    assert np.frombuffer(body, np.uint8).ctypes.data == source.data_ptr()
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        pull.connect(f"tcp://127.0.0.1:{push.bind_to_random_port('tcp://127.0.0.1')}")
        push.send_multipart([header, body], copy=False)
        frames = [frame.buffer for frame in pull.recv_multipart(copy=False)]
        payload = decode(frames).payload
        assert isinstance(payload, TensorPayload)
        assert payload.tensor.data_ptr() == payload.pointer == np.frombuffer(frames[1], np.uint8).ctypes.data
        assert payload.tensor.eq(1).all()


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 9), st.sampled_from(["ack", "credit", "hello"]), VALUES)
def test_links_have_kinds_of_their_own(sequence: int, message: int, offset: int, kind: str, meta: Any) -> None:
    header = Header(kind, ("x", 1), sequence, message, "", (), offset, 9, meta=meta)
    assert decode_header(encode_header(header)) == header
    with pytest.raises(WireError, match="not a payload"):
        open_body(header, b"")


@pytest.mark.parametrize("kind", ["tensor", "phantom", "value"])
@pytest.mark.parametrize("body", [b"", bytes(4), b"\xc1\xc1\xc1\xc1"])
def test_a_link_that_changes_the_kind_opens_no_nonsense(kind: str, body: bytes) -> None:
    header = decode_header(encode_header(Header("link", ("x",), nbytes=4)))._replace(kind=kind)
    if (kind, body) == ("value", bytes(4)):
        body = b"\x00\x00"
    with pytest.raises(WireError):
        open_body(header, body)


def test_another_version_is_recognised_whatever_follows() -> None:
    for foreign in ([MAGIC, WIRE_VERSION + 1], [MAGIC, 1000, {"all": b"new"}, msgpack.ExtType(5, b"x")], [MAGIC, 0, *range(30)]):
        with pytest.raises(WireVersionError) as caught:
            decode_header(msgpack.packb(foreign))
        assert (caught.value.theirs, caught.value.ours) == (foreign[1], WIRE_VERSION)


def checked(header: bytes) -> bytes:
    """With the sum that stands behind a header, so that what is refused is what the header says."""
    return header + crc32(header).to_bytes(4, "little")


def fields(**changes: object) -> bytes:
    header = Header("tensor", ("gradient", 1), 0, 0, "float32", (2, 3), 0, 24)._asdict()
    values = {
        "magic": MAGIC,
        "version": WIRE_VERSION,
        **{key: value for key, value in header.items() if key not in ("tag", "meta", "version")},
        "tag": header["tag"],
        "meta": header["meta"],
        **changes,
    }
    return checked(bytes(msgpack.packb(list(values.values()))))


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


BAD: dict[str, dict[str, object]] = {
    "kind is a number": {"kind": 3},
    "kind is empty": {"kind": ""},
    "kind is long": {"kind": "x" * 1000},
    "tag is text": {"tag": "gradient"},
    "tag holds a float": {"tag": [1.5]},
    "tag holds a truth value": {"tag": [True]},
    "tag is long": {"tag": list(range(17))},
    "tag holds a long text": {"tag": ["x" * 1000]},
    "sequence is negative": {"sequence": -1},
    "flags are negative": {"flags": -1},
    "flags are text": {"flags": "+"},
    "sequence is text": {"sequence": "1"},
    "message is nothing": {"message": None},
    "acks are negative": {"acks": [1, -1, 0, 0]},
    "acks are nothing": {"acks": None},
    "acks are many": {"acks": [1] * 5},
    "acks hold a truth value": {"acks": [True, 0, 0, 0]},
    "dtype is unknown": {"dtype": "float33"},
    "dtype is bytes": {"dtype": b"float32"},
    "dtype is missing": {"dtype": ""},
    "shape is a number": {"shape": 6},
    "shape is negative": {"shape": [-2, -3]},
    "shape holds a truth value": {"shape": [True, 6]},
    "shape has many dimensions": {"shape": [1] * 31 + [2, 3]},
    "shape is another size": {"shape": [7]},
    "shape overflows behind a zero": {"shape": [0, 2**60, 2**60], "nbytes": 0},
    "offset is behind the end": {"offset": 25},
    "offset is negative": {"offset": -4},
    "nbytes is beyond the limit": {"shape": [2**58], "nbytes": 2**60},
    "nbytes is beyond the limit of a value": {"kind": "value", "dtype": "", "shape": [], "nbytes": 2**30},
    "value has elements": {"kind": "value"},
    "link kind has a shape and no type": {"kind": "ack", "dtype": ""},
    "meta is deep": {"meta": nested(17)},
    "meta is very deep": {"meta": nested(400)},
    "meta is a tower": {"meta": nested(500)},
    "kind is a tower": {"kind": nested(500)},
    "tag is a tower": {"tag": nested(500)},
    "shape is a tower": {"shape": nested(500)},
    "dtype is a tower": {"dtype": nested(500)},
    "nbytes is a tower": {"nbytes": nested(500)},
    "meta has numbers for keys": {"meta": {"a": {1: 2}}},
    "meta has an extension": {"meta": msgpack.ExtType(1, b"x")},
    "meta has a time": {"meta": [msgpack.Timestamp(1, 2)]},
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_fields_are_refused(fault: str) -> None:
    with pytest.raises(WireError):
        decode([fields(**BAD[fault]), bytes(24)])


def test_the_unchanged_fields_are_good() -> None:
    assert decode([fields(), bytes(24)]).payload.numel == 6
    assert decode([fields(meta=nested(16)), bytes(24)]).payload.meta == nested(16)


@pytest.mark.parametrize("field", range(13))
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01"])
def test_towers_of_any_height_are_refused(field: int, opening: bytes) -> None:
    for height in (17, 100, 900, 990, 1000, 1010, 1020, 1030, 5000):
        members = [msgpack.packb(member) for member in msgpack.unpackb(fields()[:-4])]
        members[field] = opening * height + b"\x01"
        with pytest.raises(WireError):
            decode([checked(b"\x9d" + b"".join(members)), bytes(24)])


@given(st.data())
def test_a_flipped_bit_of_a_header_or_a_value_is_always_seen(data: st.DataObject) -> None:
    value = {"step": data.draw(st.integers(0, 10**6)), "text": "x" * data.draw(st.sampled_from([10, 50_000]))}
    frames = [bytes(frame) for frame in encode(ValuePayload(value), ("report", 3))]
    number = data.draw(st.integers(0, len(frames) - 1))
    bit = data.draw(st.integers(0, 8 * len(frames[number]) - 1))
    damaged = bytearray(frames[number])
    damaged[bit // 8] ^= 1 << (bit % 8)
    frames[number] = bytes(damaged)
    with pytest.raises((WireError, WireVersionError)):
        decode(frames)


def test_bad_frames_are_refused() -> None:
    good = fields()
    for frames in (
        [],
        [b""],
        [good],
        [good, bytes(23)],
        [good, bytes(24), b"x"],
        [good[:-1], bytes(24)],
        [good + b"x", bytes(24)],
        [checked(good[:-4] + b"x"), bytes(24)],
        [fields(offset=8), bytes(16)],
        [good, *[bytes(0)] * 64, bytes(24)],
        [fields(magic="zmqr"), bytes(24)],
        [b"GET / HTTP/1.1\r\n\r\n"],
        [fields(kind="phantom"), bytes(24)],
        [fields(flags=1), bytes(24)],
        [checked(bytes(msgpack.packb([MAGIC, WIRE_VERSION, *range(11)]))), b""],
        [bytes(msgpack.packb([MAGIC, WIRE_VERSION, 1])), b""],
        [bytes(msgpack.packb({"magic": MAGIC})), b""],
    ):
        with pytest.raises(WireError):
            decode(frames)


@pytest.mark.parametrize(
    "data",
    [
        fields(shape=[2**58], nbytes=2**60),
        fields(kind="value", dtype="", shape=[], nbytes=2**60),
        fields()[:-1] + b"\xdd\x7f\xff\xff\xff",  # meta: a list of two billion
        fields()[:-1] + b"\xdf\x7f\xff\xff\xff",  # a map of as many
        fields()[:-1] + b"\xc6\x7f\xff\xff\xff",  # bytes
        fields()[:-1] + b"\xdb\x7f\xff\xff\xff",  # text
        fields()[:-1] + b"\xc9\x7f\xff\xff\xff\x01",  # an extension
        fields()[:-1] + b"\xdd\x7f\xff\xff\xff" * 1000,
        b"\xdd\x7f\xff\xff\xff" * 1000,
        b"\x9b\xa4zmqt\xc6\x7f\xff\xff\xff",
        b"\x9b" * DEFAULT_LIMITS.header_bytes,
        bytes(DEFAULT_LIMITS.header_bytes + 1),
    ],
)
def test_nothing_is_allocated_for_what_is_declared(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode([data, b""])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_a_tower_of_lists_takes_bounded_memory() -> None:
    tower = fields()[:-1] + b"\xdc\x0f\xff" * 2000  # each a list of 4095 members, of which the first is the next
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode_header(tower)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64_000_000


@pytest.mark.parametrize(
    "meta",
    [
        "x" * DEFAULT_LIMITS.header_bytes,
        list(range(5000)),
        2**70,
        nested(17),
        {1: 2},
        [msgpack.Timestamp(1, 2)],
        object(),
        {"a": {1}},
    ],
)
def test_a_meta_that_would_be_refused_is_not_sent(meta: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        encode(TensorPayload.empty(1, "float32", meta))


@pytest.mark.parametrize("tag", [(1.5,), (True,), (None,), (("a",),), ("x" * 257,), tuple(range(17)), (2**64,)])
def test_a_tag_that_would_be_refused_is_not_sent(tag: Any) -> None:
    with pytest.raises(ValueError, match="header"):
        encode(ValuePayload(), tag)


@pytest.mark.parametrize("value", [list(range(70_000)), [2**70], nested(17), {1: 2}, object(), msgpack.ExtType(1, b"")])
def test_a_value_that_would_be_refused_is_not_sent(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        pack_value(value)


def test_values_have_a_largest_size() -> None:
    data = pack_value([1, {"a": b"x"}, (np.float64(0.5), Colour.RED)])
    assert unpack_value(data) == [1, {"a": b"x"}, [0.5, "red"]]
    with pytest.raises(WireError, match="above the limit"):
        unpack_value(data, Limits(value_bytes=len(data) - 1))
    with pytest.raises(ValueError, match="above the limit"):
        pack_value("x" * 100, Limits(value_bytes=100))


class Colour(enum.StrEnum):
    RED = "red"


def accept_only_wire_errors(frames: list[bytes]) -> None:
    try:
        message = decode(frames)
    except WireError:
        return
    for view in message.payload.frames():
        assert view.nbytes == message.header.nbytes
    encode(message.payload, message.header.tag)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_is_refused(frames: list[bytes]) -> None:
    accept_only_wire_errors(frames)


@settings(max_examples=300)
@given(st.binary(max_size=100))
def test_garbage_behind_a_good_beginning_is_refused(rest: bytes) -> None:
    accept_only_wire_errors([fields()[:7] + rest, bytes(24)])


JUNK = st.recursive(
    SCALARS | st.floats() | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers() | st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from(["magic", "version", *Header._fields]), JUNK, min_size=1, max_size=3), st.sampled_from([0, 24])
)
def test_fields_of_any_type_are_refused(changes: dict[str, object], size: int) -> None:
    try:
        data = fields(**changes)
    except (OverflowError, ValueError):
        return
    accept_only_wire_errors([data, bytes(size)])


@settings(max_examples=300)
@given(st.data())
def test_mutated_messages_are_refused_or_good(data: st.DataObject) -> None:
    payload = data.draw(
        st.sampled_from(
            [
                TensorPayload.of(np.arange(12, dtype="float32").reshape(3, 4), meta={"step": 3, "tags": ["a", 1.5]}),
                ValuePayload({"a": [1, 2, {"b": b"xyz"}]}),
                ValuePayload([["x" * 100] * 50]),
                PhantomPayload(12, "bfloat16", meta=[None, True]),
            ]
        )
    )
    frames = [bytearray(frame) for frame in encode(payload, ("gradient", 7, 2), sequence=300, message=70000)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        where = data.draw(st.integers(0, len(frame)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "swap"])):
            case "flip" if where < len(frame):
                frame[where] ^= data.draw(st.integers(1, 255))
            case "cut":
                del frame[where : where + data.draw(st.integers(1, 8))]
            case "insert":
                frame[where:where] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                frames.append(bytearray(frame))
    accept_only_wire_errors([bytes(frame) for frame in frames])


def test_no_pickle_anywhere_in_wire() -> None:
    for module in Path(zmqtrain.wire.__file__).parent.glob("*.py"):
        text = module.read_text()
        for word in ("import pickle", "cloudpickle", "torch.load", "torch.save", "allow_pickle", "marshal", "eval(", "exec("):
            assert word not in text, f"{module.name} holds {word}"


def test_importing_wire_does_not_import_torch() -> None:
    modules = [path.stem for path in Path(zmqtrain.wire.__file__).parent.glob("*.py") if path.stem != "__init__"]
    code = "".join(f"import zmqtrain.wire.{module}\n" for module in modules) + "import sys\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_value_is_packed_once_for_all_who_get_it() -> None:
    payload = ValuePayload({"a": [1, 2]})
    first = packed_value(payload)
    assert packed_value(payload) is first
    assert unpack_value(first) == payload.meta
    payload.meta = "another"
    assert unpack_value(packed_value(payload)) == "another"
