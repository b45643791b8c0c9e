"""The paper's equations, against the formulas written out and what follows from them."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.equations import (
    batch_over_model,
    break_even_batch,
    integrated,
    model_and_batch,
    pure_batch,
    pure_domain,
    pure_model,
    redistribution,
)
from tests.plan.networks import LINK, alexnet, conv, small
from zmqtrain.parallel.geometry import even
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placement import Placement, laid, volume
from zmqtrain.parallel.redistribute import route
from zmqtrain.plan.costs import Paper
from zmqtrain.plan.layers import stages
from zmqtrain.plan.link import LayerCost, Link
from zmqtrain.plan.placed import Lies, Placed, lacking

ALPHA, BETA = 2e-6, 4 / 6e9  # a word of four bytes
BATCH = 2048
grids = st.builds(Grid, st.integers(1, 40), st.integers(1, 40))


def seconds(costs: list[LayerCost], link: Link = LINK) -> float:
    return link.seconds(sum(costs, LayerCost()).total)


def test_pure_batch_on_512_processes_as_the_paper_has_it() -> None:
    assert seconds(pure_batch(alexnet(), BATCH, 512)) * 1e3 == pytest.approx(83.28, abs=0.005)


@given(st.integers(1, 600), st.integers(1, 4096))
def test_equations_3_and_4_written_out(processes: int, batch: int) -> None:
    layers, log, share = alexnet(), ceil(log2(processes)), (processes - 1) / processes
    model = sum(ALPHA * log + BETA * batch * share * layer.numel_out for layer in layers)
    model += 2 * sum(ALPHA * log + BETA * batch * share * layer.numel_out for layer in layers[:-1])  # d_(i-1) of i = 2..L
    assert seconds(pure_model(layers, batch, processes)) == pytest.approx(model)
    assert seconds(pure_batch(layers, batch, processes)) == pytest.approx(
        2 * sum(ALPHA * log + BETA * share * layer.weights for layer in layers)
    )


@given(grids, st.integers(1, 4096))
def test_equation_8_written_out(grid: Grid, batch: int) -> None:
    rows, columns = grid.rows, grid.columns
    total = 0.0
    for index, layer in enumerate(alexnet()):
        part = BETA * batch / columns * (rows - 1) / rows
        total += ALPHA * ceil(log2(rows)) + part * layer.numel_out
        if index:
            total += 2 * (ALPHA * ceil(log2(rows)) + part * layer.numel_in)
        total += 2 * (ALPHA * ceil(log2(columns)) + BETA * (columns - 1) / columns * layer.weights / rows)
    assert seconds(model_and_batch(alexnet(), batch, grid)) == pytest.approx(total)


@given(st.integers(1, 600), st.integers(1, 4096))
def test_the_ends_of_equation_8_are_equations_3_and_4(processes: int, batch: int) -> None:
    layers = alexnet()
    assert model_and_batch(layers, batch, Grid(processes, 1)) == pure_model(layers, batch, processes)
    one_row = model_and_batch(layers, batch, Grid(1, processes))
    for found, expected in zip(one_row, pure_batch(layers, batch, processes), strict=True):
        assert found.terms() == expected.terms()


@given(grids, st.integers(1, 4096), st.lists(st.booleans(), min_size=8, max_size=8))
def test_equation_9_takes_each_layer_s_terms_from_8_7_and_4(grid: Grid, batch: int, domain: list[bool]) -> None:
    layers = alexnet()
    placed = [Placed("domain" if on and index < 5 else "model", grid) for index, on in enumerate(domain)]
    found = integrated(layers, batch, placed)
    for index, (how, cost) in enumerate(zip(placed, found, strict=True)):
        if how.choice == "model":
            assert cost == model_and_batch(layers, batch, grid)[index]
        else:
            assert cost.dw == pure_batch(layers, batch, grid.size)[index].dw
            if grid.rows > 1:
                kernel, head = layers[index].head.kernel[0] // 2, layers[index].head
                assert (cost.halo.messages, cost.halo_back.messages) == (1, 1)
                assert cost.halo.nbytes == pytest.approx(4 * batch / grid.columns * head.row_numel * kernel)
                assert cost.halo_back.nbytes == pytest.approx(4 * batch / grid.columns * head.output_row_numel * kernel)
    assert integrated(layers, batch, [Placed("model", grid)] * 8) == model_and_batch(layers, batch, grid)


def test_equation_7_written_out_and_1x1_convolutions_send_no_halo() -> None:
    layers = stages([conv("a", 3, 8, 16, 5), conv("b", 8, 8, 16, 1), conv("c", 8, 4, 16)])
    halos = ALPHA + BETA * 32 * 16 * 3 * 2 + ALPHA + BETA * 32 * 16 * 8 * 2  # a, forward and backward
    halos += ALPHA + BETA * 32 * 16 * 8 + ALPHA + BETA * 32 * 16 * 4  # c
    assert seconds(pure_domain(layers, 32, 4)) == pytest.approx(halos + seconds(pure_batch(layers, 32, 4)))


def test_equation_5_breaks_even_between_13_and_14() -> None:
    layer = stages([conv("conv4", 384, 384, 13)])[0]
    assert 13 < break_even_batch(layer) < 14
    assert batch_over_model(layer, 13) > 1 > batch_over_model(layer, 14)
    assert batch_over_model(layer, 20) == pytest.approx(2 * 3 * 3 * 384 / (3 * 20 * 13 * 13))  # the paper's form


@given(st.integers(2, 600), st.integers(1, 4096))
def test_equation_6_is_a_model_layer_s_all_gather(processes: int, batch: int) -> None:
    layer = small()[1]
    cost = redistribution(layer, batch, processes)
    gather = pure_model([layer], batch, processes)[0].all_gather
    assert cost.messages == gather.messages == ceil(log2(processes))
    assert cost.nbytes == pytest.approx(gather.nbytes)
    assert cost.nbytes == pytest.approx(4 * batch * (processes - 1) / processes * layer.numel_out)


@given(grids, st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 8))
def test_times_scale_with_alpha_beta_and_the_word(grid: Grid, alpha: float, beta: float, word: int) -> None:
    layers = alexnet()
    cost = sum(model_and_batch(layers, BATCH, grid), LayerCost()).total
    assert Link(alpha * ALPHA, 0).seconds(cost) == pytest.approx(alpha * LINK.latency_s(cost))
    assert Link(0, beta / 6e9).seconds(cost) == pytest.approx(beta * LINK.volume_s(cost))
    words = sum(model_and_batch(layers, BATCH, grid, Paper(word)), LayerCost()).total
    assert words.nbytes == pytest.approx(cost.nbytes * word / 4)
    assert words.messages == cost.messages


def test_without_the_sums_of_input_gradients() -> None:
    cost = sum(model_and_batch(alexnet(), BATCH, Grid(16, 32), Paper(dx=False)), LayerCost())
    assert cost.dx.nbytes == 0
    assert cost.all_gather == sum(model_and_batch(alexnet(), BATCH, Grid(16, 32)), LayerCost()).all_gather


# What a process lacks ------------------------------------------------------------------------------------------------------------


def _laid(placed: Placed, size: int) -> Placement:
    """Of images with ``size**2`` rows and columns, in a batch of ``size**2`` samples."""
    tall, wide = placed.parts
    if placed.strips == 1:
        return laid(placed.grid)
    across = {"across": 2, "across_divisions": even(size**2, wide)}
    return laid(placed.grid, divided=1, divisions=even(size**2, tall), **across)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [4, 6, 8, 12])
def test_a_change_brings_what_is_lacking(size: int) -> None:
    """As the runtime moves it: to the process that lacks most, and to the one that receives most messages."""
    shapes = [Grid(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0]
    places = {Placed.of(choice, grid) for choice in ("model", "domain", "batch") for grid in shapes}
    places |= {Placed.of("domain", grid, wide) for grid in shapes for wide in range(2, grid.rows + 1) if grid.rows % wide == 0}
    for source in places:
        for target in places:
            messages, share = lacking(Lies.of([source.needs()], 0), Lies.of([target.needs()], 1))
            way = route(_laid(source, size), _laid(target, size), (size**2,) * 3)
            lacks, received = [0] * size, [0] * size
            for piece in way.pieces:
                if piece.source != piece.to:
                    lacks[piece.to] += volume(piece.block)
                    received[piece.to] += 1
            assert max(lacks) / size**6 == pytest.approx(share.item()), (source, target)
            # Of strips of which neither kind contains the other, 2 and 3 of them, the one that has nothing may meet a part fewer.
            spare = 1 if source.strips > 1 < target.strips and size in (6, 12) else 0
            assert messages.item() - spare <= max(received) <= messages.item(), (source, target)
