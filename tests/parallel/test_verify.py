"""`zmqtrain.verify` notices every rule that is broken on purpose, and no model that is divided rightly."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.parallel.faults import FAULTS
from tests.parallel.placed.models import MODELS, Block, made
from zmqtrain.errors import DifferentModelError, UsageError
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.plan import Choice, LayerPlan, Plan
from zmqtrain.parallel.verify import Verified, verdict, verify
from zmqtrain.testing.threads import run_ranks

SAMPLES = 4


class Mlp(nn.Module):
    """A model whose forward has a bit of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.randn(8))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", torch.arange(8) % 3 == 1)
        self.seen: Tensor
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.shape[0] if self.training else self.seen
        h = functional.dropout(torch.tanh(self.first(x)), 0.3, self.training).masked_fill(self.mask, 0.1)
        h = h * self.scale + 0.1 * torch.rand_like(h) - h.mean(-1, keepdim=True)
        h = h * torch.softmax(h, -1)
        h = self.norm(self.second(h))
        h = h + torch.einsum("nf,ng->fg", h, h)[0] / x.shape[0]
        return self.third(h)  # type: ignore[no-any-return]


class Images(nn.Module):
    """Convolutions with a branch, batch norm and a change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 4, 3, padding=1), Block(4, 6, 2)
        self.side, self.head = nn.Conv2d(6, 4, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(functional.relu(self.stem(x)))
        h = torch.cat([self.side(h), h[:, :2]], 1)
        return self.head(functional.adaptive_avg_pool2d(h, 1).flatten(1))  # type: ignore[no-any-return]


class Teacher(nn.Module):
    """A model with an average of itself, which its forward makes, and which nothing that it returns depends on yet."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.teacher = nn.Linear(6, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.student(x)))
        if self.training:
            with torch.no_grad():
                self.teacher.weight.data = self.teacher.weight.data * 0.9 + self.student.weight.data * 0.1
                self.teacher.bias.lerp_(self.student.bias, 0.1)
        return found


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Callable[[], nn.Module]:
    """The same model every time, with weights that are not those of an initialization (zeros, ones)."""

    def run() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = make().to(dtype)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            return model

    return run


def vectors(samples: int) -> Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


#: Name -> (model, data, how convolutions are divided, and all else).
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Choice, Choice]] = {
    "mlp": (seeded(Mlp), vectors, "model", "model"),
    "teacher": (seeded(Teacher), vectors, "model", "model"),
    "images": (seeded(Images), images, "model", "model"),
    "strips": (seeded(Images), images, "domain", "model"),
    "batch": (seeded(Images), images, "batch", "batch"),
    "transformer": (lambda: made("transformer"), MODELS["transformer"][1], "model", "model"),
    "lstm": (lambda: made("lstm"), MODELS["lstm"][1], "model", "model"),
}


