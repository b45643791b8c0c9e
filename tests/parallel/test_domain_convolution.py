"""Convolution on strips against the plain one, for any shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.parallel.domain_world import check_layer, check_overlap
from tests.parallel.test_geometry import divisions
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.domain.convolution import DomainConv, DomainConvTranspose
from zmqtrain.parallel.domain.layer import DomainLayer
from zmqtrain.parallel.geometry import even
from zmqtrain.testing.threads import ThreadFabric, run_ranks

FORWARD, BACKWARD = Label("layer", "halo", "forward"), Label("layer", "halo", "backward")


@given(st.data())
@settings(max_examples=60)
def test_convolution(data: st.DataObject) -> None:
    members, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 19))
    kernel, stride = data.draw(st.integers(1, 11)), data.draw(st.integers(1, 4))
    dilation, padding = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 6))
    groups = data.draw(st.sampled_from([1, 2, 4]))
    room = rows + 2 * padding - dilation * (kernel - 1) - 1
    if room < 0:
        return
    module = nn.Conv2d(4, 4, (kernel, 3), (stride, 2), (padding, 1), (dilation, 1), groups, bias=data.draw(st.booleans()))
    division = data.draw(st.one_of(st.none(), divisions(rows, members)))
    outputs = data.draw(st.one_of(st.none(), divisions(room // stride + 1, members)))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    check_layer(DomainConv, module, (2, 4, rows, 5), members, division=division, outputs=outputs, dtype=dtype)


@given(st.data())
@settings(max_examples=40)
def test_transposed_convolution(data: st.DataObject) -> None:
    members, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    kernel, stride = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    dilation, padding = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 3))
    output_padding = data.draw(st.integers(0, max(stride, dilation) - 1))
    outputs = (rows - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 + output_padding
    if outputs < 1:
        return
    module = nn.ConvTranspose2d(
        4, 2, (kernel, 3), (stride, 2), (padding, 1), (output_padding, 1), data.draw(st.sampled_from([1, 2])), True, (dilation, 1)
    )
    division = data.draw(st.one_of(st.none(), divisions(rows, members)))
    check_layer(DomainConvTranspose, module, (2, 4, rows, 4), members, division=division)


@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize(
    ("channels", "out", "rows", "kernel", "stride", "padding"),
    [(3, 8, 227, 11, 4, 0), (6, 8, 27, 5, 1, 2), (8, 8, 13, 3, 1, 1), (8, 6, 13, 3, 1, 1)],
)
def test_the_convolutions_of_alexnet(
    channels: int, out: int, rows: int, kernel: int, stride: int, padding: int, members: int
) -> None:
    module = nn.Conv2d(channels, out, kernel, stride, padding)
    world = check_layer(DomainConv, module, (2, channels, rows, 33), members, input_gradient=channels != 3)
    for rank, sent in enumerate(world.traffic):
        assert sent.messages[FORWARD] <= 2
        assert sent.messages[BACKWARD] == 0 or channels != 3, f"rank {rank}: the first layer sends nothing backward"


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # of the plain layer
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding: str) -> None:
    check_layer(DomainConv, nn.Conv2d(2, 3, (4, 6), padding=padding, dilation=(1, 2)), (2, 2, 11, 12), 3)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_1x1_convolution_sends_nothing(stride: int) -> None:
    world = check_layer(DomainConv, nn.Conv2d(3, 4, 1, stride), (2, 3, 12, 5), 3)
    assert all(not sent.messages for sent in world.traffic)


@pytest.mark.parametrize("module", [nn.Conv2d(3, 4, (3, 5), (2, 1), (1, 2)), nn.Conv2d(3, 3, 3, groups=3)])
def test_along_the_width(module: nn.Conv2d) -> None:
    check_layer(DomainConv, module, (2, 3, 7, 13), 3, dim=3)
    check_layer(DomainConvTranspose, nn.ConvTranspose2d(3, 2, (2, 4), (1, 2), 1), (2, 3, 7, 13), 3, dim=3)


def test_no_samples() -> None:
    world = check_layer(DomainConv, nn.Conv2d(3, 4, 3, padding=1), (0, 3, 12, 5), 3)
    assert all(not sent.messages for sent in world.traffic)


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (DomainConv, nn.Conv2d(2, 2, 3, padding=1)),
        (DomainConv, nn.Conv2d(2, 2, 11, 4, 2)),
        (DomainConv, nn.Conv2d(2, 2, 3, padding=2, dilation=2, groups=2)),
        (DomainConvTranspose, nn.ConvTranspose2d(2, 2, 4, 2, 1)),
    ],
)
def test_the_interior_is_computed_before_anything_arrives(make: type[DomainLayer], module: nn.Module) -> None:
    check_overlap(make, module, (2, 2, 60, 11))


def test_frozen_weights_and_no_gradients() -> None:
    module = nn.Conv2d(2, 2, 3, padding=1)
    module.weight.requires_grad_(False)

    def run(fabric: ThreadFabric) -> None:
        layer = DomainConv(module, "layer", fabric.among((0, 1)), even(6, 2))
        own = torch.randn(1, 2, 3, 4, requires_grad=True)
        with torch.no_grad():
            assert not layer(own).requires_grad
        (_, of_bias) = torch.autograd.grad(layer(own).sum(), [own, layer.bias])
        assert of_bias.tolist() == [12, 12]
        result = layer(own.detach())
        nn.functional.relu_(result)  # what follows may work in place
        result.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            result.sum().backward()

    run_ranks(2, run)
    assert module.weight.grad is None


def test_other_images_by_another_division() -> None:
    module = nn.Conv2d(2, 2, 3, 2, 1).double()
    image = torch.randn(1, 2, 21, 4, dtype=torch.float64)

    def run(fabric: ThreadFabric) -> torch.Tensor:
        layer = DomainConv(module, "layer", fabric.among((0, 1)), even(6, 2))
        assert layer.out_division == ((0, 2), (2, 3))
        division = even(21, 2)
        assert layer.divide(division) == ((0, 6), (6, 11)) == layer.out_division
        return layer(image[:, :, slice(*division[fabric.rank])])

    results, _ = run_ranks(2, run)
    torch.testing.assert_close(torch.cat(results, 2), module(image))


@pytest.mark.parametrize(
    ("module", "rows", "message"),
    [
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), 8, "layer: .*padding_mode='reflect' cannot be divided"),
        (nn.Conv2d(2, 2, 9), 8, "layer: an image of 8 rows is too small"),
    ],
)
def test_what_cannot_be_divided(module: nn.Conv2d, rows: int, message: str) -> None:
    def run(fabric: ThreadFabric) -> None:
        DomainConv(module, "layer", fabric.among((0, 1)), even(rows, 2))

    with pytest.raises(UsageError, match=message):
        run_ranks(2, run)


def test_divisions_that_do_not_fit() -> None:
    def run(fabric: ThreadFabric) -> None:
        communicator = fabric.among((0,))
        with pytest.raises(UsageError, match="3 strips for 1 processes"):
            DomainConv(nn.Conv2d(2, 2, 3), "layer", communicator, even(9, 3))
        with pytest.raises(UsageError, match="does not divide 7 rows"):
            DomainConv(nn.Conv2d(2, 2, 3), "layer", communicator, even(9, 1), outputs=even(8, 1))
        with pytest.raises(UsageError, match="4 dimensions"):
            DomainConv(nn.Conv2d(2, 2, 3), "layer", communicator, even(9, 1))(torch.zeros(2, 9, 9))

    run_ranks(1, run)
