"""What compression loses is bounded or sent later, and hostile messages are refused. PowerSGD: test_powersgd.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.errors import WireError
from zmqtrain.wire.compress import BLOCK, CODECS, LARGEST_REDUCTION, SIGN_BLOCK, Matrix, decompress, make_compressor
from zmqtrain.wire.compress.sign import _bits, _from_bits, _places
from zmqtrain.wire.dtypes import DTYPES, torch_dtype
from zmqtrain.wire.message import decode, encode
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

COMPRESSED = [name for name in CODECS if name != "none"]


def over_the_wire(payload: Payload) -> Payload:
    return decode([bytes(frame) for frame in encode(payload)]).payload


def travel(name: str, source: torch.Tensor, ratio: float = 0.1) -> torch.Tensor:
    compressor = make_compressor(name, ratio)
    received = compressor.decode(over_the_wire(compressor.encode("w", TensorPayload.of(source, meta={"step": 1}))))
    assert isinstance(received, TensorPayload)
    assert (received.meta, received.tensor.dtype, received.shape) == ({"step": 1}, source.dtype, (source.numel(),))
    return received.tensor


@given(
    st.sampled_from(["fp16", "bf16", "int8"]),
    st.sampled_from(["float32", "float64", "bfloat16", "float16"]),
    st.integers(0, 3 * BLOCK),
    st.floats(-20, 20),
    st.integers(0, 99),
)
def test_errors_are_bounded(name: str, dtype: str, numel: int, exponent: float, seed: int) -> None:
    source = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 2**exponent
    source = (source.clamp(-65504, 65504) if dtype == "float16" else source).to(torch_dtype(dtype))
    error = (travel(name, source).double() - source.double()).abs()
    size = source.double().abs()
    match name:
        case "fp16":
            bound = torch.where(size > 65504, size - 65504, size * 2**-11 + 2**-25)
        case "bf16":
            bound = size * 2**-8
        case _:  # half a step of the block's scale, and the rounding of the type itself
            blocks = torch.nn.functional.pad(size, (0, -numel % BLOCK)).view(-1, BLOCK)
            steps = blocks.amax(1, keepdim=True).expand_as(blocks).reshape(-1)[:numel] / 127 if numel else size
            bound = steps * 0.5001 + (
                0 if dtype in ("float32", "float64") else size * 2**-8 + (2**-25 if dtype == "float16" else 0)
            )
    assert bool((error <= bound + 1e-40).all())


@pytest.mark.parametrize(
    ("name", "share"),
    [("fp16", 0.5), ("bf16", 0.5), ("int8", 0.251), ("sign", 0.0323), ("topk", 0.0201), ("none", 1)],
)
def test_sizes_shrink_for_tensors_and_phantoms_alike(name: str, share: float) -> None:
    numel = 100_000
    tensor = make_compressor(name, 0.01).encode("w", TensorPayload.empty(numel, "float32", 7))
    phantom = make_compressor(name, 0.01).encode("w", PhantomPayload(numel, "float32", 7))
    assert tensor.nbytes == phantom.nbytes <= share * numel * 4
    assert (tensor.numel, tensor.dtype, tensor.meta) == (phantom.numel, phantom.dtype, phantom.meta)
    restored = make_compressor(name).decode(over_the_wire(phantom))
    assert isinstance(restored, PhantomPayload)
    assert (restored.numel, restored.dtype, restored.meta) == (numel, "float32", 7)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_stays_so(name: str, dtype: str) -> None:
    source = torch.ones(2 * BLOCK + 5).to(torch_dtype(dtype))
    bad = [0, 7, BLOCK + 1, 2 * BLOCK + 4]
    source[bad] = torch.tensor([math.nan, math.inf, -math.inf, math.nan]).to(source.dtype)
    received = travel(name, source)
    lost = received.isfinite().logical_not().nonzero().view(-1).tolist()
    assert lost == (list(range(len(source))) if name == "sign" else bad)  # sign has no room for it but in a block's scale
    if name == "sign":
        return
    assert (received[1:7] - 1).abs().max() < 1e-6 or name == "topk"


def test_more_that_is_not_finite_than_top_k_sends_follows_later() -> None:
    compressor = make_compressor("topk", 0.1)
    source = torch.full((100,), math.nan)
    seen = torch.zeros(100)
    for _ in range(10):
        received = compressor.decode(compressor.encode("w", TensorPayload.of(source)))
        assert isinstance(received, TensorPayload)
        assert int(received.tensor.isnan().sum()) == 10
        seen += received.tensor.isnan()
        source = torch.zeros(100)
    assert seen.tolist() == [1] * 100
    received = compressor.decode(compressor.encode("w", TensorPayload.of(torch.ones(100))))
    assert isinstance(received, TensorPayload)
    assert received.tensor.isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ["fp16", "bf16", "int8", "sign"])
def test_the_ends_of_the_range_saturate_and_nothing_tiny_explodes(name: str, dtype: str) -> None:
    info = torch.finfo(torch_dtype(dtype))
    source = torch.zeros(4 * BLOCK, dtype=torch_dtype(dtype))
    source[0], source[1], source[BLOCK], source[2 * BLOCK] = info.max, info.min, info.tiny, info.tiny / 64
    received = travel(name, source)
    assert received.isfinite().all()
    assert received[0] > 30_000
    assert received[1] < -30_000
    assert (received[BLOCK:].abs() <= 2 * info.tiny).all()


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.kind != "float"])
@pytest.mark.parametrize("name", CODECS)
def test_what_cannot_shrink_passes_exactly(name: str, dtype: str) -> None:
    source = torch.arange(50).to(torch_dtype(dtype))
    assert torch.equal(travel(name, source), source)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["topk", "sign"])
@settings(max_examples=20)
@given(st.integers(1, 3000), st.floats(0.001, 1), st.integers(1, 12), st.integers(0, 99))
def test_what_was_sent_and_what_is_kept_is_what_was_given(
    name: str, dtype: str, numel: int, ratio: float, steps: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    compressor = make_compressor(name, ratio)
    given_, sent = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for _ in range(steps):
        gradient = torch.randn(numel, generator=generator).to(torch_dtype(dtype))
        before = gradient.clone()
        received = compressor.decode(over_the_wire(compressor.encode("w", TensorPayload.of(gradient))))
        assert isinstance(received, TensorPayload)
        assert torch.equal(gradient, before)
        if name == "topk":
            assert int(received.tensor.ne(0).sum()) <= math.ceil(numel * ratio)
        given_ += gradient.double()
        sent += received.tensor.double()
    state = compressor.state_dict()
    assert {key: kept.numel() for key, kept in state.items()} == compressor.kept("w", numel) == {"w": numel}
    torch.testing.assert_close(sent + state["w"].double(), given_, rtol=0, atol=1e-5)


def test_signs_are_those_of_the_elements_times_the_mean_magnitude_of_the_block() -> None:
    source = torch.cat((torch.tensor([3.0, -1.0]).repeat(SIGN_BLOCK // 2), torch.tensor([-5.0, 0.0, 1.0])))
    received = travel("sign", source)
    assert received[:SIGN_BLOCK].tolist() == [2.0, -2.0] * (SIGN_BLOCK // 2)
    assert received[SIGN_BLOCK:].tolist() == [-2.0, 2.0, 2.0]
    assert travel("sign", torch.zeros(3000)).abs().sum() == 0


def test_signs_on_other_devices_travel_in_the_same_bits() -> None:
    flags = torch.rand(77, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = _bits(flags)
    elsewhere = torch.nn.functional.pad(flags, (0, 3)).view(-1, 8).int() << _places(flags)  # as `_bits` does on a GPU
    assert torch.equal(elsewhere.sum(1).to(torch.uint8), packed)
    assert torch.equal(_from_bits(packed, 77), flags.to(torch.uint8))
    assert torch.equal(((packed.int().unsqueeze(1) >> _places(packed)) & 1).view(-1)[:77], flags.int())


@pytest.mark.parametrize("name", ["topk", "sign"])
def test_what_is_not_finite_is_not_kept(name: str) -> None:
    compressor = make_compressor(name, 0.5)
    source = torch.ones(2 * SIGN_BLOCK)
    source[3], source[5] = math.nan, math.inf
    compressor.encode("w", TensorPayload.of(source))
    kept = compressor.state_dict()["w"]
    assert kept.isfinite().all()
    assert kept[[3, 5]].tolist() == [0, 0]
    if name == "sign":  # the rest of the block arrives as NaN: none of it was sent
        assert kept[:3].tolist() == [1, 1, 1]
        assert kept[SIGN_BLOCK:].abs().sum() == 0


def test_top_k_sends_the_largest_and_breaks_ties_in_order() -> None:
    source = torch.tensor([1.0, -5, 3, 3, -3, 3, 0, 0, 0, 0])
    assert travel("topk", source, 0.3).tolist() == [0, -5, 3, 3, 0, 0, 0, 0, 0, 0]
    assert travel("topk", torch.zeros(10), 0.3).tolist() == [0] * 10


@pytest.mark.parametrize("name", ["topk", "sign"])
def test_over_a_checkpoint_it_goes_on_as_if_nothing_was(name: str) -> None:
    steps = [torch.randn(500, generator=torch.Generator().manual_seed(step)) for step in range(6)]
    straight, first, resumed = (make_compressor(name, 0.05) for _ in range(3))
    for step in steps[:3]:
        straight.encode("w", TensorPayload.of(step))
        first.encode("w", TensorPayload.of(step))
    resumed.load_state_dict(first.state_dict())
    first.encode("w", TensorPayload.of(steps[0]))  # the loaded state is a copy
    for step in steps[3:]:
        expected, got = (each.encode("w", TensorPayload.of(step)) for each in (straight, resumed))
        assert b"".join(expected.frames()) == b"".join(got.frames())


def test_wrong_use_is_told() -> None:
    with pytest.raises(ValueError, match=r"zip.*fp16"):
        make_compressor("zip")
    for ratio in (0.0, 1.5, 1e-9, math.nan):
        with pytest.raises(ValueError, match="share"):
            make_compressor("topk", ratio)
    compressor = make_compressor("topk")
    compressor.encode("w", TensorPayload.of(torch.zeros(5)))
    with pytest.raises(ValueError, match="'w' had 5"):
        compressor.encode("w", TensorPayload.of(torch.zeros(6)))
    for name in COMPRESSED:
        with pytest.raises(TypeError, match="no elements"):
            make_compressor(name).encode("w", ValuePayload(1))


@pytest.mark.parametrize("name", COMPRESSED)
def test_another_codec_is_refused(name: str) -> None:
    payload = make_compressor("bf16" if name == "fp16" else "fp16").encode("w", TensorPayload.empty(5, "float32"))
    with pytest.raises(WireError, match="was expected"):
        make_compressor(name).decode(payload)
    with pytest.raises(WireError, match="not compressed"):
        make_compressor(name).decode(TensorPayload.empty(5, "float32"))


def topk(indices: list[int], numel: object, count: object = None, dtype: str = "float32") -> TensorPayload:
    raw = np.array(indices, "int32").tobytes() + np.ones(len(indices), "float32").tobytes()
    meta: Any = {"codec": "topk", "dtype": dtype, "numel": numel, "meta": None, "count": len(indices) if count is None else count}
    return TensorPayload.received(raw, "uint8", [len(raw)], meta)


def test_hostile_top_k_is_refused() -> None:
    received = decompress(topk([0, 2, 9], 10))
    assert isinstance(received, TensorPayload)
    assert received.tensor.tolist() == [1, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    for payload in (
        topk([0, 2, 10], 10),
        topk([-1, 2, 3], 10),
        topk([0, 3, 2], 10),
        topk([0, 2, 2], 10),
        topk([0, 1, 2], 2),
        topk([0, 1, 2], 10, count=2),
        topk([0, 1, 2], 10, count="3"),
        topk([0, 1, 2], 10, count=True),
        topk([0, 1, 2], 10, count=-3),
        topk([0, 1, 2], 10, dtype="float64"),
        topk([0, 1, 2], 10, dtype="int32"),
        topk([0, 1, 2], -1),
        topk([0, 1, 2], None),
        topk([0, 1, 2], 3 * LARGEST_REDUCTION + 1),
        topk([0, 1, 2], 2**60),
        topk([], 0),
    ):
        with pytest.raises(WireError):
            decompress(payload)


def sign(numel: object, nbytes: int, dtype: str = "float32") -> TensorPayload:
    meta: Any = {"codec": "sign", "dtype": dtype, "numel": numel, "meta": None}
    return TensorPayload.received(bytes(nbytes), "uint8", [nbytes], meta)


def test_hostile_signs_are_refused() -> None:
    received = decompress(sign(9, 6))
    assert isinstance(received, TensorPayload)
    assert received.tensor.tolist() == [0] * 9
    for payload in (sign(9, 5), sign(9, 7), sign(17, 6), sign(0, 1), sign(2**60, 6), sign("9", 6), sign(9, 6, "int32")):
        with pytest.raises(WireError):
            decompress(payload)


JUNK = (
    st.none()
    | st.integers(-5, 2**62)
    | st.sampled_from([*CODECS, *DTYPES, "raw", "", 1.5, True, b"x", [], {}, [2, 6, 7], [0, 5, 9]])
)


@settings(max_examples=300)
@given(
    st.sampled_from(COMPRESSED),
    st.dictionaries(st.sampled_from(["codec", "dtype", "numel", "count", "meta", "rank", "matrices"]), JUNK, max_size=3),
    st.sampled_from(["", "codec", "dtype", "numel", "count", "rank", "matrices"]),
    st.binary(max_size=40) | st.none(),
    st.sampled_from(["uint8", "float16", "bfloat16", "float32"]),
)
def test_garbage_is_refused(name: str, changes: dict[str, Any], missing: str, body: bytes | None, dtype: str) -> None:
    payload = make_compressor(name, 0.5, 1).encode("w", TensorPayload.of(torch.randn(45)), [Matrix(2, 6, 7)])
    assert isinstance(payload, TensorPayload)
    assert isinstance(payload.meta, dict)
    meta = {key: value for key, value in {**payload.meta, **changes}.items() if key != missing}
    if body is None:
        body, dtype = bytes(payload.frames()[0]), payload.dtype
    body = body[: len(body) // 4 * 4]
    hostile = TensorPayload.received(body, dtype, [len(body) // DTYPES[dtype].itemsize], meta)
    for codec in (None, name):
        try:
            received = decompress(hostile, codec)
        except WireError:
            continue
        assert isinstance(received, TensorPayload)
        assert received.numel == meta["numel"]
        assert received.dtype == meta["dtype"]
