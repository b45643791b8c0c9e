"""The exchange of halos and its adjoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zmqtrain.errors import ProtocolError
from zmqtrain.parallel.communicator import Communicator, Label
from zmqtrain.parallel.geometry import Count, Division, Window, even, follow, halo_traffic, strip
from zmqtrain.parallel.halo import HEIGHT, WIDTH, HaloExchange, begin, extended
from zmqtrain.testing.threads import ThreadFabric, run_ranks


def exchange_of(communicator: Communicator, reach: Window, division: Division, dim: int = HEIGHT) -> HaloExchange:
    outputs = follow(reach, division)
    return HaloExchange(communicator, strip(reach, division, outputs, communicator.rank), "layer", dim)


@given(
    members=st.integers(1, 4),
    rows=st.integers(1, 13),
    kernel=st.integers(1, 9),
    stride=st.integers(1, 4),
    padding=st.integers(0, 4),
)
@settings(max_examples=40)
def test_the_backward_of_the_exchange_is_its_adjoint(members: int, rows: int, kernel: int, stride: int, padding: int) -> None:
    reach, division = Window(rows, kernel, stride, padding, padding), even(rows, members)
    image = torch.randn(2, 3, rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(fabric: ThreadFabric) -> tuple[Tensor, Tensor, Tensor, Tensor, HaloExchange]:
        communicator = fabric.among(tuple(range(members)))
        exchange = exchange_of(communicator, reach, division)
        own = image[:, :, slice(*exchange.strip.own)].clone().requires_grad_()
        needed = extended(exchange, own)
        other = torch.randn(needed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(fabric.rank))
        (adjoint,) = torch.autograd.grad(needed, own, other)
        return own.detach(), needed.detach(), other, adjoint, exchange

    results, world = run_ranks(members, run)
    forward = sum((needed * other).sum() for _, needed, other, _, _ in results)
    backward = sum((own * adjoint).sum() for own, _, _, adjoint, _ in results)
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-12)
    for _, needed, _, _, exchange in results:
        assert torch.equal(needed, image[:, :, slice(*exchange.strip.needed)])
    traffic = halo_traffic(reach, division, follow(reach, division), 2 * 3 * 4 * 8)
    for rank, sent in enumerate(world.traffic):
        for phase in ("forward", "backward"):
            label = Label("layer", "halo", phase)
            assert Count(sent.messages[label], sent.nbytes[label]) == traffic[phase][rank]


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (1, 3), (3, 2)])
def test_along_height_and_then_width_the_corners_come_too(rows: int, columns: int) -> None:
    high, wide = Window(9, 5, 1, 2, 2), Window(7, 3, 2, 1, 1)
    image = torch.randn(2, 3, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(fabric: ThreadFabric) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        row, column = divmod(fabric.rank, columns)
        down = exchange_of(fabric.among(tuple(range(column, rows * columns, columns))), high, even(9, rows))
        along = exchange_of(fabric.among(tuple(range(row * columns, (row + 1) * columns))), wide, even(7, columns), WIDTH)
        own = image[:, :, slice(*down.strip.own), slice(*along.strip.own)].clone().requires_grad_()
        needed = extended(along, extended(down, own))
        assert torch.equal(needed, image[:, :, slice(*down.strip.needed), slice(*along.strip.needed)])
        other = torch.randn(needed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(fabric.rank))
        (adjoint,) = torch.autograd.grad(needed, own, other)
        return own.detach(), needed.detach(), other, adjoint

    results, _ = run_ranks(rows * columns, run)
    forward = sum((needed * other).sum() for _, needed, other, _ in results)
    backward = sum((own * adjoint).sum() for own, _, _, adjoint in results)
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-12)


def test_the_interior_can_be_computed_before_the_halo_is_there_and_differentiated_while_gradients_return() -> None:
    """Row sums of neighbours: the own part from `Halo.own`, the rest from `Halo.wait`, and autograd joins them."""
    reach, division = Window(8, 3, 1, 1, 1), even(8, 2)
    order: list[list[str]] = [[], []]

    def run(fabric: ThreadFabric) -> Tensor:
        exchange = exchange_of(fabric.among((0, 1)), reach, division)
        own = torch.arange(*exchange.strip.own, dtype=torch.float64).reshape(1, 1, 4, 1).requires_grad_()
        halo = begin(exchange, own)
        interior = halo.own * 3
        interior.register_hook(lambda _: order[fabric.rank].append("interior"))
        needed = halo.wait()
        needed.register_hook(lambda _: order[fabric.rank].append("rim"))
        (interior.sum() + needed.sum()).backward()
        assert own.grad is not None
        return own.grad.flatten()

    results, _ = run_ranks(2, run)
    assert torch.cat(results).tolist() == [4, 4, 4, 5, 5, 4, 4, 4]
    assert order == [["rim", "interior"]] * 2, "what returns is sent first"


def test_a_member_that_uses_nothing_of_others_leaves_nobody_waiting() -> None:
    reach, division = Window(8, 3, 1, 1, 1), even(8, 2)

    def run(fabric: ThreadFabric) -> Tensor:
        own = torch.ones(1, 1, 4, 1, requires_grad=True)
        halo = begin(exchange_of(fabric.among((0, 1)), reach, division), own)
        needed = halo.wait()
        (halo.own.sum() if fabric.rank else needed.sum()).backward()
        assert own.grad is not None
        return own.grad.flatten()

    results, _ = run_ranks(2, run)
    assert torch.cat(results).tolist() == [1, 1, 1, 1, 2, 1, 1, 1]


def test_a_strip_of_other_rows_than_the_division_says() -> None:
    def run(fabric: ThreadFabric) -> None:
        extended(exchange_of(fabric.among((0,)), Window(8, 3), even(8, 1)), torch.zeros(1, 1, 7, 1))

    with pytest.raises(ProtocolError, match="layer: this member holds rows 0 to 8 of the image, 8 rows, but its strip has 7"):
        run_ranks(1, run)
