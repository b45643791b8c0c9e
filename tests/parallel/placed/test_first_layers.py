"""A batch-parallel layer that comes first: each process computes its own share of its column's samples, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.placed.training import Training, compare
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed import Placed
from zmqtrain.parallel.plan import LayerPlan, Plan

WIDTH = 8


class Product(nn.Module):
    """A layer of a person's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, key_padding_mask=x[..., 0] > 1, need_weights=False)[0]  # type: ignore[no-any-return]


def encoder(*, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


#: By name: the layer, and how many dimensions its input has.
LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "encoder": (lambda: encoder(norm_first=False), 3),
    "encoder, norm first": (lambda: encoder(norm_first=True), 3),
    "attention": (Attention, 3),
    "lstm": (lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), 3),
    "gru": (lambda: nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True), 3),
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), 3),
    "of one's own": (Product, 3),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU()), nn.Linear(WIDTH, WIDTH)), 3),
    "batch norm": (lambda: nn.BatchNorm2d(WIDTH), 4),
    "group norm": (lambda: nn.GroupNorm(2, WIDTH), 4),
    "instance norm": (lambda: nn.InstanceNorm2d(WIDTH, affine=True), 4),
    "prelu": (lambda: nn.PReLU(WIDTH), 4),
    "convolution": (lambda: nn.Conv2d(WIDTH, WIDTH, 3), 4),
    "transposed convolution": (lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 3), 4),
}


class Model(nn.Module):
    """The layer first, a linear layer last."""

    def __init__(self, first: nn.Module, shares: list[str]) -> None:
        super().__init__()
        self.first, self.head = first, nn.LazyLinear(5)
        self.shares = shares

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        found = found[0] if isinstance(found, tuple) else found
        if isinstance(found, Placed):
            self.shares.append(found.placement.samples)
        return self.head(found.flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("grid", ["2x2", "4x1"])
def test_each_process_computes_its_own_samples(name: str, grid: str) -> None:
    layer, dimensions = LAYERS[name]
    samples = 6 if grid == "2x2" else 3  # of which a process of four has none
    x = torch.randn(samples, WIDTH, *[5] * (dimensions - 2), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = x.transpose(1, 2) if dimensions == 3 else x
    shares: list[str] = []

    def make() -> nn.Module:
        torch.manual_seed(1)
        model = Model(layer(), shares).double()
        with torch.no_grad():
            model(x)
        shares.clear()
        return model

    wanted = Grid.parse(grid)
    plan = Plan((LayerPlan("first", "batch", wanted), LayerPlan("head", "model", wanted)))
    assert not compare(make, Training(x), plan, grid)
    assert len(shares) == 3 * wanted.size
    assert set(shares) == {"all"}