def plan_of(model: nn.Module, grid: Grid, convolutions: Choice, others: Choice) -> Plan:
    kinds = (nn.Conv2d, nn.Linear, nn.Embedding, nn.LSTM)
    layers = [
        LayerPlan(name, convolutions if isinstance(module, nn.Conv2d) else others, grid)
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    return Plan(tuple(layers))


def run(kind: str, grid: str = "2x2", **settings: Any) -> list[Verified]:
    make, data, convolutions, others = KINDS[kind]
    wanted = Grid.parse(grid)
    settings = {"loss": functional.cross_entropy, "target": torch.arange(SAMPLES) % 5, "optimizer": torch.optim.AdamW} | settings
    plan = plan_of(make(), wanted, convolutions, others)

    def on_rank(fabric: Fabric) -> Verified:
        return verify(make, wanted, plan, fabric=fabric, inputs=(data(SAMPLES),), seed=5, **settings)

    return run_ranks(wanted.size, on_rank)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", ["2x1", "1x2", "2x2"])
def test_nothing_is_found_where_nothing_is_wrong(kind: str, grid: str) -> None:
    assert run(kind, grid) == [Verified(SAMPLES, "float64")] * Grid.parse(grid).size


#: Faults that two rows do not show, but two columns do.
OF_COLUMNS = {
    "sums_of_gradients_thrown_away",
    "gradient_of_layer_norm_of_own_samples",
    "a_product_of_own_elements",
    "statistics_of_own_samples",
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, breaks = FAULTS[name]
    breaks(monkeypatch)
    with pytest.raises(DifferentModelError, match=r"another one than in one process"):
        run(kind, "1x2" if name in OF_COLUMNS else "2x1")


def test_there_are_thirty_of_them() -> None:
    assert len(FAULTS) >= 30


class LayerDrop(Mlp):
    """Leaves a layer out by chance."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if self.training and self.draw() < 0.1 else found * 2


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_that_are_others_on_each_worker_are_refused(draw: Callable[[], float]) -> None:
    make = seeded(lambda: LayerDrop(draw))

    def on_rank(fabric: Fabric) -> None:
        with pytest.raises(UsageError, match="random numbers of Python or numpy"):
            verify(make, "2x1", fabric=fabric, inputs=(vectors(SAMPLES),))

    run_ranks(2, on_rank)


def test_random_numbers_of_torch_are_the_same_on_all_workers() -> None:
    make = seeded(lambda: LayerDrop(lambda: float(torch.rand(()))))
    found, _ = run_ranks(2, lambda fabric: verify(make, "2x1", fabric=fabric, inputs=(vectors(SAMPLES),)))
    assert found == [Verified(SAMPLES, "float64")] * 2


# What the error says.


def test_it_names_the_module_and_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["statistics_of_own_samples"][1](monkeypatch)
    with pytest.raises(DifferentModelError) as caught:
        run("images")
    assert caught.value.module == "block.norm1"
    assert caught.value.parameter == "block.norm1.bias"
    assert caught.value.exit_code == 2
    for words in ("in training, the output of module block.norm1 is the first", '[parallel] whole = ["block.norm1"]',
                  "[parallel] verify = false"):  # fmt: skip
        assert words in str(caught.value)


def test_a_gradient_alone_names_the_layer_that_backward_comes_to_first(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["gradient_of_the_bias_once_a_row"][1](monkeypatch)
    with pytest.raises(DifferentModelError, match=r"in training, the gradient of third\.bias differs by") as caught:
        run("mlp")
    assert (caught.value.module, caught.value.parameter) == ("third", "third.bias")


def test_a_loss_that_is_no_mean_over_samples_is_no_use_for_columns() -> None:
    def spread(output: Tensor, target: Tensor) -> Tensor:
        return output.std()

    run("mlp", "2x1", loss=spread)
    with pytest.raises(DifferentModelError, match=r"loss of a batch is not the mean of the losses of its parts .* one column"):
        run("mlp", "1x2", loss=spread)


# Optimizers.


class Lamb(torch.optim.Optimizer):
    """Steps as long as the parameter is: a layer-wise trust ratio."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.norm() / parameter.grad.norm().clamp_min(1e-12) * parameter.grad)


def muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.dim() == 2])


@pytest.mark.parametrize(("make", "name"), [(muon, "Muon"), (torch.optim.Adafactor, "Adafactor"), (Lamb, "Lamb")])
def test_optimizers_that_look_at_whole_tensors_are_refused_by_name(make: Any, name: str) -> None:
    with pytest.raises(DifferentModelError, match=f"the optimizer {name} updates parts of a parameter other than the whole"):
        run("mlp", "2x1", optimizer=make)
    run("mlp", "1x2", optimizer=make)  # where nothing is divided it is as good as any


def test_rates_that_follow_from_sizes_are_refused_with_the_reason() -> None:
    def by_width(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [each], "lr": 1 / each.shape[0]} for each in parameters])

    with pytest.raises(DifferentModelError, match="rates that do not follow from the sizes of parameters"):
        run("mlp", "2x1", optimizer=by_width)


@pytest.mark.parametrize(
    "make",
    [torch.optim.Adagrad, torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Rprop,
     lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1)],
)  # fmt: skip
def test_optimizers_that_look_at_elements_are_not(make: Any) -> None:
    run("mlp", "2x1", optimizer=make)


# What it leaves alone.


def test_nothing_that_is_given_changes() -> None:
    model, x = seeded(Images)(), images(SAMPLES)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), x.clone()
    run_ranks(2, lambda fabric: verify(model, "2x1", fabric=fabric, inputs=(x,), optimizer=torch.optim.SGD))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(x, states[2])
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Ordinary models, of which each might raise a false alarm: rounding, kinks, numbers that are nothing but rounding.


class Single(nn.Module):
    """A model that does not run in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x.float())))  # type: ignore[no-any-return]


class Lowered(nn.Module):
    """Goes to half precision and back, where sums of rows differ by whole roundings."""

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self.first, self.second, self.autocast = nn.Linear(6, 48), nn.Linear(48, 5), autocast

    def forward(self, x: Tensor) -> Tensor:
        if self.autocast:
            with torch.autocast("cpu", torch.bfloat16):
                return self.second(torch.tanh(self.first(x))).to(x.dtype)
        h = functional.linear(x.bfloat16(), self.first.weight.to(torch.bfloat16), self.first.bias.type(torch.bfloat16))
        return functional.linear(torch.tanh(h), self.second.weight.bfloat16()).to(x.dtype)


class Tied(nn.Module):
    """One weight twice, a layer twice, a layer never, and a named output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(self.second(h) + x)  # type: ignore[no-any-return]


