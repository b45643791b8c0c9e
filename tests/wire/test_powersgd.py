"""PowerSGD on the wire: what it sends, what it keeps, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.test_compress import over_the_wire
from zmqtrain.errors import WireError
from zmqtrain.wire.compress import LARGEST_REDUCTION, Matrix, decompress, make_compressor
from zmqtrain.wire.compress.factors import LARGEST_RANK, MOST_MATRICES, Layout, orthonormal, product
from zmqtrain.wire.dtypes import torch_dtype
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

#: A vector, two matrices, a gap, a matrix too small to shrink.
MATRICES = [Matrix(5, 20, 30), Matrix(605, 8, 40), Matrix(930, 3, 2)]
NUMEL = 940


def one_step(compressor: Any, gradient: torch.Tensor, matrices: list[Matrix] = MATRICES) -> torch.Tensor:
    received = compressor.decode(over_the_wire(compressor.encode("w", TensorPayload.of(gradient, meta=[1]), matrices)))
    assert isinstance(received, TensorPayload)
    assert (received.meta, received.tensor.dtype, received.numel) == ([1], gradient.dtype, gradient.numel())
    return received.tensor


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 99), st.floats(-18, 12))
def test_what_was_sent_and_what_is_kept_is_what_was_given(dtype: str, rank: int, steps: int, seed: int, exponent: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    compressor = make_compressor("powersgd", rank=rank)
    scale = 2**exponent if dtype != "float16" else 1.0
    given_, sent = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for _ in range(steps):
        gradient = (torch.randn(NUMEL, generator=generator) * scale).to(torch_dtype(dtype))
        before = gradient.clone()
        received = one_step(compressor, gradient)
        assert torch.equal(gradient, before)
        given_ += gradient.double()
        sent += received.double()
    state = compressor.state_dict()
    assert {key: kept.numel() for key, kept in state.items()} == compressor.kept("w", NUMEL, MATRICES)
    torch.testing.assert_close(sent + state["w"].double(), given_, rtol=0, atol=3e-6 * scale * steps)
    layout = Layout.of(NUMEL, rank, MATRICES)
    for rest in layout.rest_of(state["w"]):  # what is no matrix was sent as it is
        assert rest.abs().max() == 0


@given(st.integers(1, 8), st.integers(1, 50), st.integers(1, 50), st.integers(0, 9))
def test_a_matrix_of_low_rank_arrives_whole(rank: int, rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, rank, generator=generator).double() @ torch.randn(rank, columns, generator=generator).double()
    received = one_step(make_compressor("powersgd", rank=rank), matrix.reshape(-1), [Matrix(0, rows, columns)])
    torch.testing.assert_close(received.view(rows, columns), matrix, rtol=1e-6, atol=1e-6)


def test_a_warm_start_finds_the_largest_directions() -> None:
    """The same matrix again and again, without what was left out: the product nears the best one of this rank."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(40, 30, generator=generator, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best = (u[:, :4] * s[:4]) @ v[:4]
    compressor = make_compressor("powersgd", rank=4)
    for step in range(100):
        received = one_step(compressor, matrix.reshape(-1), [Matrix(0, 40, 30)])
        state = compressor.state_dict()
        compressor.load_state_dict({**state, "w": torch.zeros_like(state["w"])})
        error = float((received.view(40, 30) - best).norm() / best.norm())
        assert step or error > 0.1
    assert error < 1e-3


