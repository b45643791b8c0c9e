"""Layers on images whose height and width are divided, as DistDL's convolutions are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.domain_world import Held, Trace, check_grid
from zmqtrain.parallel.domain.adaptive import DomainAdaptiveAvgPool, DomainAdaptiveMaxPool
from zmqtrain.parallel.domain.convolution import DomainConv, DomainConvTranspose
from zmqtrain.parallel.domain.layer import Across, DomainLayer
from zmqtrain.parallel.domain.padding import DomainPad, Pad
from zmqtrain.parallel.domain.pooling import DomainAvgPool, DomainMaxPool
from zmqtrain.parallel.domain.upsample import DomainUpsample, Resize
from zmqtrain.parallel.geometry import even
from zmqtrain.testing.threads import ThreadFabric, run_ranks


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(2, 3, 5, padding=2),
        nn.Conv2d(2, 2, (5, 4), (2, 3), (2, 1), (1, 2)),
        nn.Conv2d(2, 2, 3, padding="same", dilation=2, groups=2, bias=False),
        nn.Conv2d(2, 2, (1, 7), padding=(0, 3)),
        nn.Conv2d(2, 2, 2, 4),
    ],
)
def test_convolutions_on_four_by_four_uneven_strips(module: nn.Module) -> None:
    """Kernels, strides and dilations; the halo of some is wider than a strip."""
    check_grid(DomainConv, module, (2, 2, 17, 22), (4, 4))


LAYERS: list[tuple[type[DomainLayer], nn.Module]] = [
    (DomainConv, nn.Conv2d(3, 2, 3, padding=1)),
    (DomainConv, nn.Conv2d(3, 2, 4, 3, 5)),
    (DomainConvTranspose, nn.ConvTranspose2d(3, 2, (4, 3), 2, 1, (0, 1))),
    (DomainMaxPool, nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
    (DomainMaxPool, nn.MaxPool2d((2, 3), (1, 2), (0, 1), dilation=(2, 1))),
    (DomainAvgPool, nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
    (DomainAvgPool, nn.AvgPool2d((3, 2), (1, 2), 1, count_include_pad=False)),
    (DomainAdaptiveAvgPool, nn.AdaptiveAvgPool2d((3, 4))),
    (DomainAdaptiveAvgPool, nn.AdaptiveAvgPool2d((None, 1))),  # type: ignore[arg-type]
    (DomainAdaptiveMaxPool, nn.AdaptiveMaxPool2d((3, 4))),
    (DomainAdaptiveMaxPool, nn.AdaptiveMaxPool2d(1)),
    (DomainPad, Pad((2, 3, 1, 0), "reflect", 0.0)),
    (DomainPad, Pad((0, 9, 3, 1), "replicate", 0.0)),
    (DomainPad, Pad((-1, 3, 2, -2), "constant", 0.5)),
    (DomainUpsample, nn.Upsample(scale_factor=(2, 1.5), mode="bilinear")),
    (DomainUpsample, nn.Upsample(size=(5, 13), mode="bicubic", align_corners=True)),
    (DomainUpsample, Resize(antialias=False, size=(4, 5), mode="area")),
    (DomainUpsample, Resize(antialias=True, size=(4, 5), mode="bilinear")),
]


@pytest.mark.parametrize("parts", [(2, 2), (3, 2), (1, 3), (2, 1)])
@pytest.mark.parametrize(("make", "module"), LAYERS)
def test_layers_on_grids_of_strips(make: type[DomainLayer], module: nn.Module, parts: tuple[int, int]) -> None:
    check_grid(make, module, (2, 3, 7, 8), parts, image=_with_equal_numbers((2, 3, 7, 8)))


@pytest.mark.parametrize(("make", "module"), [LAYERS[0], LAYERS[2], LAYERS[3], LAYERS[5], LAYERS[7], LAYERS[11], *LAYERS[-7:-3]])
def test_strips_that_are_empty_or_thinner_than_the_halo(make: type[DomainLayer], module: nn.Module) -> None:
    divisions = ((0, 0), (0, 5), (5, 6), (6, 7)), ((0, 1), (1, 1), (1, 8))
    check_grid(make, module, (2, 3, 7, 8), (4, 3), divisions=divisions)
    check_grid(make, module, (2, 3, 7, 8), (4, 3), divisions=divisions, input_gradient=False)


def _with_equal_numbers(shape: tuple[int, ...]) -> Tensor:
    """Of which the first must be the largest, as in torch."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, shape, generator=generator).double()


def test_the_interior_and_the_first_rims_are_computed_while_halos_travel() -> None:
    """Nothing arrives before what does not need it is computed, forward and backward."""
    module = nn.Conv2d(2, 2, 3, padding=1)

    def run(fabric: ThreadFabric) -> list[str]:
        row, column = divmod(fabric.rank, 2)
        trace = Trace(lambda name: on_end(name))
        above, beside = Held(fabric.among((column, column + 2))), Held(fabric.among((2 * row, 2 * row + 1)))
        ends: list[str] = []

        def on_end(name: str) -> None:
            """Rows may come when the interior is there; columns when the rims above and below are; backward the other way."""
            ends.append(name)
            if name == "interior of layer":
                above.may["forward"].set()
            if name == "rim of layer":
                beside.may["forward"].set()
            if name == "interior of layer (backward)":
                above.may["backward"].set()
            if ends.count("rim of layer (backward)") == 2:
                beside.may["backward"].set()

        layer = DomainConv(copy.deepcopy(module), "layer", above, even(8, 2), across=Across(3, beside, even(8, 2)), recorder=trace)
        layer(torch.randn(1, 2, 4, 4, requires_grad=True)).sum().backward()
        return trace.moments

    results, _ = run_ranks(4, run)
    for moments in results:
        assert moments.count("begin rim of layer") == 2
        assert moments.index("end interior of layer") < moments.index("begin wait for halo of layer")
