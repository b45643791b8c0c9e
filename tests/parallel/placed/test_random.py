"""What a forward draws is what one process draws with the same seed, on every grid and by every plan."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed import World
from zmqtrain.parallel.placed.model import parallelize, step_seed
from zmqtrain.parallel.placement import Placement
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.shard import gather_state
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.parallel.turns import turn
from zmqtrain.testing.threads import run_ranks

BATCH, WIDTH, SEED, STEP = 5, 8, 3, 2
Call = Callable[[Any, Tensor], Tensor]


class Drawing(nn.Module):
    """Something random between two layers."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.before, self.after, self.call = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), call
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.4, batch_first=True)
        self.alpha, self.rrelu, self.features = nn.AlphaDropout(0.3), nn.RReLU(), nn.FeatureAlphaDropout(0.3)
        self.dropout, self.lstm = nn.Dropout(0.4), nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.call(self, self.before(x)))  # type: ignore[no-any-return]


def _heads(x: Tensor) -> Tensor:
    """(samples, heads, times, features)"""
    return x[:, None, :, None] * torch.linspace(0.1, 1, 12, dtype=x.dtype).view(1, 2, 1, 6)


def _dropped_attention(model: Any, x: Tensor) -> Tensor:
    q = _heads(x)
    return functional.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=0.4).sum((1, 3))


#: These draw as plain torch does.
SAME: dict[str, Call] = {
    "like": lambda model, x: x + torch.randn_like(x) * torch.rand_like(x),
    "alpha dropout": lambda model, x: model.alpha(x),
    "feature alpha dropout": lambda model, x: model.features(x),
    "rrelu": lambda model, x: model.rrelu(x),
    "gumbel": lambda model, x: functional.gumbel_softmax(x, tau=0.5),
    "gumbel hard": lambda model, x: functional.gumbel_softmax(x, hard=True) + x,
    "attention": _dropped_attention,
    "made": lambda model, x: x * torch.randn(x.shape[0], WIDTH, dtype=x.dtype) + torch.randn(WIDTH, dtype=x.dtype),
    "sizes": lambda model, x: x * torch.rand(x.shape, dtype=x.dtype),
    "permuted": lambda model, x: x[torch.randperm(len(x))] + x[:, torch.randperm(WIDTH)],
    "in place": lambda model, x: x + torch.empty_like(x).normal_() + x.new_empty(x.shape).uniform_(),
    "bernoulli": lambda model, x: x * torch.bernoulli(torch.full_like(x, 0.4)) + torch.bernoulli(x.detach().sigmoid()),
    "normal": lambda model, x: torch.normal(x.detach(), x.detach().abs()) + x,
    "multinomial": lambda model, x: x + torch.multinomial(x.detach().exp(), 1),
    "poisson": lambda model, x: x + torch.poisson(x.detach().exp()),
    "distribution": lambda model, x: torch.distributions.Normal(x, x.exp()).rsample(),
    "checkpoint": lambda model, x: checkpoint(lambda y: (y * torch.randn_like(y)).sin(), x, use_reentrant=False),  # type: ignore[return-value]
}
#: And these draw masks by position, the same on every grid.
MASKS: dict[str, Call] = {
    "dropout": lambda model, x: model.dropout(x),
    "functional": lambda model, x: functional.dropout(x, 0.3) + functional.dropout1d(x[:, :, None], 0.3)[:, :, 0],
    "attention layer": lambda model, x: model.attention(x[:, None] + x[:, :3, None], x[:, None], x[:, None])[0].sum(1),
    "self-attention": lambda model, x: model.attention(*[x[:, None] * x[:, :3, None]] * 3)[0].sum(1),
    "checkpoint": lambda model, x: checkpoint(lambda y: model.dropout(y).sin() * model.dropout(y), x, use_reentrant=False),  # type: ignore[return-value]
}
X = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def made(call: Call) -> nn.Module:
    torch.manual_seed(1)
    return Drawing(call).double()


def divided(model: nn.Module, grid: str, choice: str) -> list[dict[str, Tensor]]:
    """The output and all gradients, of each rank. The whole of the output is put together by ``check``."""
    wanted = Grid.parse(grid)

    def run(fabric: Fabric) -> Any:
        own = copy.deepcopy(model)  # to make one would draw numbers while others do
        names = [name for name, child in own.named_children() if any(True for _ in child.parameters())]
        plan = Plan(tuple(LayerPlan(name, choice, wanted) for name in names))  # type: ignore[arg-type]
        parallel = parallelize(own, wanted, plan, fabric=fabric, seed=SEED)
        parallel.batch.size, parallel.batch.step = BATCH, STEP
        start, stop = parallel.samples(BATCH)
        output = parallel(X[start:stop])
        with turn():  # for what is computed again: other ranks are threads, with the same generator
            (output**2).sum().backward()
        there, shards = parallel.output_range(), parallel.shards_by_name()
        sum_gradients(parallel, fabric, shards)
        found = {name: each.grad for name, each in parallel.named_parameters() if each.grad is not None}
        return slice(start + there.start, start + there.stop), output.detach(), gather_state(found, shards, fabric)

    results = []
    for where, output, found in run_ranks(wanted.size, run)[0]:
        results.append({"where": torch.arange(BATCH)[where], "output": output, **found})
    return results


