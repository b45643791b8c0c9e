"""What `torch.func` makes of a model's layers is the same where they are divided."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, vjp, vmap

from tests.parallel.placed.training import CLASSES, Training, compare
from zmqtrain.errors import UsageError
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.parallel.rehearsal import RehearsalFabric

SAMPLES, WIDTH = 5, 8
VECTORS = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Model(nn.Module):
    def __init__(self, middle: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.image, self.head = nn.Linear(WIDTH, WIDTH), nn.Conv1d(1, 1, 3, padding=1), nn.Linear(WIDTH, CLASSES)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self, x))  # type: ignore[no-any-return]


def energy(model: Model, x: Tensor) -> Tensor:
    return model.inner(x).tanh().square().sum()


def vector_times_jacobian(model: Model, x: Tensor) -> Tensor:
    found, back = vjp(lambda given: model.inner(given).tanh(), model.inner(x))
    return found + back(torch.ones_like(found))[0]


MODELS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "vmap": lambda model, x: vmap(model.inner)(x).tanh(),
    "vmap of a convolution": lambda model, x: vmap(lambda each: model.image(each[None]))(x).flatten(1),
    "grad": lambda model, x: model.inner(grad(lambda given: energy(model, given))(x)),
    "vjp": vector_times_jacobian,
    "jacrev": lambda model, x: vmap(jacrev(lambda each: each.sin() * each.sum()))(model.inner(x)).sum(1),
    "functional_call": lambda model, x: functional_call(model.inner, {"weight": model.inner.weight * 2}, (x,)).tanh(),
}


@pytest.mark.parametrize(("plan", "grid"), [("model", "2x1"), ("mixed", "2x2"), ("domain", "3x1")])
@pytest.mark.parametrize("name", MODELS)
def test_transforms_see_the_whole_model(name: str, plan: str, grid: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return Model(MODELS[name]).double()

    compare(made, Training(VECTORS), plan, grid)


class InDual(Model):
    """Its forward makes dual tensors."""

    def forward(self, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            return super().forward(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("inside", [True, False])
def test_dual_tensors_are_refused(inside: bool) -> None:
    model = (InDual if inside else Model)(MODELS["functional_call"]).double()
    parallel = parallelize(model, "1x1", fabric=RehearsalFabric(0, 1))
    parallel.batch.size = SAMPLES
    with forward_ad.dual_level() if not inside else nullcontext():
        given = VECTORS if inside else forward_ad.make_dual(VECTORS, torch.ones_like(VECTORS))
        with pytest.raises(UsageError, match=r"dual tensors .* write them with torch.func.jvp"):
            parallel(given)
