"""Gradients that all-reduce compresses: against the papers' algorithms in one process, and nothing is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collectives.world import endpoints, group_of
from tests.exchange.compression import Powers
from tests.exchange.counted import CountedEndpoint
from tests.exchange.world import NumpyReplica
from zmqtrain.collectives.group import bounds
from zmqtrain.errors import CheckpointError, UsageError
from zmqtrain.exchange.compressed_sums import CompressedSums, refuse_unsent
from zmqtrain.exchange.matrices import matrices_in, matrices_of
from zmqtrain.wire.compress.factors import Layout
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time

#: A vector, two matrices (one of four dimensions), a matrix too small to shrink.
SHAPES = ((10,), (12, 9), (8, 3, 2, 2), (2, 2))
SIZE = 10 + 108 + 96 + 4


class Matrices(NumpyReplica):
    """One bucket of these shapes."""

    def __init__(self, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> None:
        super().__init__((SIZE,), 0)
        self.gradient = torch.zeros(SIZE, dtype=dtype)
        payload = TensorPayload.of(self.gradient)
        self._buckets = [replace(self._buckets[0], parameters=payload, gradients=payload, shapes=shapes)]


async def exchanged(
    compression: str, steps: list[list[torch.Tensor]], *, scale: float = 1.0, kept: Any = None, first: int = 0, **settings: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    """The sums of each step's gradients, which must be alike on all ranks, and what each rank keeps in the end."""
    found = []
    async with endpoints(len(steps[0])) as nodes:
        ranks = [CompressedSums(group, scale, compression, **settings) for group in group_of(nodes, "workers")]
        replicas = [Matrices(gradient.dtype) for gradient in steps[0]]
        for sums, replica, state in zip(ranks, replicas, kept or [{}] * len(ranks), strict=True):
            sums.load_state_dict(state)
            await sums.start(replica)
        for step, gradients in enumerate(steps, start=first):
            for replica, gradient in zip(replicas, gradients, strict=True):
                replica.gradient.copy_(gradient)
            every = zip(ranks, replicas, strict=True)
            await asyncio.gather(*(sums.sum(replica.buckets[0], ("gradients", step, 0)) for sums, replica in every))
            for replica in replicas[1:]:
                assert torch.equal(replica.gradient.view(torch.uint8), replicas[0].gradient.view(torch.uint8)), "ranks differ"
            found.append(replicas[0].gradient.clone())
        states = [sums.state_dict() for sums in ranks]
        for sums in ranks:
            await sums.stop()
    return found, states


def drawn(ranks: int, steps: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(SIZE, generator=generator).to(dtype) for _ in range(ranks)] for _ in range(steps)]


def of_state(state: Any, name: str) -> torch.Tensor:
    dtype, content = state[name]
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype))


async def test_powersgd_equals_the_papers_algorithm() -> None:
    steps, rank = drawn(3, 6), 3
    found, _ = await exchanged("powersgd", steps, rank=rank, scale=0.5)
    matrices = matrices_in(SHAPES, 0, SIZE)
    layout = Layout.of(SIZE, rank, matrices)
    start = layout.first_rights("0", torch.zeros(1, dtype=torch.float64))
    powers = [Powers(right.clone()) for right in layout.rights(start)]
    lost = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(3)]
    for gradients, got in zip(steps, found, strict=True):
        whole = [gradient + rest for gradient, rest in zip(gradients, lost, strict=True)]
        want, lost = torch.stack(whole).mean(0), [torch.zeros_like(each) for each in whole]
        for matrix, power in zip(layout.matrices, powers, strict=True):
            mean, own = power.of([matrix.of(each) for each in whole])
            matrix.of(want).copy_(mean)
            for rest, each, sent in zip(lost, whole, own, strict=True):
                matrix.of(rest).copy_(matrix.of(each) - sent)
        torch.testing.assert_close(got, want * 3 * 0.5, rtol=1e-9, atol=1e-9)


CODECS: list[tuple[str, dict[str, Any]]] = [
    ("fp16", {}),
    ("bf16", {}),
    ("int8", {}),
    ("sign", {}),
    ("topk", {"ratio": 0.1}),
    ("powersgd", {"rank": 2}),
]


@pytest.mark.parametrize(("compression", "more"), CODECS, ids=[name for name, _ in CODECS])
@settings(max_examples=8)
@given(ranks=st.integers(2, 4), count=st.integers(1, 5), seed=st.integers(0, 99), single=st.booleans())
def test_what_was_sent_and_what_is_kept_is_what_was_given(
    compression: str, more: dict[str, Any], ranks: int, count: int, seed: int, single: bool
) -> None:
    steps = drawn(ranks, count, seed, torch.float32 if single else torch.float64)
    found, states = asyncio.run(exchanged(compression, steps, **more))
    given_ = sum(gradient.double() for step in steps for gradient in step)
    total = sum(each.double() for each in found)
    for state in states:
        for name in state:
            if compression == "powersgd":
                if name.startswith("lost/"):
                    total = total + of_state(state, name).double()
                continue
            kind, _, *part = name.split("/")
            start, stop = bounds(SIZE, ranks)[int(part[0]) if kind == "sent" else states.index(state)]
            times = 1 if kind == "sent" else ranks  # the owner's error is one of the mean
            total[start:stop] += times * of_state(state, name).double()
    torch.testing.assert_close(total, given_, rtol=0, atol=1e-4 if single else 1e-9)


