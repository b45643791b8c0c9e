"""Pooling on strips against the plain one, for any shape and torch's rules of padding and rounding up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.parallel.domain_world import check_layer, check_overlap
from tests.parallel.test_geometry import divisions
from tests.precision import close
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.domain.adaptive import DomainAdaptiveAvgPool, DomainAdaptiveMaxPool, DomainGlobalPool
from zmqtrain.parallel.domain.layer import DomainLayer
from zmqtrain.parallel.domain.pooling import DomainAvgPool, DomainMaxPool
from zmqtrain.parallel.geometry import Division, even
from zmqtrain.testing.threads import ThreadFabric, run_ranks


@given(st.data())
@settings(max_examples=40)
def test_max_pooling(data: st.DataObject) -> None:
    members, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 19))
    kernel, stride, dilation = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    padding = data.draw(st.integers(0, kernel // 2))
    if rows + 2 * padding < dilation * (kernel - 1) + 1:
        return
    module = nn.MaxPool2d((kernel, 3), (stride, 2), (padding, 1), (dilation, 1), ceil_mode=data.draw(st.booleans()))
    division = data.draw(st.one_of(st.none(), divisions(rows, members)))
    # Whole numbers: the largest is often there twice, and the first of them must get the gradient.
    image = torch.randint(-3, 3, (2, 3, rows, 5), generator=torch.Generator().manual_seed(rows)).double()
    check_layer(DomainMaxPool, module, (2, 3, rows, 5), members, division=division, image=image)


@given(st.data())
@settings(max_examples=40)
def test_average_pooling(data: st.DataObject) -> None:
    members, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 19))
    kernel, stride = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    padding = data.draw(st.integers(0, kernel // 2))
    if rows + 2 * padding < kernel:
        return
    module = nn.AvgPool2d(
        (kernel, 3),
        (stride, 2),
        (padding, 1),
        ceil_mode=data.draw(st.booleans()),
        count_include_pad=data.draw(st.booleans()),
        divisor_override=data.draw(st.sampled_from([None, None, 5])),
    )
    division = data.draw(st.one_of(st.none(), divisions(rows, members)))
    check_layer(DomainAvgPool, module, (2, 3, rows, 6), members, division=division)


@given(st.data())
@settings(max_examples=40)
def test_adaptive_pooling(data: st.DataObject) -> None:
    members, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 15))
    size = data.draw(st.one_of(st.none(), st.integers(1, 9)))
    division = data.draw(st.one_of(st.none(), divisions(rows, members)))
    other = data.draw(st.sampled_from([None, 1, 4]))
    shape = (2, 3, rows, 6)
    check_layer(DomainAdaptiveAvgPool, nn.AdaptiveAvgPool2d((size, other)), shape, members, division=division)
    image = torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(rows)).double()
    check_layer(DomainAdaptiveMaxPool, nn.AdaptiveMaxPool2d((size, other)), shape, members, division=division, image=image)


@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize("rows", [55, 27, 13])
def test_the_pooling_of_alexnet(rows: int, members: int) -> None:
    world = check_layer(DomainMaxPool, nn.MaxPool2d(3, 2), (2, 3, rows, 7), members)
    row_bytes = 2 * 3 * 7 * 8
    for phase in ("forward", "backward"):
        sent = [traffic.nbytes[Label("layer", "halo", phase)] for traffic in world.traffic]
        assert sum(sent) <= row_bytes * (members - 1), "k - s = 1 row crosses each cut"
    check_layer(DomainMaxPool, nn.MaxPool2d(3, 2, ceil_mode=True), (2, 3, rows, 7), members)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("make", "module"),
    [
        (DomainMaxPool, nn.MaxPool2d((2, 3), (1, 2), (0, 1))),
        (DomainAvgPool, nn.AvgPool2d((2, 3), (1, 2), (0, 1), count_include_pad=False)),
        (DomainAdaptiveAvgPool, nn.AdaptiveAvgPool2d((3, 5))),
        (DomainAdaptiveMaxPool, nn.AdaptiveMaxPool2d((3, 5))),
    ],
)
def test_along_the_width(make: type[DomainLayer], module: nn.Module, dtype: torch.dtype) -> None:
    check_layer(make, module, (2, 3, 7, 13), 3, dim=3, dtype=dtype)


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (DomainMaxPool, nn.MaxPool2d(3, 2)),
        (DomainMaxPool, nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
        (DomainAvgPool, nn.AvgPool2d(5, 1, 2)),
        (DomainAdaptiveAvgPool, nn.AdaptiveAvgPool2d(7)),
        (DomainAdaptiveMaxPool, nn.AdaptiveMaxPool2d(7)),
    ],
)
def test_the_interior_is_computed_before_anything_arrives(make: type[DomainLayer], module: nn.Module) -> None:
    check_overlap(make, module, (2, 2, 41, 8), members=2)


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("division", [even(7, 3), ((0, 0), (0, 6), (6, 7))])
@pytest.mark.parametrize("other", [1, 2, None])
@pytest.mark.parametrize("kind", [nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d])
def test_pooling_the_whole_image(kind: type[nn.Module], other: int | None, division: Division, dim: int) -> None:
    """Every member has the whole output, and the same gradient of it."""
    module = kind((1, other) if dim == 2 else (other, 1))
    shape = (2, 3, 7, 4) if dim == 2 else (2, 3, 4, 7)
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(-3, 3, shape, generator=generator).double().requires_grad_()
    expected = module(image)
    gradient = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (of_image,) = torch.autograd.grad(expected, image, gradient)

    def run(fabric: ThreadFabric) -> tuple[Tensor, Tensor]:
        layer = DomainGlobalPool(module, "layer", fabric.among((0, 1, 2)), division, dim=dim)
        start, stop = division[fabric.rank]
        own = image.detach().narrow(dim, start, stop - start).clone().requires_grad_()
        result = layer(own)
        result.backward(gradient)
        assert own.grad is not None
        return result.detach(), own.grad

    if dim == 3 and kind is nn.AdaptiveMaxPool2d:
        with pytest.raises(UsageError, match="not over the whole image, member after member"):
            run_ranks(3, run)  # the first of numbers that are equal need not be the first member's
        return
    results, world = run_ranks(3, run)
    for result, _ in results:
        close(result, expected.detach(), "output", least=1.0)
    close(torch.cat([grad for _, grad in results], dim), of_image, "dX", least=1.0)
    assert all(set(sent.messages) == {Label("layer", "statistics")} for sent in world.traffic)


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (DomainMaxPool, nn.MaxPool2d(2, return_indices=True)),
        (DomainAdaptiveMaxPool, nn.AdaptiveMaxPool2d(2, return_indices=True)),
        (DomainGlobalPool, nn.AdaptiveMaxPool2d(1, return_indices=True)),
        (DomainGlobalPool, nn.AdaptiveAvgPool2d(2)),
    ],
)
def test_what_cannot_be_divided(make: type[DomainLayer], module: nn.Module) -> None:
    with pytest.raises(UsageError, match="layer: pooling"):
        run_ranks(1, lambda fabric: make(module, "layer", fabric.among((0,)), even(8, 1)))
