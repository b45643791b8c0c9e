"""Attention and MLPs that models write of linear layers: one sum of activations each, and a wrong guess changes no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.placed.pairs import pairs
from zmqtrain.parallel.plan import LayerPlan, Plan
from zmqtrain.parallel.shard import gather_state
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import ThreadFabric, run_ranks

WIDTH, TIME, BATCH = 8, 3, 4


class Attention(nn.Module):
    """With fewer keys than queries, if ``groups``."""

    def __init__(self, heads: int = 4, shared: int = 4) -> None:
        super().__init__()
        self.num_heads, self.shared = heads, shared
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH // heads * shared)
        self.v_proj = nn.Linear(WIDTH, WIDTH // heads * shared)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(*x.shape[:2], -1, WIDTH // self.num_heads).transpose(1, 2) for each in self._three())
        found = functional.scaled_dot_product_attention(q, k, v, enable_gqa=self.shared != self.num_heads)
        return self.out_proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _three(self) -> list[nn.Linear]:
        return [self.q_proj, self.k_proj, self.v_proj]


class Mlp(nn.Module):
    def __init__(self, *, gated: bool = False) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.gate_proj = nn.Linear(WIDTH, 12) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up_proj(x)
        hidden = hidden.relu() if self.gate_proj is None else hidden * self.gate_proj(x).sigmoid()
        return self.down_proj(hidden)  # type: ignore[no-any-return]


class Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(12, WIDTH), Conv1D(WIDTH, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(x).relu())  # type: ignore[no-any-return]


class Misleading(Mlp):
    """Names that say what the forward does not do."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.pad(x, (0, 4))) + self.up_proj(x)[..., 2:10] * self.up_proj.weight.sum()


class Twice(nn.Module):
    """Its layers have two names, of which one says that they are a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.head = nn.Sequential(self.fc1, nn.ReLU(), self.fc2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        own = self.attention.self = nn.Module()
        own.query, own.key, own.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        own.num_attention_heads = 4  # type: ignore[assignment]
        self.attention.output, self.intermediate, self.output = nn.Module(), nn.Module(), nn.Module()
        self.attention.output.dense = nn.Linear(WIDTH, WIDTH)
        self.intermediate.dense, self.output.dense = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self.attention.self
        q, k, v = (each(x).view(BATCH, TIME, 4, 2).transpose(1, 2) for each in (own.query, own.key, own.value))
        scores = (q @ k.transpose(2, 3)).softmax(-1)
        x = x + self.attention.output.dense((scores @ v).transpose(1, 2).reshape(BATCH, TIME, WIDTH))  # type: ignore[operator, union-attr]
        return x + self.output.dense(self.intermediate.dense(x).relu())  # type: ignore[no-any-return, operator, union-attr]


#: Name -> (model, how often it sends in forward on 2x1 when only the result is made whole).
MODELS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "attention": (Attention, 1),
    "attention with shared keys": (lambda: Attention(4, 2), 1),
    "attention with one key": (lambda: Attention(4, 1), None),
    "mlp": (Mlp, 1),
    "gated mlp": (lambda: Mlp(gated=True), 1),
    "gpt": (Gpt, 1),
    "layers with two names": (Twice, 1),
    "bert": (Bert, 2),
    "misleading": (Misleading, None),
}


def run(name: str, grid: str) -> tuple[list[Any], dict[str, Tensor]]:
    torch.manual_seed(1)
    model, x = MODELS[name][0]().double(), torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64)
    state = model.state_dict()
    output = model(x)
    (output**2).sum().backward()
    expected: dict[str, Tensor] = {"output": output.detach()} | {key: each.grad for key, each in model.named_parameters()}  # type: ignore[dict-item, misc]

    def ranks(fabric: ThreadFabric) -> tuple[dict[str, Tensor], int]:
        own = MODELS[name][0]().double()
        own.load_state_dict(state)
        parallel = parallelize(own, grid, fabric=fabric)
        parallel.batch.size = BATCH
        start, stop = parallel.samples(BATCH)
        output = parallel(x[start:stop])
        sent = sum(fabric.traffic.messages.values())
        (output**2).sum().backward()
        shards = parallel.shards_by_name()
        sum_gradients(parallel, fabric, shards)
        found = {key: each.grad for key, each in parallel.named_parameters() if each.grad is not None}
        return {"output": output.detach(), **gather_state(found, shards, fabric)}, sent

    results, _ = run_ranks(Grid.parse(grid).size, ranks)
    for rank, (found, _sent) in enumerate(results):
        column = Grid.parse(grid).place(rank)[1]
        each = BATCH // Grid.parse(grid).columns
        found["output"] = torch.cat([found["output"], expected["output"][each:]]) if column == 0 else expected["output"]
    return results, expected


@pytest.mark.parametrize("grid", ["2x1", "3x1", "2x2"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_model_s(name: str, grid: str) -> None:
    results, expected = run(name, grid)
    for found, sent in results:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        if grid == "2x1" and MODELS[name][1] is not None:
            assert sent == MODELS[name][1]


def test_a_plan_divides_a_layer_by_one_of_its_names() -> None:
    def ranks(fabric: ThreadFabric) -> None:
        named = (LayerPlan("fc1", "model", Grid(2, 1)), LayerPlan("head.2", "whole", Grid(2, 1)))
        parallelize(Twice(), "2x1", Plan(named), fabric=fabric)

    with pytest.raises(UsageError, match=r"names the layer head\.2, which is fc2, too"):
        run_ranks(2, ranks)


def test_layers_in_a_row_are_no_pair() -> None:
    """Their outputs are what a plan says of them."""
    assert not list(pairs(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