def equal(results: list[dict[str, Tensor]], output: Tensor, gradients: dict[str, Tensor]) -> None:
    for found in results:
        torch.testing.assert_close(found["output"], output[found["where"]], rtol=1e-10, atol=1e-12)
        rest = {key: value for key, value in found.items() if key not in ("where", "output")}
        torch.testing.assert_close(rest, gradients, rtol=1e-10, atol=1e-12)


CHOICES = [("2x2", "model"), ("3x1", "model"), ("2x2", "batch"), ("2x2", "whole"), ("1x4", "model")]


@pytest.mark.parametrize(("grid", "choice"), CHOICES[:4])
@pytest.mark.parametrize("name", SAME)
def test_draws_what_one_process_draws(name: str, grid: str, choice: str) -> None:
    model = made(SAME[name])
    ordinary = copy.deepcopy(model)
    torch.manual_seed(step_seed(SEED, STEP))
    output = ordinary(X)
    (output**2).sum().backward()
    gradients = {key: each.grad for key, each in ordinary.named_parameters() if each.grad is not None}
    equal(divided(model, grid, choice), output.detach(), gradients)


@pytest.mark.parametrize(("grid", "choice"), CHOICES)
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_the_same_on_every_grid(name: str, grid: str, choice: str) -> None:
    model = made(MASKS[name])
    (alone,) = divided(model, "1x1", choice)
    output, gradients = alone.pop("output"), {key: each for key, each in alone.items() if key != "where"}
    assert output.shape == (BATCH, 3)
    equal(divided(model, grid, choice), output, gradients)


def test_dropout_of_sums_has_the_mask_of_what_they_are_together() -> None:
    """Of a mean over a divided image, say: a mask goes by position, and is the same wherever an activation lies."""

    def run(fabric: Fabric) -> tuple[Tensor, Tensor]:
        world = World(fabric, Grid(2, 1))
        image = torch.ones(BATCH, 16, 4, 1, dtype=torch.float64)
        placement = Placement(world.grid, "columns", 2, ((0, 1), (1, 4)))
        strips = world.placed(world.cut(image, placement), placement, image.shape)
        found = []
        whole = torch.ones(BATCH, 16, dtype=torch.float64)
        for means in (strips.mean((2, 3)), world.placed(whole, Placement(world.grid), whole.shape)):
            torch.manual_seed(STEP)
            found.append(world.whole(functional.dropout(means, 0.5)))  # type: ignore[arg-type]
        return found[0], found[1]

    for of_sums, of_whole in run_ranks(2, run)[0]:
        assert torch.equal(of_sums, of_whole)


class Recomputed(nn.Module):
    """Layers with dropout; ``recompute``: backward computes each of them again."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.draw, layer, x, use_reentrant=False) if self.recompute else self.draw(layer, x)
        return x

    @staticmethod
    def draw(layer: nn.Module, x: Tensor) -> Tensor:
        drawn = functional.dropout(torch.tanh(layer(x)), 0.4)
        return functional.dropout(drawn + torch.rand_like(drawn) * drawn, 0.3)


@pytest.mark.parametrize("grid", ["2x1", "1x2"])
def test_in_its_turn_a_backward_draws_again_what_the_forward_drew(grid: str) -> None:
    """Ranks that are threads, which change as often as they can."""
    x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))

    def gradients(recompute: bool) -> list[Tensor]:
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            models.append(Recomputed(recompute).double())

        def rank(fabric: Fabric) -> list[Tensor]:
            model = parallelize(models[fabric.rank], grid, fabric=fabric)
            model.batch.size, found = len(x), []
            for step in range(3):
                model.batch.step = step
                model.zero_grad(set_to_none=True)
                loss = model(x[slice(*model.samples(len(x)))]).square().sum()
                with turn():
                    loss.backward()
                sum_gradients(model, fabric, model.shards_by_name())
                found += [each.grad.clone() for each in model.parameters()]
            return found

        return run_ranks(2, rank)[0]

    expected = gradients(False)
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            torch.testing.assert_close(gradients(True), expected, rtol=1e-12, atol=1e-12)
    finally:
        sys.setswitchinterval(often)
