"""What is still to be added up, of samples or rows, is never taken for a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.placed.world import Given, check
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.shard import gather_state
from zmqtrain.parallel.sums import sum_gradients
from zmqtrain.testing.threads import run_ranks


def test_a_number_is_added_once() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    check(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.5) - (x.sum(0) - 2.0), [Given(x, divided=1)])


def test_sums_are_rounded_and_not_their_parts() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    check(lambda x: (10 * x.sum(1)).to(torch.int64), [Given(x, divided=1)])


class Queries(nn.Module):
    """Layers of what has no samples, as learned queries have none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 8))
        self.words = nn.Embedding(5, 8)
        self.layer: nn.Module = {
            "linear": lambda: nn.Linear(8, 8),
            "attention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
            "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
        }[kind]()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        queries = (self.queries + self.words(torch.arange(3)))[None]
        queries = self.layer(queries, queries, queries)[0] if self.kind == "attention" else self.layer(queries)
        queries = queries[0] if isinstance(queries, tuple) else queries
        return (queries * x[:, None]).sum((1, 2))


@pytest.mark.parametrize("kind", ["linear", "attention", "lstm"])
def test_layers_of_what_has_no_samples(kind: str) -> None:
    """All columns compute the same there, and the gradients of weights count once."""
    torch.manual_seed(1)
    model, x = Queries(kind).double(), torch.randn(4, 8, dtype=torch.float64)
    model(x).sum().backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    state = model.state_dict()

    def run(fabric: Fabric) -> Any:
        own = Queries(kind).double()
        own.load_state_dict(state)
        parallel = parallelize(own, "2x2", fabric=fabric)
        parallel.batch.size = 4
        start, stop = parallel.samples(4)
        parallel(x[start:stop]).sum().backward()
        shards = parallel.shards_by_name()
        sum_gradients(parallel, fabric, shards)
        return gather_state({name: each.grad for name, each in parallel.named_parameters()}, shards, fabric)  # type: ignore[misc]

    for found in run_ranks(Grid(2, 2).size, run)[0]:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
