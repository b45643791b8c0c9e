"""Every collective against numpy over the in-memory network, for drawn sizes, types and subsets of ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.collectives.world import endpoints, everywhere, group_of
from zmqtrain.collectives.group import Group, bounds
from zmqtrain.collectives.operations import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from zmqtrain.net.settings import NetSettings
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time

sizes = st.sampled_from([1, 2, 3, 4, 5, 7, 8])
lengths = st.one_of(st.integers(0, 20), st.integers(1000, 3000))
dtypes = st.sampled_from(["float32", "float64", "int32", "int64"])
#: Pieces of a few elements, so that short payloads are cut and pipelined, too.
CHUNK = 256
HEADER_BYTES = 100
#: A window of a few pieces: senders wait for credit all the time.
NARROW = NetSettings(window_bytes=2048, control_window_bytes=2048, outbox_bytes=2048, inflight_bytes=2048)


def drawn(dtype: str, numel: int, ranks: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """Contents for each rank. Floats are of very different sizes, so that another order of additions gives other bits."""
    random = np.random.default_rng(seed)
    if dtype.startswith("int"):
        return [random.integers(-1000, 1000, numel).astype(dtype) for _ in range(ranks)]
    return [(random.standard_normal(numel) * 10.0 ** random.integers(-6, 6, numel)).astype(dtype) for _ in range(ranks)]


def close(result: np.ndarray[Any, Any], parts: list[np.ndarray[Any, Any]]) -> bool:
    """Whether the result is the sum, exactly for integers and up to the order of additions for floats."""
    expected = np.sum(np.stack(parts), axis=0, dtype=result.dtype)
    if result.dtype.kind == "i":
        return bool(np.array_equal(result, expected))
    scale = np.sum(np.abs(np.stack(parts)), axis=0)
    return bool(np.all(np.abs(result - expected) <= len(parts) * np.finfo(result.dtype).eps * scale))


@pytest.mark.parametrize("algorithm", [None, "ring", "halving", "doubling"])
@settings(max_examples=30)
@given(size=sizes, numel=lengths, dtype=dtypes, seed=st.integers(0, 99))
async def test_all_reduce(algorithm: Any, size: int, numel: int, dtype: str, seed: int) -> None:
    inputs = drawn(dtype, numel, size, seed)
    results = []
    for attempt in range(2):
        outputs = [array.copy() for array in inputs]
        async with endpoints(size, NARROW) as nodes:
            groups = group_of(nodes, chunk_bytes=CHUNK)

            async def call(group: Group, outputs: Any = outputs, turns: int = attempt) -> None:
                for _ in range(turns * ((seed + group.rank) % 4)):  # the second time they come one after the other
                    await asyncio.sleep(0)
                await all_reduce(group, TensorPayload.of(outputs[group.rank]), ("sum", 0), algorithm=algorithm)

            await everywhere(groups, call)
        results.append(outputs)
    assert close(results[0][0], inputs)
    for output in [*results[0], *results[1]]:
        assert output.tobytes() == results[0][0].tobytes(), "ranks or runs differ in bits"


@pytest.mark.parametrize("algorithm", [None, "ring", "halving"])
@settings(max_examples=30)
@given(size=sizes, numel=lengths, dtype=dtypes)
async def test_reduce_scatter(algorithm: Any, size: int, numel: int, dtype: str) -> None:
    inputs = drawn(dtype, numel, size)
    outputs = [array.copy() for array in inputs]
    async with endpoints(size, NARROW) as nodes:
        await everywhere(
            group_of(nodes, chunk_bytes=CHUNK),
            lambda group: reduce_scatter(group, TensorPayload.of(outputs[group.rank]), ("scatter",), algorithm=algorithm),
        )
    for rank, (start, stop) in enumerate(bounds(numel, size)):
        assert close(outputs[rank][start:stop], [array[start:stop] for array in inputs])


@pytest.mark.parametrize("algorithm", [None, "ring", "bruck"])
@settings(max_examples=30)
@given(size=sizes, numel=lengths, dtype=dtypes)
async def test_all_gather(algorithm: Any, size: int, numel: int, dtype: str) -> None:
    whole = drawn(dtype, numel, 1)[0]
    outputs = [np.zeros_like(whole) for _ in range(size)]
    for output, (start, stop) in zip(outputs, bounds(numel, size), strict=True):
        output[start:stop] = whole[start:stop]
    async with endpoints(size, NARROW) as nodes:
        await everywhere(
            group_of(nodes, chunk_bytes=CHUNK),
            lambda group: all_gather(group, TensorPayload.of(outputs[group.rank]), ("gather",), algorithm=algorithm),
        )
    assert all(output.tobytes() == whole.tobytes() for output in outputs)


@given(size=sizes, numel=lengths, data=st.data())
async def test_broadcast(size: int, numel: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    outputs = drawn("float32", numel, size)
    sent = outputs[root].copy()
    async with endpoints(size, NARROW) as nodes:
        await everywhere(
            group_of(nodes, chunk_bytes=CHUNK),
            lambda group: broadcast(group, TensorPayload.of(outputs[group.rank]), ("spread",), root=root),
        )
    assert all(output.tobytes() == sent.tobytes() for output in outputs)


@given(size=sizes, last=st.integers(0, 7))
async def test_nobody_passes_a_barrier_before_the_last_has_come(size: int, last: int) -> None:
    last %= size
    come: set[int] = set()

    async def call(group: Group) -> None:
        for count in range(3):  # the same tag again and again
            if group.rank == last:
                for _ in range(20):
                    await asyncio.sleep(0)
            come.add(group.rank + size * count)
            await barrier(group, ("all here",))
            assert set(range(size * count, size * (count + 1))) <= come

    async with endpoints(size) as nodes:
        await everywhere(group_of(nodes), call)


@given(members=st.permutations(range(5)).flatmap(lambda order: st.integers(1, 5).map(lambda count: order[:count])))
async def test_any_subset_of_ranks_in_any_order(members: list[int]) -> None:
    inputs = drawn("int64", 500, 5)
    outputs = [array.copy() for array in inputs]
    async with endpoints(5) as nodes:
        groups = group_of([nodes[member] for member in members], chunk_bytes=CHUNK)
        await everywhere(groups, lambda group: all_reduce(group, TensorPayload.of(outputs[members[group.rank]]), ("sum",)))
    total = sum(inputs[member] for member in members)
    for rank in range(5):
        assert np.array_equal(outputs[rank], total if rank in members else inputs[rank])


async def test_many_collectives_at_once_in_overlapping_groups() -> None:
    rows, columns, each = 2, 2, 6
    inputs = drawn("int64", 3000, rows * columns * each)
    outputs = [array.copy() for array in inputs]

    def buffers(row: int, column: int) -> list[Any]:
        first = (row * columns + column) * each
        return outputs[first : first + each]

    async with endpoints(rows * columns, NARROW) as nodes:
        grid = [[nodes[row * columns + column] for column in range(columns)] for row in range(rows)]
        across = [group_of(grid[row], f"row/{row}", chunk_bytes=CHUNK) for row in range(rows)]
        down = [group_of([grid[row][column] for row in range(rows)], f"column/{column}", chunk_bytes=CHUNK) for column in (0, 1)]
        async with asyncio.TaskGroup() as tasks:
            for row in range(rows):
                for column in range(columns):
                    for index, array in enumerate(buffers(row, column)):
                        group = across[row][column] if index < each // 2 else down[column][row]
                        # Each worker starts them in another order; the tags tell them apart.
                        tasks.create_task(_later((index * 7 + row * 3 + column) % 5, group, array, index))

    def total(row: int, column: int, index: int) -> Any:
        members = [(row, other) for other in range(columns)] if index < each // 2 else [(other, column) for other in range(rows)]
        return sum(inputs[(r * columns + c) * each + index] for r, c in members)

    for row in range(rows):
        for column in range(columns):
            for index, array in enumerate(buffers(row, column)):
                assert np.array_equal(array, total(row, column, index))


async def _later(turns: int, group: Group, array: Any, index: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    await all_reduce(group, TensorPayload.of(array), ("bucket", index), priority=index)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
async def test_phantoms_move_as_many_bytes_as_the_theory_says(size: int) -> None:
    numel, chunk = 1000 * size, 1000 * 4 // 2
    async with endpoints(size) as nodes:
        groups = group_of(nodes, chunk_bytes=chunk)
        await everywhere(groups, lambda group: all_reduce(group, PhantomPayload(numel), ("sum",), algorithm="ring"))
        for node in nodes:
            counts = node.statistics()
            messages, payload = 2 * (size - 1) * 2, 2 * (size - 1) * numel * 4 // size
            assert counts["messages_sent"] == counts["messages_received"] == messages
            assert payload <= counts["bytes_sent"] <= payload + HEADER_BYTES * messages


async def test_large_pieces_are_sent_without_a_copy_and_waited_for() -> None:
    inputs = drawn("float32", 600_000, 3)
    outputs = [array.copy() for array in inputs]
    async with endpoints(3) as nodes:
        for algorithm in ("ring", "halving"):
            for rank, array in enumerate(inputs):
                outputs[rank][:] = array

            async def call(group: Group, algorithm: Any = algorithm) -> None:
                await all_reduce(group, TensorPayload.of(outputs[group.rank]), ("sum", algorithm), algorithm=algorithm)
                assert close(outputs[group.rank], inputs)
                outputs[group.rank][:] = 0  # the memory is ours again: nothing of this may reach anybody

            await everywhere(group_of(nodes, f"group/{algorithm}"), call)


def test_bfloat16_is_summed() -> None:
    torch = pytest.importorskip("torch")
    outputs = [torch.full((1001,), rank + 1, dtype=torch.bfloat16) for rank in range(3)]

    async def main() -> None:
        async with endpoints(3) as nodes:
            groups = group_of(nodes)
            await everywhere(groups, lambda group: all_reduce(group, TensorPayload.of(outputs[group.rank]), ("sum",)))

    asyncio.run(main())
    assert all(bool((output == 6).all()) for output in outputs)
