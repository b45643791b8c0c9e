"""Which layer stands for which, chains of them, and what is predicted of them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.domain_world import randomised
from tests.precision import close
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.domain.make import domain_layer, domain_traffic
from zmqtrain.parallel.geometry import Count, Division, even
from zmqtrain.testing.threads import ThreadFabric, run_ranks


def alexnet() -> nn.Sequential:
    """All layers of AlexNet's image part, few channels, on 227 x 67."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 11, 4), nn.ReLU(inplace=True), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(6, 8, 5, padding=2, groups=2), nn.ReLU(inplace=True), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.ReLU(inplace=True)),
        *(nn.Conv2d(6, 4, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
    )


def varied() -> nn.Sequential:
    """Down, normalised, up again, and pooled."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4), nn.BatchNorm2d(4), nn.AvgPool2d(2, 1, ceil_mode=True)),
        *(nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 2, 1)),
        *(nn.AdaptiveMaxPool2d((5, 3)), nn.Conv2d(2, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1)),
    )


@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize(("build", "shape"), [(alexnet, (2, 3, 227, 67)), (varied, (3, 3, 45, 22))])
def test_chains_of_layers_equal_the_plain_model_and_send_what_is_predicted(
    build: Callable[[], nn.Sequential], shape: tuple[int, int, int, int], members: int
) -> None:
    model = randomised(build(), torch.float64)
    assert isinstance(model, nn.Sequential)
    start = copy.deepcopy(model)
    image = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = model(image)
    gradient = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected.backward(gradient)

    def run(fabric: ThreadFabric) -> tuple[Tensor, nn.Sequential, Division | None]:
        everybody = fabric.among(tuple(range(members)))
        division: Division | None = even(shape[2], members)
        layers = nn.Sequential()
        for name, module in copy.deepcopy(start).named_children():
            assert division is not None
            layer, division = domain_layer(module, name, everybody, division, statistics=everybody)
            layers.append(layer)
        first, last = even(shape[2], members)[fabric.rank]
        result = layers(image[:, :, first:last])
        out = division or ((0, result.shape[2]),) * members
        result.backward(gradient[:, :, slice(*out[fabric.rank])])
        return result.detach(), layers, division

    results, world = run_ranks(members, run)
    if results[0][2] is None:
        for result, _, _ in results:
            close(result, expected.detach(), "output", least=1.0)
    else:
        close(torch.cat([result for result, _, _ in results], 2), expected.detach(), "output", least=1.0)
    assert results[0][1].state_dict().keys() == model.state_dict().keys()
    for name, parameter in model.named_parameters():
        total = sum(layers.get_parameter(name).grad for _, layers, _ in results)  # type: ignore[misc]
        close(total, parameter.grad, name, least=1.0)  # type: ignore[arg-type]

    division, here = even(shape[2], members), image
    for name, module in start.named_children():
        traffic = domain_traffic(module, division, here.shape, 8, input_gradient=name != "0")
        for rank, sent in enumerate(world.traffic):
            for phase in ("forward", "backward"):
                label = Label(name, "halo", phase)
                assert Count(sent.messages[label], sent.nbytes[label]) == traffic.halo[phase][rank], (label, rank)
                expected_sent = [each.sent(members, rank) for each in traffic.collectives if each.phase == phase]
                label = Label(name, "statistics", phase)
                assert sent.messages[label] == sum(each.messages for each in expected_sent), (label, rank)
                assert sent.nbytes[label] == sum(each.nbytes for each in expected_sent), (label, rank)
        here = module(here).detach()
        division = traffic.out_division or division


def test_the_first_layer_sends_nothing_backward() -> None:
    traffic = domain_traffic(nn.Conv2d(3, 64, 3, padding=1), even(224, 4), (8, 3, 224, 224), 4, input_gradient=False)
    assert traffic.halo["forward"][1] == Count(2, 2 * 8 * 3 * 224 * 4)
    assert traffic.halo["backward"] == (Count(0, 0),) * 4
    assert traffic.out_division == even(224, 4)


def test_layers_that_compute_each_place_by_itself_stay() -> None:
    def run(fabric: ThreadFabric) -> None:
        division = even(4, 1)
        for module in (nn.ReLU(), nn.LocalResponseNorm(3), nn.PReLU(), nn.Identity()):
            assert domain_layer(module, "layer", fabric.among((0,)), division) == (module, division)

    run_ranks(1, run)


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.GroupNorm(1, 2), nn.Bilinear(2, 2, 3), nn.LPPool2d(2, 2)])
def test_other_layers_are_named_in_the_error(module: nn.Module) -> None:
    with pytest.raises(UsageError, match=f"features.3: {type(module).__name__} cannot be divided"):
        run_ranks(1, lambda fabric: domain_layer(module, "features.3", fabric.among((0,)), even(4, 1)))
