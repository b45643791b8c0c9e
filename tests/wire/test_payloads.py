"""Tensors, phantoms and values as collectives and exchanges use them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import WireError
from zmqtrain.wire.dtypes import DTYPES, torch_dtype
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]
INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind == "int"]
NATIVE = [name for name, dtype in DTYPES.items() if not dtype.raw]


def ones(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.ones(shape).to(torch_dtype(dtype))


def test_all_payloads_are_payloads() -> None:
    for payload in (TensorPayload.empty(3, "float32"), PhantomPayload(3), ValuePayload(1)):
        assert isinstance(payload, Payload)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (0, 5)])
def test_a_tensor_is_aliased_and_keeps_its_shape(dtype: str, shape: tuple[int, ...]) -> None:
    source = ones(shape, dtype)
    payload = TensorPayload.of(source, meta={"step": 1})
    assert (payload.dtype, payload.shape, payload.numel, payload.nbytes) == (dtype, shape, source.numel(), source.nbytes)
    assert payload.tensor.shape == source.shape
    assert payload.tensor.data_ptr() == source.data_ptr()
    assert sum(frame.nbytes for frame in payload.frames()) == source.nbytes
    assert all(frame.format == "B" and not frame.readonly for frame in payload.frames())
    if source.numel():
        assert payload.pointer == source.data_ptr()


@pytest.mark.parametrize("dtype", NATIVE)
def test_an_array_is_aliased_and_keeps_its_shape(dtype: str) -> None:
    source = np.ones((3, 5), dtype)
    payload = TensorPayload.of(source)
    assert payload.numpy().ctypes.data == payload.tensor.data_ptr() == source.ctypes.data
    assert payload.numpy().shape == tuple(payload.tensor.shape) == (3, 5)
    assert payload.dtype == dtype


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.raw])
def test_numpy_has_no_such_type(dtype: str) -> None:
    with pytest.raises(TypeError, match=dtype):
        TensorPayload.empty(3, dtype).numpy()


def test_parameters_lose_their_graph_and_not_their_memory() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    payload = TensorPayload.of(parameter)
    payload.add_(TensorPayload.of(torch.ones(4)))
    assert parameter.tolist() == [1, 1, 1, 1]
    assert not payload.tensor.requires_grad


def test_what_does_not_lie_in_one_run_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        TensorPayload.of(torch.zeros(4, 4).t())
    with pytest.raises(ValueError, match="not contiguous"):
        TensorPayload.of(np.zeros((4, 4)).T)
    with pytest.raises(ValueError, match="conjugate"):
        TensorPayload.of(torch.zeros(4, dtype=torch.complex64).conj())


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_received_memory_is_aliased(dtype: str, writable: bool) -> None:
    source = ones((1024,), dtype)
    raw = bytes(TensorPayload.of(source).frames()[0])
    buffer = bytearray(raw) if writable else raw
    payload = TensorPayload.received(buffer, dtype, [32, 32])
    assert payload.writable == writable
    assert payload.pointer == payload.tensor.data_ptr() == np.frombuffer(buffer, np.uint8).ctypes.data
    assert torch.equal(payload.tensor.view(-1).view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize("shape", [(0,), (), (0, 3), (3, 0), (1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_at_the_edge_are_received(dtype: str, shape: tuple[int, ...]) -> None:
    payload = TensorPayload.received(bytes(math.prod(shape) * DTYPES[dtype].itemsize), dtype, shape)
    assert (payload.tensor.shape, payload.tensor.dtype) == (shape, torch_dtype(dtype))
    assert payload.part(0, 0).tensor.shape == (0,)
    assert TensorPayload.of(payload.tensor).shape == shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64"])
def test_memory_at_odd_addresses_is_straightened(dtype: str) -> None:
    size = 8 * DTYPES[dtype].itemsize
    payload = TensorPayload.received(memoryview(bytes(size + 1))[1:], dtype, [8])
    assert payload.pointer % DTYPES[dtype].itemsize % 8 == 0
    assert payload.tensor.tolist() == [0] * 8


def test_received_memory_outlives_its_owner() -> None:
    tensor = TensorPayload.received(np.arange(100_000, dtype="float32").tobytes(), "float32", [100_000]).tensor
    junk = [bytes(400_000) for _ in range(8)]
    assert tensor.double().sum().item() == sum(range(100_000))
    del junk


@pytest.mark.parametrize("change", ["add_", "copy_", "average_", "scale_"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_read_only_memory_is_never_written(dtype: str, change: str) -> None:
    buffer = bytes(TensorPayload.of(ones((8,), dtype)).frames()[0])
    before = bytes(bytearray(buffer))
    with pytest.raises(ValueError, match="read-only"):
        getattr(TensorPayload.received(buffer, dtype, [8]), change)(2.0 if change == "scale_" else TensorPayload.empty(8, dtype))
    assert buffer == before


@pytest.mark.parametrize(
    ("size", "dtype", "shape"),
    [
        (15, "float32", [4]),
        (16, "float32", [5]),
        (16, "float33", [4]),
        (4, "float32", [-1]),
        (4, "float32", [-1, -1]),
        (0, "int8", [2**60]),
    ],
)
def test_received_sizes_must_fit(size: int, dtype: str, shape: list[int]) -> None:
    with pytest.raises(WireError):
        TensorPayload.received(bytes(size), dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_write_to_the_whole(dtype: str) -> None:
    whole = torch.zeros(10).to(torch_dtype(dtype))
    payload = TensorPayload.of(whole, meta=1)
    part = payload.part(3, 6)
    assert part.meta is None
    part.copy_(TensorPayload.of(ones((3,), dtype)))
    part.part(1, 2).copy_(TensorPayload.of(torch.zeros(1).to(torch_dtype(dtype))))
    assert whole.to(torch.float32 if dtype[0] != "c" else torch.complex64).tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 0, 0]
    assert payload.part(4, 4).numel == 0
    for start, stop in ((-1, 2), (2, 11), (5, 4)):
        with pytest.raises(ValueError, match="a part"):
            payload.part(start, stop)


@pytest.mark.parametrize("other", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_of_any_two_types_add_up(dtype: str, other: str) -> None:
    target = TensorPayload.of(ones((2, 9), dtype))
    target.add_(TensorPayload.of(ones((18,), other)))
    assert target.tensor.float().eq(2).all()
    target.average_(TensorPayload.of(torch.full((18,), 4.0).to(torch_dtype(other))))
    assert target.tensor.float().eq(3).all()
    target.scale_(0.5)
    assert target.tensor.float().eq(1.5).all()
    target.copy_(TensorPayload.of(ones((18,), other)))
    assert target.tensor.float().eq(1).all()


@given(st.lists(st.integers(-(2**61), 2**61), min_size=1, max_size=20), st.integers(-2, 2))
def test_integers_are_exact(values: list[int], factor: int) -> None:
    payload = TensorPayload.of(torch.tensor(values))
    payload.add_(TensorPayload.of(np.ones(len(values), "int64")))
    assert payload.tensor.tolist() == [value + 1 for value in values]
    payload = TensorPayload.of(torch.tensor(values) // 4)
    payload.scale_(factor)
    assert payload.tensor.tolist() == [value // 4 * factor for value in values]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_every_size(dtype: str) -> None:
    payload = TensorPayload.of(ones((5,), dtype))
    payload.add_(TensorPayload.of(ones((5,), dtype)))
    payload.scale_(3)
    assert payload.numpy().tolist() == [6] * 5
    with pytest.raises(TypeError, match=r"by 0\.5"):
        payload.average_(payload)


def test_what_would_lose_something_is_refused() -> None:
    with pytest.raises(TypeError, match="float32 elements cannot be converted to int64"):
        TensorPayload.empty(3, "int64").add_(TensorPayload.empty(3, "float32"))
    with pytest.raises(TypeError, match="complex64"):
        TensorPayload.empty(3, "float32").copy_(TensorPayload.empty(3, "complex64"))
    with pytest.raises(ValueError, match="differ"):
        TensorPayload.empty(3, "float32").add_(TensorPayload.empty(4, "float32"))
    with pytest.raises(TypeError, match="PhantomPayload"):
        TensorPayload.empty(3, "float32").add_(PhantomPayload(3))


def test_overflow_and_nan_pass_in_silence() -> None:
    payload = TensorPayload.of(np.array([3e38, math.inf, 1.0], "float32"))
    payload.add_(TensorPayload.of(np.array([3e38, -math.inf, math.nan], "float32")))
    payload.scale_(1e300)
    assert payload.tensor.isfinite().tolist() == [False, False, False]


@given(st.lists(st.floats(width=32), min_size=1, max_size=9), st.randoms())
def test_an_average_is_the_same_bits_on_both_sides(values: list[float], random) -> None:  # type: ignore[no-untyped-def]
    a, b = np.array(values, "float32"), np.array(random.sample(values, len(values)), "float32")
    left, right = TensorPayload.of(a.copy()), TensorPayload.of(b.copy())
    left.average_(TensorPayload.of(b))
    right.average_(TensorPayload.of(a))
    np.testing.assert_array_equal(left.numpy(), right.numpy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_like_has_memory_of_its_own(dtype: str) -> None:
    payload = TensorPayload.of(ones((2, 3), dtype), meta=1)
    twin = payload.empty_like()
    assert (twin.dtype, twin.shape, twin.nbytes, twin.meta) == (dtype, (2, 3), payload.nbytes, None)
    assert twin.pointer != payload.pointer


def test_phantoms_check_sizes_and_do_nothing() -> None:
    phantom = PhantomPayload(10, "bfloat16", meta=1)
    assert (phantom.nbytes, phantom.frames(), phantom.shape) == (20, (), (10,))
    assert (phantom.part(2, 5).numel, phantom.empty_like().numel) == (3, 10)
    phantom.add_(PhantomPayload(10))
    phantom.copy_(PhantomPayload(10))
    phantom.average_(PhantomPayload(10))
    phantom.scale_(0.5)
    for wrong in (phantom.add_, phantom.copy_, phantom.average_):
        with pytest.raises(ValueError, match="differ"):
            wrong(PhantomPayload(9))
    with pytest.raises(ValueError, match="a part"):
        phantom.part(5, 11)
    with pytest.raises(ValueError, match="float33"):
        PhantomPayload(1, "float33")


def test_values_have_no_elements() -> None:
    value = ValuePayload({"a": 1})
    assert (value.numel, value.nbytes, value.dtype, value.frames()) == (0, 0, "", ())
    value.add_(ValuePayload())
    value.scale_(2.0)
    assert value.part(0, 0).meta is None
    with pytest.raises(ValueError, match="no elements"):
        value.copy_(PhantomPayload(1))
    with pytest.raises(ValueError, match="a part"):
        value.part(0, 1)


@pytest.mark.gpu
def test_device_memory_computes_and_is_not_sent() -> None:
    payload = TensorPayload.of(torch.ones(6, device="cuda"))
    payload.part(0, 3).add_(TensorPayload.of(torch.ones(3, device="cuda")))
    payload.scale_(2.0)
    host = TensorPayload.empty(6, "float32")
    host.copy_(payload)
    assert host.numpy().tolist() == [4, 4, 4, 2, 2, 2]
    assert payload.empty_like().tensor.device == payload.tensor.device
    with pytest.raises(ValueError, match="cuda"):
        payload.frames()
