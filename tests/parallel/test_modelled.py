"""Modelled compute by the model's own code: operators take their time, and tensors without content travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.worlds import on_endpoints
from zmqtrain.errors import ProtocolError, UsageError
from zmqtrain.parallel.communicator import Communicator, Expected, Fabric, Label
from zmqtrain.parallel.domain.convolution import DomainConv
from zmqtrain.parallel.geometry import even
from zmqtrain.parallel.modelled import ModelledCompute, without_content
from zmqtrain.testing.threads import run_ranks

LABEL = Label("layer", "halo")


def everything(group: Communicator, content: torch.Tensor) -> list[torch.Tensor]:
    """One of each operation, with a member that only receives."""
    rank, size = group.rank, group.size
    shapes = [(2, 3 + member) for member in range(size)]
    found = group.all_gather(content.new_zeros(shapes[rank]), shapes, LABEL).wait()
    found += group.all_reduce(content.new_zeros(5, 7), LABEL).wait()
    found += group.reduce_scatter([content.new_zeros(member + 1, 2) for member in range(size)], LABEL).wait()
    if rank == 0:
        group.exchange([(1, content.new_zeros(4, 4)[1:3])], [], LABEL).wait()
    elif rank == 1:
        found += group.exchange([], [Expected(0, (2, 4), content.dtype)], LABEL).wait()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_without_content_travel_as_their_sizes(size: int) -> None:
    def on(device: str) -> Any:
        outcome = on_endpoints(size, lambda fabric: everything(fabric.among(tuple(range(size))), torch.zeros(1, device=device)))
        shapes = [[tuple(tensor.shape) for tensor in found] for found in outcome.results]
        devices = {tensor.device.type for found in outcome.results for tensor in found}
        return shapes, outcome.messages, outcome.nbytes, devices

    *real, devices = on("cpu")
    *meta, without = on("meta")
    assert real == meta
    assert (devices, without) == ({"cpu"}, {"meta"})


def test_all_members_have_content_or_none_has() -> None:
    def work(fabric: Fabric) -> None:
        part = torch.zeros(fabric.rank + 1, device="meta" if fabric.rank else "cpu")
        fabric.among((0, 1)).all_gather(part, [(1,), (2,)], LABEL).wait()

    with pytest.raises(ProtocolError, match="worker/1 sent a tensor without content"):
        on_endpoints(2, work)


def test_operators_take_the_time_of_their_arithmetic() -> None:
    spent: list[float] = []
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).to("meta")
    convolution, product = 2 * 4 * 8 * 36 * 27, 2 * 4 * 10 * 8 * 36
    with ModelledCompute(spent.append, flops_per_s=1e6) as compute:
        output = model(torch.empty(4, 3, 6, 6, device="meta"))
        assert compute.flops == convolution + product
        assert sum(spent) == pytest.approx(compute.flops / 1e6)
        output.sum().backward()
    assert compute.flops == 2 * convolution + 3 * product  # nobody needs the gradient of the images
    assert sum(spent) == pytest.approx(compute.flops / 1e6)
    before = len(spent)
    model(torch.empty(4, 3, 6, 6, device="meta"))
    assert len(spent) == before


def test_others_take_the_time_of_what_they_write() -> None:
    spent: list[float] = []
    with ModelledCompute(spent.append, 1e9, bytes_per_s=1e3):
        torch.relu(torch.empty(10, 5, device="meta")).view(50).t()
    assert spent == [pytest.approx(0.2)] * len(spent)
    assert 1 <= len(spent) <= 2  # a tensor that is made, and one that is computed; views take none


def test_interior_and_rims_take_their_shares() -> None:
    """Of three strips the middle one, which has no padding, takes a third of the whole image's time: interior first, then rims."""
    layer = nn.Conv2d(4, 4, 3, padding=1, bias=False).to("meta")
    image = torch.empty(2, 4, 12, 6, device="meta")

    def strip(fabric: Fabric) -> tuple[int, list[float]]:
        spent: list[float] = []
        divided = DomainConv(layer, "c", fabric.among((0, 1, 2)), even(12, 3))
        with ModelledCompute(spent.append, 1.0) as compute:
            own = image[:, :, :4].detach().requires_grad_()
            divided(own).sum().backward()
        return compute.flops, [seconds for seconds in spent if seconds]

    found, _ = run_ranks(3, strip)
    with ModelledCompute(lambda _: None, 1.0) as whole:
        layer(image.detach().requires_grad_()).sum().backward()
    flops, spent = found[1]
    assert flops == whole.flops / 3
    row = 2 * 2 * 4 * 6 * 4 * 9  # operations of an output row
    assert spent[:3] == [2 * row, row, row]


def test_a_copy_without_content_shares_what_the_model_shares() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3)})
    model["b"].weight = model["a"].weight
    model["b"].bias.requires_grad_(False)
    copy = without_content(model)
    assert copy["b"].weight is copy["a"].weight
    assert {each.device.type for each in copy.state_dict().values()} == {"meta"}
    assert [each.requires_grad for each in copy.parameters()] == [each.requires_grad for each in model.parameters()]
    assert {each.device.type for each in model.state_dict().values()} == {"cpu"}


def test_a_model_whose_functions_refer_to_it_has_no_copy() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_hook(lambda module, inputs, output: output * model[0].weight.sum())
    with pytest.raises(UsageError, match="Sequential cannot be copied: a hook, or a function that it keeps, refers to its modules"):
        without_content(model)
