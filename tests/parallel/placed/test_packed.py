"""Queries, keys and values of one layer: however a forward takes them apart, or does not, it is what one process computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parallel.placed.training import CLASSES, Training, compare
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.rehearsal import rehearse
from zmqtrain.plan.counted import counted, predicted
from zmqtrain.plan.layers import stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem, placed_of
from zmqtrain.plan.trace import trace_layers
from zmqtrain.testing.threads import ThreadFabric, run_ranks

BATCH, TIME, HEADS, SIZE = 5, 3, 4, 3
WIDTH = HEADS * SIZE


class Conv1D(nn.Module):
    """As in GPT-2: a product with a weight of (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return found.view(*x.size()[:-1], self.weight.shape[1])


class Attention(nn.Module):
    def __init__(self, apart: Callable[[Tensor], tuple[Tensor, ...]], linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.n_head, self.apart = HEADS, apart
        self.c_attn, self.c_proj = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, times, _ = x.shape
        query, key, value = (each.view(n, times, -1, SIZE).transpose(1, 2) for each in self.apart(self.c_attn(x)))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(found.transpose(1, 2).reshape(n, times, -1))  # type: ignore[no-any-return]


class Doubled(torch.autograd.Function):
    """Torch does not ask tensors before it calls one."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def changed(packed: Tensor) -> tuple[Tensor, ...]:
    packed *= 0.5
    return packed.split(WIDTH, -1)


def also_whole(packed: Tensor) -> tuple[Tensor, ...]:
    query, key, value = packed.chunk(3, 2)
    return query + packed.mean(-1, keepdim=True), key * packed[..., :1].sigmoid(), value


WAYS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "split": lambda packed: packed.split(WIDTH, dim=2),
    "chunked after a view": lambda packed: packed.view(-1, 3 * WIDTH).view(BATCH, -1, 3 * WIDTH).chunk(3, -1),
    "narrow": lambda packed: (packed[..., :WIDTH], packed[..., WIDTH:-WIDTH], packed[..., -WIDTH:]),
    "unbound": lambda packed: packed.view(packed.shape[0], -1, 3, WIDTH).unbind(2),
    "own function": lambda packed: Doubled.apply(packed).split([WIDTH] * 3, -1),  # type: ignore[no-untyped-call]
    "changed in place": changed,
    "also whole": also_whole,
}


def made(way: str, linear: Callable[[int, int], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH), Attention(WAYS[way], linear), nn.Flatten(), nn.Linear(TIME * WIDTH, CLASSES)
    return nn.Sequential(*layers).double()


def words() -> Tensor:
    return torch.randn(BATCH, TIME, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("linear", "grid"), [(nn.Linear, "3x1"), (Conv1D, "2x2")])
def test_packed_projections_are_the_layer(way: str, linear: Callable[[int, int], nn.Module], grid: str) -> None:
    compare(lambda: made(way, linear), Training(words()), "model", grid)


@pytest.mark.parametrize("linear", [nn.Linear, Conv1D])
def test_a_layer_with_fewer_heads_than_rows_is_divided_as_any_other(linear: Callable[[int, int], nn.Module]) -> None:
    compare(lambda: made("split", linear), Training(words()), "model", f"{HEADS + 1}x1")


@pytest.mark.parametrize("linear", [nn.Linear, Conv1D])
def test_attention_costs_one_sum(linear: Callable[[int, int], nn.Module]) -> None:
    def run(fabric: ThreadFabric) -> dict[str, torch.Size]:
        parallel = parallelize(made("split", linear), Grid(2, 1), fabric=fabric)
        parallel.batch.size = BATCH
        with torch.no_grad():
            parallel(words())
        return {name: each.shape for name, each in parallel.named_parameters() if "c_attn.weight" in name}

    shapes, world = run_ranks(2, run)
    assert all(shape["2.c_attn.weight"].numel() == 3 * WIDTH * WIDTH // 2 for shape in shapes)
    sent = {label.layer: count for label, count in world.traffic[0].messages.items() if label.layer.startswith("2")}
    assert sent == {"2.c_proj": 1}


class Block(nn.Module):
    """Of a transformer."""

    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention(WAYS["split"], linear)
        self.mlp = nn.Sequential()
        self.mlp.c_fc, self.mlp.act, self.mlp.c_proj = linear(WIDTH, 2 * WIDTH), nn.GELU(), linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("linear", [nn.Linear, Conv1D])
@pytest.mark.parametrize("grid", ["2x2", "4x1", "1x4"])
def test_what_is_sent_is_what_a_plan_is_priced_at(linear: Callable[[int, int], nn.Module], grid: str) -> None:
    layers = nn.Embedding(7, WIDTH), Block(linear), nn.Flatten(), nn.Linear(TIME * WIDTH, CLASSES)
    model, inputs, wanted = nn.Sequential(*layers), [torch.zeros(8, TIME, dtype=torch.int64)], Grid.parse(grid)
    found = stages(trace_layers(model, inputs))
    ways = ["whole", *["model"] * (len(found) - 1)] if wanted.rows > 1 else ["batch"] * len(found)
    plan = Plan(tuple(LayerPlan(each.name, way, wanted) for each, way in zip(found, ways, strict=True)))  # type: ignore[arg-type]
    problem = Problem(found, 8, 4, Link(1e-4, 1e-9), Ours())
    assert counted(found, rehearse(model, inputs, wanted, plan, 8)) == predicted(price(problem, placed_of(problem, plan)))