def test_after_steps_of_zeros_and_of_low_rank_all_directions_come_back() -> None:
    compressor = make_compressor("powersgd", rank=3)
    matrices, generator = [Matrix(0, 12, 10)], torch.Generator().manual_seed(0)
    whole = torch.randn(12, 3, generator=generator) @ torch.randn(3, 10, generator=generator)
    for gradient in (torch.zeros(120), torch.outer(torch.arange(12.0), torch.ones(10)).reshape(-1), torch.zeros(120)):
        assert torch.allclose(one_step(compressor, gradient, matrices), gradient, atol=1e-4)
    assert torch.allclose(one_step(compressor, whole.reshape(-1), matrices).view(12, 10), whole, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_what_is_not_finite_stays_so_in_its_matrix_alone(dtype: str) -> None:
    compressor = make_compressor("powersgd", rank=2)
    gradient = torch.ones(NUMEL).to(torch_dtype(dtype))
    gradient[[0, 10, 939]] = torch.tensor([math.nan, math.inf, -math.inf]).to(gradient.dtype)
    received = one_step(compressor, gradient)
    lost = received.isfinite().logical_not().nonzero().view(-1).tolist()
    assert lost == [0, *range(5, 605), 939]
    kept = compressor.state_dict()
    assert all(tensor.isfinite().all() for tensor in kept.values())
    assert kept["w"][10] == 0, "the receiver has seen it"
    assert kept["w"][11] == 1, "but not this"
    assert one_step(compressor, torch.zeros(NUMEL).to(gradient.dtype)).isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_tensors_and_phantoms_shrink_alike(dtype: str) -> None:
    matrices = [Matrix(100, 300, 200), Matrix(60_100, 64, 576)]
    tensor, phantom = (
        make_compressor("powersgd", rank=4).encode("w", payload, matrices)
        for payload in (TensorPayload.of(torch.randn(100_000).to(torch_dtype(dtype)), 7), PhantomPayload(100_000, dtype, 7))
    )
    assert (tensor.numel, tensor.dtype, tensor.meta) == (phantom.numel, phantom.dtype, phantom.meta)
    assert tensor.numel == 100_000 - 60_000 - 64 * 576 + 4 * (500 + 640)
    restored = decompress(over_the_wire(phantom))
    assert isinstance(restored, PhantomPayload)
    assert (restored.numel, restored.dtype, restored.meta) == (100_000, dtype, 7)


def test_what_would_not_shrink_is_sent_as_it_is() -> None:
    compressor = make_compressor("powersgd", rank=4)
    for matrices in ([], [Matrix(0, 7, 9)], [Matrix(0, 1, 900)]):
        gradient = torch.randn(900)
        assert torch.equal(one_step(compressor, gradient, matrices), gradient)
    assert compressor.state_dict() == compressor.kept("w", 900, [Matrix(0, 7, 9)]) == {}
    assert torch.equal(one_step(compressor, torch.arange(900), MATRICES[:1]), torch.arange(900))
    many = [Matrix(30 * number, 5, 6) for number in range(MOST_MATRICES + 9)]
    assert len(Layout.of(30 * len(many), 1, many).matrices) == MOST_MATRICES
    assert not Matrix(0, 10**5, 10**5).shrinks(1), "a message stands for a limited number of elements"


def test_over_a_checkpoint_it_goes_on_as_if_nothing_was() -> None:
    steps = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(step)) for step in range(6)]
    straight, first, resumed = (make_compressor("powersgd", rank=3) for _ in range(3))
    for step in steps[:3]:
        straight.encode("w", TensorPayload.of(step), MATRICES)
        first.encode("w", TensorPayload.of(step), MATRICES)
    resumed.load_state_dict(first.state_dict())
    first.encode("w", TensorPayload.of(steps[0]), MATRICES)  # the loaded state is a copy
    for step in steps[3:]:
        expected, got = (each.encode("w", TensorPayload.of(step), MATRICES) for each in (straight, resumed))
        assert b"".join(expected.frames()) == b"".join(got.frames())


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 20), st.floats(-300, 300))
def test_columns_become_orthonormal(rows: int, columns: int, seed: int, exponent: float) -> None:
    columns = min(rows, columns)
    layout = Layout(rows * columns, columns, (Matrix(0, rows, columns),))
    left = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10**exponent
    found = orthonormal(layout, left.reshape(-1)).view(rows, columns)
    torch.testing.assert_close(found.T @ found, torch.eye(columns, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found @ (found.T @ left), left)


def test_dependent_columns_become_zero() -> None:
    left = torch.tensor([[1.0, 2.0, 0.0, 1.0], [1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = orthonormal(Layout(16, 4, (Matrix(0, 4, 4),)), left.reshape(-1)).view(4, 4)
    torch.testing.assert_close(found.norm(dim=0), torch.tensor([1.0, 0.0, 0.0, 1.0]))


def test_products() -> None:
    left, right = torch.randn(5, 3), torch.randn(7, 3)
    into = torch.empty(5, 7)
    product(left, right, into)
    torch.testing.assert_close(into, left @ right.T)


def test_wrong_use_is_told() -> None:
    for rank in (0, -1, LARGEST_RANK + 1):
        with pytest.raises(ValueError, match="rank"):
            make_compressor("powersgd", rank=rank)
    compressor = make_compressor("powersgd", rank=1)
    compressor.encode("w", TensorPayload.of(torch.zeros(50)), [Matrix(0, 5, 10)])
    with pytest.raises(ValueError, match="'w' had 50"):
        compressor.encode("w", TensorPayload.of(torch.zeros(60)), [Matrix(0, 5, 10)])


def hostile(numel: object, matrices: object, sent: int, rank: object = 1, dtype: str = "float32") -> TensorPayload:
    meta: Any = {"codec": "powersgd", "dtype": dtype, "numel": numel, "meta": None, "rank": rank, "matrices": matrices}
    return TensorPayload.received(bytes(4 * sent), "float32", [sent], meta)


def test_hostile_factors_are_refused() -> None:
    received = decompress(hostile(60, [5, 5, 10], 25))
    assert isinstance(received, TensorPayload)
    assert received.tensor.tolist() == [0] * 60
    big = 10**7
    for payload in (
        hostile(60, [5, 5, 10], 24),
        hostile(60, [5, 5, 10], 26),
        hostile(54, [5, 5, 10], 19),
        hostile(60, [-1, 5, 10], 25),
        hostile(60, [5, 0, 10], 70),
        hostile(60, [5, -5, -10], 25),
        hostile(60, [5, 5], 25),
        hostile(60, [], 60),
        hostile(60, [5, 5, 10.0], 25),
        hostile(60, [True, 5, 10], 25),
        hostile(60, None, 25),
        hostile(60, [5, 5, 10], 25, rank=0),
        hostile(60, [5, 5, 10], 25, rank=True),
        hostile(60, [5, 5, 10], 25, rank="1"),
        hostile(60, [5, 5, 10], 70, rank=4),
        hostile(60, [5, 5, 10], 25, rank=LARGEST_RANK + 1),
        hostile(60, [5, 5, 10], 25, dtype="float64"),
        hostile(60, [5, 5, 10], 25, dtype="int32"),
        hostile(110, [5, 5, 10, 50, 5, 10], 40),
        hostile(110, [60, 5, 10, 5, 5, 10], 40),
        hostile(big * big, [0, big, big], 2 * big),
        hostile(LARGEST_REDUCTION * big, [0, LARGEST_REDUCTION, big], LARGEST_REDUCTION + big),
        hostile(3 * MOST_MATRICES * 50 + 50, [n for i in range(MOST_MATRICES + 1) for n in (i * 50, 5, 10)], 15),
    ):
        with pytest.raises(WireError):
            decompress(payload)
