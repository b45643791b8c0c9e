"""The exchange of halos and its adjoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zmqtrain.errors import ProtocolError
from zmqtrain.parallel.communicator import Communicator, Label
from zmqtrain.parallel.geometry import Count, Division, Range, Window, even, follow, halo_traffic, length, overlap, strip
from zmqtrain.parallel.halo import HEIGHT, WIDTH, HaloExchange
from zmqtrain.testing.threads import ThreadFabric, run_ranks


def exchange_of(communicator: Communicator, reach: Window, division: Division, dim: int = HEIGHT) -> HaloExchange:
    outputs = follow(reach, division)
    return HaloExchange(communicator, strip(reach, division, outputs, communicator.rank), "layer", dim)


def extended(exchange: HaloExchange, own: Tensor) -> Tensor:
    """The needed rows, own ones and others'."""
    exchange.check(own)
    kept = overlap(exchange.strip.own, exchange.strip.needed)
    pieces = [(kept, exchange.cut(own, kept))] if length(kept) else []
    sent = exchange.send(lambda rows: exchange.cut(own, rows), tuple(own.shape), own.dtype)
    pieces += [(part.rows, tensor) for part, tensor in exchange.arrived(sent)]
    found = [tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])]
    return torch.cat(found, exchange.dim) if found else own.narrow(exchange.dim, 0, 0)


def returned(exchange: HaloExchange, gradient: Tensor) -> Tensor:
    """The gradient of the strip, of that of the needed rows."""
    strip, shape = exchange.strip, tuple(gradient.shape)

    def cut(rows: Range) -> Tensor:
        return gradient.narrow(exchange.dim, rows[0] - strip.needed[0] if length(rows) else 0, length(rows))

    own = gradient.new_zeros(exchange.shape(shape, strip.own))
    kept = overlap(strip.own, strip.needed)
    if length(kept):
        exchange.cut(own, kept).add_(cut(kept))
    for part, tensor in exchange.arrived(exchange.send_back(cut, shape, gradient.dtype)):
        exchange.cut(own, part.rows).add_(tensor)
    return own


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
        own = image[:, :, slice(*exchange.strip.own)].clone()
        needed = extended(exchange, own)
        other = torch.randn(needed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(fabric.rank))
        return own, needed, other, returned(exchange, other), exchange

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
        own = image[:, :, slice(*down.strip.own), slice(*along.strip.own)].clone()
        needed = extended(along, extended(down, own))
        assert torch.equal(needed, image[:, :, slice(*down.strip.needed), slice(*along.strip.needed)])
        other = torch.randn(needed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(fabric.rank))
        return own, needed, other, returned(down, returned(along, other))

    results, _ = run_ranks(rows * columns, run)
    forward = sum((needed * other).sum() for _, needed, other, _ in results)
    backward = sum((own * adjoint).sum() for own, _, _, adjoint in results)
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-12)


def test_a_strip_of_other_rows_than_the_division_says() -> None:
    def run(fabric: ThreadFabric) -> None:
        extended(exchange_of(fabric.among((0,)), Window(8, 3), even(8, 1)), torch.zeros(1, 1, 7, 1))

    with pytest.raises(ProtocolError, match="layer: this member holds rows 0 to 8 of the image, 8 rows, but its strip has 7"):
        run_ranks(1, run)