def last(features: int, *given: nn.Module) -> nn.Module:
    return nn.Sequential(*given, nn.Flatten(), nn.Linear(features, 5))


class Positions(nn.Module):
    """Layers on what has no samples, which all columns compute alike."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 6), nn.Embedding(7, 6)
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, words: Tensor) -> Tensor:
        places = self.mix(self.places(torch.arange(words.shape[1])))
        return self.head((self.words(words) * places).mean(1))  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """Dropout in what backward computes again, within one another."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.dropout, self.reentrant = nn.Linear(6, 8), nn.Linear(8, 5), nn.Dropout(0.3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.outer, self.first(x), use_reentrant=self.reentrant))  # type: ignore[no-any-return]

    def outer(self, h: Tensor) -> Tensor:
        return checkpoint(lambda h: self.dropout(h.tanh()), self.dropout(h), use_reentrant=self.reentrant)  # type: ignore[no-any-return]


ORDINARY: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 5), vectors),
    "relu": (lambda: last(8, nn.Linear(6, 8), nn.ReLU()), vectors),
    "gelu and layer norm": (lambda: last(8, nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8)), vectors),
    "dropout": (lambda: last(8, nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2)), vectors),
    "alpha dropout": (lambda: last(8, nn.Linear(6, 8), nn.SELU(), nn.AlphaDropout(0.2)), vectors),
    "batch norm of vectors": (lambda: last(8, nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), vectors),
    "prelu": (lambda: last(8, nn.Linear(6, 8), nn.PReLU(8)), vectors),
    "bilinear": (Mlp, vectors),
    "single precision": (Single, vectors),
    "in half precision": (lambda: Lowered(autocast=False), vectors),
    "in half precision, by autocast": (lambda: Lowered(autocast=True), vectors),
    "tied": (Tied, vectors),
    "images": (Images, images),
    "a bias before batch norm": (lambda: last(256, nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()), images),
    "group norm": (lambda: last(256, nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()), images),
    "pools": (lambda: last(36, nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU(inplace=True)), images),
    "channels dropped": (lambda: last(144, nn.Conv2d(3, 4, 3), nn.Dropout2d(0.4)), images),
    "computed again": (lambda: Recomputed(False), vectors),
    "computed again, reentrant": (lambda: Recomputed(True), vectors),
    "positions": (Positions, MODELS["transformer"][1]),
    "random leaks": (lambda: last(8, nn.Linear(6, 8), nn.RReLU()), vectors),
    "instance norm": (lambda: last(256, nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4, affine=True)), images),
    "transformer": (lambda: made("transformer"), MODELS["transformer"][1]),
    "lstm": (lambda: made("lstm"), MODELS["lstm"][1]),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ORDINARY),
        *((name, torch.float64) for number, name in enumerate(ORDINARY) if number % 3 == 0),
    ],
)
def test_ordinary_models_raise_no_false_alarm(name: str, dtype: torch.dtype) -> None:
    """All in single precision, where rounding is nearest to a fault, and every third one in double precision."""
    make, data = ORDINARY[name]
    make = seeded(make, dtype if name != "single precision" else torch.float32)
    x = data(SAMPLES)
    x = x.to(dtype) if x.is_floating_point() else x
    # Both draw what dropout leaves out, otherwise.
    given: dict[str, Any] = {"loss": functional.cross_entropy, "target": torch.arange(SAMPLES) % 5, "seed": dtype.itemsize}
    found, _ = run_ranks(4, lambda fabric: verify(make, "2x2", fabric=fabric, inputs=(x,), optimizer=torch.optim.AdamW, **given))
    assert found[0].precision == ("float32" if name == "single precision" else "float64")


@pytest.mark.parametrize("kind", ["mlp", "images", "strips", "transformer"])
def test_in_single_precision_neither(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a model that fails in double precision."""
    monkeypatch.setattr(verdict, "FIRST", torch.float32)
    make, data, *ways = KINDS[kind]
    monkeypatch.setitem(KINDS, kind, (lambda: make().float(), lambda samples: _single(data(samples)), *ways))
    assert run(kind)[0].precision == "float32"
    FAULTS["a_contribution_forgotten"][1](monkeypatch)
    with pytest.raises(DifferentModelError, match="another one than in one process"):
        run(kind)


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    """Its copy would compute with its own layers, and so would the ordinary one and the divided one."""
    model = nn.Sequential(nn.Linear(6, 3))
    vars(model)["score"] = lambda x: model[0](x)
    with pytest.raises(UsageError, match=r"Sequential cannot be copied: .* or give verify a function that makes the model"):
        run_ranks(2, lambda fabric: verify(model, "2x1", fabric=fabric, inputs=(vectors(SAMPLES),)))