@pytest.mark.parametrize(("compression", "more"), CODECS, ids=[name for name, _ in CODECS])
async def test_over_a_checkpoint_it_goes_on_as_if_nothing_was(compression: str, more: dict[str, Any]) -> None:
    steps = drawn(2, 5, dtype=torch.bfloat16)
    straight, _ = await exchanged(compression, steps, **more)
    half, states = await exchanged(compression, steps[:3], **more)
    rest, _ = await exchanged(compression, steps[3:], kept=states, first=3, **more)
    for one, other in zip(straight, half + rest, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize(("compression", "more"), CODECS, ids=[name for name, _ in CODECS])
async def test_what_is_not_finite_reaches_all_and_is_not_kept(compression: str, more: dict[str, Any]) -> None:
    steps = drawn(2, 3)
    steps[1][0][[2, 15]] = torch.tensor([torch.nan, torch.inf], dtype=torch.float64)
    found, _ = await exchanged(compression, steps, **more)
    assert not found[1].isfinite().all()
    assert found[0].isfinite().all()
    assert found[2].isfinite().all()


@pytest.mark.parametrize("ratio", [0.05, 0.3])
async def test_top_k_leaves_nothing_out_of_the_mean(ratio: float) -> None:
    """What some rank has sent reaches all: the mean has room for it, or travels as it is."""
    _, states = await exchanged("topk", drawn(3, 3), ratio=ratio)
    for state in states:
        assert of_state(state, "mean/0").abs().max() < 1e-12
        assert of_state(state, "sent/0/0").abs().max() > 0


async def test_one_worker_alone_has_its_gradient() -> None:
    steps = drawn(1, 2)
    for compression, more in CODECS:
        found, _ = await exchanged(compression, steps, **more)
        for one, (other,) in zip(found, steps, strict=True):
            assert torch.equal(one, other)


async def test_integers_and_complex_numbers_are_summed_as_they_are() -> None:
    steps = [[(torch.arange(SIZE) + rank * 1j * torch.ones(SIZE)).to(torch.complex128) for rank in range(2)]]
    for compression, more in CODECS:
        found, _ = await exchanged(compression, steps, **more)
        torch.testing.assert_close(found[0], steps[0][0] + steps[0][1])


async def test_what_was_kept_of_something_else_is_refused() -> None:
    _, states = await exchanged("powersgd", drawn(2, 1), rank=2)
    with pytest.raises(CheckpointError, match="another division"):
        await exchanged("powersgd", drawn(2, 1), rank=3, kept=states)
    with pytest.raises(CheckpointError, match="belongs to nothing"):
        await exchanged("sign", drawn(2, 1), kept=states)
    with pytest.raises(CheckpointError, match="compression with which it was written"):
        refuse_unsent(states[0])
    refuse_unsent({})


def test_shapes_that_nobody_knows_are_refused() -> None:
    replica = NumpyReplica((6,), 0)
    with pytest.raises(UsageError, match="a profile has only the sizes"):
        matrices_of(replica.buckets[0])


@pytest.mark.parametrize(("compression", "more"), CODECS, ids=[name for name, _ in CODECS])
async def test_phantoms_take_the_same_bytes(compression: str, more: dict[str, Any]) -> None:
    sent = []
    for phantom in (False, True):
        async with endpoints(2) as nodes:
            nodes = [CountedEndpoint(node) for node in nodes]
            ranks = [CompressedSums(group, 1.0, compression, **more) for group in group_of(nodes, "workers")]
            replicas = [Matrices(torch.float32) for _ in ranks]
            for sums, replica in zip(ranks, replicas, strict=True):
                if phantom:
                    payload = PhantomPayload(SIZE)
                    replica._buckets = [replace(replica.buckets[0], parameters=payload, gradients=payload)]
                await sums.start(replica)
            every = zip(ranks, replicas, strict=True)
            await asyncio.gather(*(sums.sum(replica.buckets[0], ("gradients", 0, 0)) for sums, replica in every))
            sent.append([node.sizes for node in nodes])
    assert sent[0] == sent[1]
    plain = SIZE * 4
    assert sum(sum(sizes) for sizes in sent[0][0].values()) < 0.8 * plain


@given(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=5), st.integers(0, 200), st.integers(0, 200))
def test_matrices_are_whole_rows_of_parameters(shapes: list[list[int]], start: int, stop: int) -> None:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    stop = min(stop, sum(sizes))
    start = min(start, stop)
    ends = 0
    row_of = torch.full((sum(sizes),), -1)  # element -> the number of its row, counted over all matrices
    rows = 0
    for shape, size in zip(shapes, sizes, strict=True):
        if len(shape) > 1:
            row_of[ends : ends + size] = torch.arange(shape[0]).repeat_interleave(size // shape[0]) + rows
            rows += shape[0]
        ends += size
    inside = row_of[start:stop]
    found = {int(row) for matrix in matrices_in(shapes, start, stop) for row in matrix.of(inside)[:, 0]}
    for matrix in matrices_in(shapes, start, stop):
        part = matrix.of(inside)
        assert torch.equal(part, part[:, :1].expand_as(part)), "a row of the matrix is one of the parameter's"
        assert torch.equal(part[:, 0], part[0, 0] + torch.arange(len(part)))
    whole = {row for row in range(rows) if int((row_of == row).sum()) == int((inside == row).sum())}
    assert found == whole
