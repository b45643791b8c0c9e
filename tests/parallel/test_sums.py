"""Sums of weight gradients during backward: the same as after it, and begun before it ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parallel.by_hand import shards_of
from zmqtrain.parallel.communicator import Label
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.sums import GradientSums, sum_at_once, sum_gradients
from zmqtrain.testing.threads import ThreadFabric, run_ranks


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    layers[2].bias.requires_grad_(False)
    return layers


def gradients(layers: nn.Module) -> list[torch.Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in layers.parameters()]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_same_sums_step_by_step(overlap: bool) -> None:
    def run(fabric: ThreadFabric) -> None:
        mine, plain, everybody = model().double(), model().double(), model().double()
        shards = shards_of(mine, Grid(1, 3), fabric.rank)
        sums = GradientSums(mine, fabric, shards, overlap=overlap)
        for step in range(2):
            inputs = [torch.full((2, 4), float(rank + step + 1), dtype=torch.float64) for rank in range(3)]
            everybody.zero_grad()
            for x in inputs:
                everybody(x).sum().backward()
            for layers in (mine, plain):
                layers.zero_grad()
                layers(inputs[fabric.rank]).sum().backward()
            sums.finish()
            sum_gradients(plain, fabric, shards)
            for layers in (mine, plain):
                for one, two in zip(gradients(layers), gradients(everybody), strict=True):
                    assert (one is None) == (two is None)
                    if one is not None and two is not None:
                        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)

    _, world = run_ranks(3, run)
    counted = {(label.layer, label.term) for traffic in world.traffic for label in traffic.messages}
    assert counted == {("0", "dw"), ("2", "dw"), ("3", "dw")}


def test_the_last_layer_is_begun_while_the_first_is_still_to_come() -> None:
    def run(fabric: ThreadFabric) -> list[Label]:
        layers = model()
        seen: list[Label] = []
        layers[0].register_full_backward_pre_hook(lambda *_: seen.extend(fabric.traffic.messages))
        sums = GradientSums(layers, fabric, shards_of(layers, Grid(1, 2), fabric.rank))
        layers(torch.ones(1, 4, requires_grad=True)).sum().backward()
        sums.finish()
        return seen

    results, _ = run_ranks(2, run)
    assert results == [[Label("3", "dw", "backward"), Label("2", "dw", "backward")]] * 2


def test_parameters_without_a_gradient_receive_those_of_others() -> None:
    def run(fabric: ThreadFabric) -> torch.Tensor:
        layers = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
        sums = GradientSums(layers, fabric, shards_of(layers, Grid(1, 2), fabric.rank), overlap=False)
        layers[fabric.rank](torch.ones(1, 2)).sum().backward()
        sums.finish()
        return torch.cat([each.weight.grad for each in layers])  # type: ignore[misc]

    results, _ = run_ranks(2, run)
    assert all((each == 1).all() for each in results)


class Branches(nn.Module):
    """A layer that is always used, one that only some steps use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.sometimes, self.never = (nn.Linear(3, 2).double() for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y + self.sometimes(x) if both else y


#: Where a gradient of zeros is another thing than none.
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("overlap", [True, False])
def test_what_no_process_has_reached_is_passed_over_as_in_pytorch(name: str, overlap: bool) -> None:
    """In the second step the second rank takes the branch, which counts for all; during backward both must. In the third none."""
    inputs = [torch.full((2, 3), float(rank + 1), dtype=torch.float64) for rank in range(2)]
    takes = [[False, False], [overlap, True], [False, False]]
    torch.manual_seed(0)
    given = Branches().state_dict()
    alone = Branches()
    alone.load_state_dict(given)
    optimizer = OPTIMIZERS[name](alone.parameters())
    for step in takes:
        optimizer.zero_grad()
        sum((alone(x, both).square().sum() for x, both in zip(inputs, step, strict=True)), torch.zeros(())).backward()
        optimizer.step()

    def run(fabric: ThreadFabric) -> dict[str, torch.Tensor]:
        mine = Branches()
        mine.load_state_dict(given)
        shards = shards_of(mine, Grid(1, 2), fabric.rank)
        sums = GradientSums(mine, fabric, shards, overlap=overlap)
        optimizer = OPTIMIZERS[name](mine.parameters())
        for step in takes:
            optimizer.zero_grad()
            mine(inputs[fabric.rank], step[fabric.rank]).square().sum().backward()
            sums.finish()
            assert mine.never.weight.grad is None
            assert (mine.sometimes.bias.grad is not None) == any(step)
            optimizer.step()
        return mine.state_dict()

    results, _ = run_ranks(2, run)
    for state in results:
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, alone.state_dict()[key], rtol=1e-12, atol=1e-12)
    assert torch.equal(results[0]["never.weight"], given["never.weight"])


def test_what_stands_for_parameters_travels_in_one_message_of_all_layers() -> None:
    def run(fabric: ThreadFabric) -> None:
        layers = model().double()
        stand_ins = {name: nn.Parameter(torch.zeros(2, dtype=torch.float64)) for name, _ in layers.named_parameters()}
        for number, (name, each) in enumerate(stand_ins.items()):
            if name != "3.weight":  # no process has one
                each.grad = torch.full((2,), float(number + fabric.rank), dtype=torch.float64)
        sum_at_once(stand_ins.items(), fabric, shards_of(layers, Grid(1, 2), fabric.rank))
        for number, (name, each) in enumerate(stand_ins.items()):
            if name == "3.weight":
                assert each.grad is None
            else:
                assert each.grad is not None
                assert each.grad.tolist() == [2 * number + 1] * 2

    _, world = run_ranks(2, run)
    assert {label.layer for traffic in world.traffic for label in traffic.messages} == {""}


def test_sparse_gradients() -> None:
    def run(fabric: ThreadFabric) -> torch.Tensor:
        layers = nn.Sequential(nn.Embedding(3, 2, sparse=True, dtype=torch.float64))
        layers(torch.tensor([fabric.rank])).sum().backward()
        sum_gradients(layers, fabric, shards_of(layers, Grid(1, 2), fabric.rank))
        assert layers[0].weight.grad is not None
        return layers[0].weight.grad

    for found in run_ranks(2, run)[0]:
        assert found.tolist() == [[1, 1], [1, 1], [0, 0]]
