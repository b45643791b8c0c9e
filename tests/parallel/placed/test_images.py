"""What people write in models of images: each small model, divided in every way, is the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from tests.parallel.placed.training import CLASSES, Training, compare
from zmqtrain.errors import UsageError
from zmqtrain.parallel.communicator import Fabric
from zmqtrain.parallel.grid import Grid
from zmqtrain.parallel.placed import Placed
from zmqtrain.parallel.placed.model import parallelize
from zmqtrain.testing.threads import run_ranks

BATCH, CHANNELS, SIDE = 5, 6, 7


def images(height: int = SIDE, width: int = SIDE) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(BATCH, 3, height, width, generator=generator, dtype=torch.float64)


class Model(nn.Module):
    """A convolution, what is to be tested, another convolution, and a classifier of the mean."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor] | None = None, **own: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        for name, each in own.items():
            setattr(self, name, each)
        self.last = nn.Conv2d(CHANNELS, 8, 3, padding=1)
        self.head = nn.Linear(8, CLASSES)
        self._middle = middle

    def middle(self, h: Tensor) -> Tensor:
        assert self._middle is not None
        return self._middle(self, h)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.middle(self.first(x)))
        return self.head(h.tanh().mean((2, 3)))  # type: ignore[no-any-return]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(1 + 0.3 * torch.randn(shape))


def norm_of_last(self: Any, h: Tensor) -> Tensor:
    h = functional.layer_norm((h + self.places).permute(0, 2, 3, 1), (CHANNELS,), self.weight, self.bias)
    return (h * self.scale).permute(0, 3, 1, 2)


def excited(self: Any, h: Tensor) -> Tensor:
    return h * self.up(self.down(functional.adaptive_avg_pool2d(h, 1)).relu()).sigmoid()


def masked(self: Any, h: Tensor) -> Tensor:
    n, _, height, width = h.shape
    mask = (torch.arange(height * width).view(1, 1, height, width) + torch.arange(n).view(n, 1, 1, 1)) % 3 > 0
    return h * mask + h.mean(1, keepdim=True) * h[:, :1]


def unused_results(self: Any, h: Tensor) -> Tensor:
    h.add_(1)
    h.add_(self.scale)
    h[:, 0] = 0.5
    h[:, 1:3] += h[:, 3:5]
    h[:, :, -1] *= 2
    functional.relu(h, inplace=True)
    return h


def viewed(self: Any, h: Tensor) -> Tensor:
    n = h.size(0)
    flat = h.view(n * 2, -1)
    return (flat - flat.mean(1, keepdim=True)).view(n, -1).view(h.shape)


def branches(self: Any, h: Tensor) -> Tensor:
    if self.training:
        return h * 2
    return h.flip(2) if h.sum() > 0 else -h


def without_gradient(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        most = h.abs().amax((1, 2, 3), keepdim=True)
    return h / most + h.detach().mean() + self.scale * torch.no_grad()(torch.sin)(h)


def batch_norm_by_function(self: Any, h: Tensor) -> Tensor:
    return functional.batch_norm(h, None, None, training=True) + functional.batch_norm(h, None, None, self.weight, self.bias, True)


def of_all(self: Any, h: Tensor) -> Tensor:
    return h / h.std() + h / h.var((0, 2, 3), keepdim=True) - h.norm() / h.numel() + h.amax() * h.median()


def places(self: Any, h: Tensor) -> Tensor:
    n, _, height, width = h.shape
    rows = torch.arange(height, dtype=h.dtype, device=h.device).view(1, 1, -1, 1) / height
    grid = torch.linspace(-1, 1, width, dtype=h.dtype).expand(n, 1, height, width)
    return torch.cat([h[:, 2:] + rows, h.new_full((n, 1, height, width), 0.3), grid], 1)


def recomputed(self: Any, h: Tensor, *, reentrant: bool) -> Tensor:
    def part(h: Tensor) -> Tensor:
        return functional.dropout(self.norm(self.inner(h)).relu() * self.scale, 0.0, self.training)

    if not torch.is_grad_enabled():
        return part(h) + self.other(h)  # type: ignore[no-any-return]
    return checkpoint(part, h, use_reentrant=reentrant) + checkpoint(self.other, h, use_reentrant=reentrant)  # type: ignore[no-any-return]


def convolution(**settings: Any) -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, **({"padding": 1} | settings))


def through(*names: str) -> Callable[[Any, Tensor], Tensor]:
    """The model's own modules one after another."""

    def run(self: Any, h: Tensor) -> Tensor:
        for name in names:
            h = getattr(self, name)(h)
        return h

    return run


def one(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Model(through("module"), module=module())


def function(middle: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Model(lambda self, h: middle(h))


def elsewhere() -> nn.Module:
    """Weights outside their layers."""

    def middle(self: Any, h: Tensor) -> Tensor:
        h = h * self.first.weight.square().mean() + self.last.weight.std()
        h = h * self.head.weight.norm(dim=1).sum() + functional.conv2d(h, self.inner.weight.flip(2), padding=1)
        return h + torch.einsum("nchw,dc->ndhw", h, self.head.weight[:, :CHANNELS])[:, :1]

    return Model(middle, inner=convolution())


def hooked() -> nn.Module:
    """Hooks of modules that change inputs, outputs and gradients, and of tensors."""

    def middle(self: Any, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 1.5 + gradient.mean())
        return self.inner(h)  # type: ignore[no-any-return]

    model = Model(middle, inner=convolution())
    model.first.register_forward_hook(lambda module, inputs, output: output * 2 + module.weight.mean())
    model.inner.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    model.inner.register_full_backward_hook(lambda module, gradients, _: (gradients[0] * 0.5,))
    model.last.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 3,))
    return model


def normed(kind: str) -> nn.Module:
    """Layers whose weights are made of others before each forward."""
    model = Model(through("inner"), inner=convolution())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old functions are deprecated
        for layer in (model.first, model.inner, model.head):
            if kind == "weight_norm":
                nn.utils.weight_norm(layer)
            elif kind == "spectral_norm":
                nn.utils.spectral_norm(layer)
            elif kind == "pruned":
                prune.l1_unstructured(layer, "weight", 0.4)
            else:
                getattr(parametrizations, kind.rstrip("_"))(layer)
    return model


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2 - weight.mean()


def parametrized() -> nn.Module:
    model = Model(through("inner"), inner=convolution())
    for layer in (model.first, model.inner, model.head):
        parametrize.register_parametrization(layer, "weight", Doubled())
    return model


def two_names() -> nn.Module:
    """A module under two names, used under both."""
    inner = convolution()
    return Model(through("inner", "again"), inner=inner, again=inner)


def tied() -> nn.Module:
    model = Model(through("inner", "again"), inner=convolution(), again=convolution())
    model.again.weight = model.inner.weight
    return model


def low() -> nn.Module:
    """Strips of which some are empty, with an activation in place after them."""
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Hardswish(inplace=True)),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.ReLU6(inplace=True)),
        *(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)),
    )


def squeezed(kind: type[nn.Module], *norms: Callable[[], nn.Module], **settings: Any) -> nn.Module:
    """A convolution of sequences, or of volumes, made of the image."""
    dimensions = int(kind.__name__[-2])
    module = kind(CHANNELS, CHANNELS, 3, **settings)

    def middle(self: Any, h: Tensor) -> Tensor:
        there = h.flatten(2) if dimensions == 1 else torch.stack([h, h * 2, -h], 2)
        found = self.norms(self.inner(there))
        return found.flatten(2)[:, :, : h.shape[2] * h.shape[3]].reshape(h.shape)  # type: ignore[no-any-return]

    return Model(middle, inner=module, norms=nn.Sequential(*(each() for each in norms)))


resized = functional.interpolate
CASES: dict[str, Callable[[], nn.Module]] = {
    "scale": lambda: Model(lambda self, h: h * self.scale + self.shift, scale=parameter(), shift=parameter(1)),
    "layer_scale": lambda: Model(lambda self, h: h + self.scale * h.tanh(), scale=parameter(CHANNELS, 1, 1)),
    "places_and_layer_norm": lambda: Model(
        norm_of_last, places=parameter(1, CHANNELS, SIDE, SIDE), weight=parameter(CHANNELS), bias=parameter(CHANNELS),
        scale=parameter(CHANNELS),
    ),
    "weights_elsewhere": elsewhere,
    "view": lambda: Model(viewed),
    "hooks": hooked,
    "old_weight_norm": partial(normed, "weight_norm"),
    "old_spectral_norm": partial(normed, "spectral_norm"),
    "weight_norm": partial(normed, "weight_norm_"),
    "spectral_norm": partial(normed, "spectral_norm_"),
    "orthogonal": partial(normed, "orthogonal"),
    "pruned": partial(normed, "pruned"),
    "parametrized": parametrized,
    "two_names": two_names,
    "tied": tied,
    "branches": lambda: Model(branches),
    "no_grad": lambda: Model(without_gradient, scale=parameter()),
    "batch_norm": one(lambda: nn.BatchNorm2d(CHANNELS)),
    "batch_norm_without_weights": one(lambda: nn.BatchNorm2d(CHANNELS, affine=False, momentum=None)),
    "batch_norm_without_statistics": one(lambda: nn.BatchNorm2d(CHANNELS, track_running_stats=False)),
    "batch_norm_by_function": lambda: Model(batch_norm_by_function, weight=parameter(CHANNELS), bias=parameter(CHANNELS)),
    "across_samples": lambda: Model(lambda self, h: self.norm(self.inner(h.sort(0).values + h.flip(0))) * self.scale,
                                    inner=convolution(), norm=nn.BatchNorm2d(CHANNELS), scale=parameter(CHANNELS, 1, 1)),
    "of_all": lambda: Model(of_all),
    "instance_norm": one(lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True)),
    "instance_norm_plain": one(lambda: nn.InstanceNorm2d(CHANNELS)),
    "group_norm": one(lambda: nn.GroupNorm(3, CHANNELS)),
    "in_place": lambda: Model(unused_results, scale=parameter(CHANNELS, 1, 1)),
    "excited": lambda: Model(excited, down=nn.Conv2d(CHANNELS, 3, 1), up=nn.Conv2d(3, CHANNELS, 1)),
    "masked": lambda: Model(masked),
    "arange": lambda: Model(places),
    "checkpoint": lambda: Model(partial(recomputed, reentrant=False), inner=convolution(), other=convolution(),
                                norm=nn.BatchNorm2d(CHANNELS), scale=parameter(CHANNELS, 1, 1)),
    "reentrant_checkpoint": lambda: Model(partial(recomputed, reentrant=True), inner=convolution(), other=convolution(),
                                          norm=nn.BatchNorm2d(CHANNELS), scale=parameter(CHANNELS, 1, 1)),
    "low": low,
    "reflect": one(lambda: convolution(padding_mode="reflect")),
    "circular": one(lambda: convolution(padding_mode="circular")),
    "replicate": one(lambda: convolution(padding_mode="replicate")),
    "padded": function(lambda h: functional.pad(functional.pad(h, (1, 2, 3, 0), value=0.5), (2, 1, 0, 2), "reflect")),
    "cropped": function(lambda h: functional.pad(functional.pad(h, (-1, 2, -2, 0)), (0, 0, 2, 0, 1, 0))[:, :CHANNELS]),
    "dilation": one(lambda: convolution(padding=2, dilation=2)),
    "same": one(lambda: convolution(padding="same", dilation=2)),
    "area": function(lambda h: resized(h, (5, 4), mode="area")),
    "antialiased": function(lambda h: resized(h, (5, 4), mode="bilinear", antialias=True)),
    "pools": function(lambda h: functional.avg_pool2d(functional.max_pool2d(h, 3, 1, 1), 3, 2, 1, count_include_pad=False)),
    "adaptive_pools": function(lambda h: functional.adaptive_max_pool2d(functional.adaptive_avg_pool2d(h, (5, 6)), (4, 3))),
    "global_max": function(lambda h: h + functional.adaptive_max_pool2d(h.relu(), 1)),
    "mean_of_rows": function(lambda h: h - functional.adaptive_avg_pool2d(h, (1, None))),
    "transposed": one(lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, (3, 4), (2, 1), 1, (1, 0), dilation=(1, 2))),
    "strided": one(lambda: convolution(stride=(2, 3), padding=(2, 0))),
    "bicubic": function(lambda h: resized(h, scale_factor=1.5, mode="bicubic", align_corners=False)),
    "nearest": function(lambda h: resized(h, scale_factor=2)),
    "roll": function(lambda h: h.roll((1, -2), (2, 3))),
    "pixel_shuffle": function(lambda h: functional.pixel_unshuffle(functional.pixel_shuffle(torch.cat([h, h], 1), 2), 2)[:, ::2]),
    "unfold": function(lambda h: functional.fold(functional.unfold(h, 2), (SIDE, SIDE), 2)),
    "conv1d": partial(squeezed, nn.Conv1d, lambda: nn.BatchNorm1d(CHANNELS), lambda: nn.PReLU(CHANNELS), padding=1, stride=1),
    "conv1d_circular": partial(
        squeezed, nn.Conv1d, lambda: nn.GroupNorm(2, CHANNELS), padding=2, dilation=2, padding_mode="circular"
    ),
    "conv_transpose1d": partial(squeezed, nn.ConvTranspose1d, lambda: nn.AdaptiveAvgPool1d(SIDE * SIDE), stride=2),
    "conv3d_pools": partial(squeezed, nn.Conv3d, lambda: nn.MaxPool3d(3, 1, 1), lambda: nn.AvgPool3d(3, 1, 1), padding=1),
    "conv3d": partial(squeezed, nn.Conv3d, lambda: nn.BatchNorm3d(CHANNELS), nn.ReLU, padding=1),
    "conv3d_replicate": partial(
        squeezed, nn.Conv3d, lambda: nn.InstanceNorm3d(CHANNELS), padding=1, padding_mode="replicate", groups=2
    ),
}  # fmt: skip


PLANS, GRIDS = ("model", "domain", "batch", "mixed"), ("2x1", "2x2", "1x4", "3x1")
#: Each model by one plan that divides no images, or not all, and in strips of one kind; in all every plan on every grid.
COMBINATIONS = [
    (name, ("model", "mixed", "batch", "mixed")[number % 4], GRIDS[number // 4 % 4]) for number, name in enumerate(CASES)
]
#: By the height, the width, or both.
STRIPS = [
    (name, "both", "4x1") if number % 3 == 2 else (name, ("domain", "width")[number % 3], GRIDS[number // 3 % 4])
    for number, name in enumerate(CASES)
]


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With the same weights each time."""
    torch.manual_seed(1)
    return CASES[name]().to(dtype)


@pytest.mark.parametrize(("name", "plan", "grid"), [*COMBINATIONS, *STRIPS])
def test_models_of_images_equal_one_process(name: str, plan: str, grid: str) -> None:
    compare(lambda: made(name), Training(images(5 if name == "low" else SIDE)), plan, grid)


@pytest.mark.parametrize(("plan", "grid"), [("model", "2x1"), ("domain", "2x2"), ("batch", "3x1")])
@pytest.mark.parametrize("name", ["layer_scale", "batch_norm", "checkpoint"])
def test_gradients_of_several_backwards_add_up(name: str, plan: str, grid: str) -> None:
    compare(lambda: made(name), Training(images(), pieces=2), plan, grid)


class OfDictionary(nn.Module):
    """Takes a dictionary, and gives one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(lambda self, h: h)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        image, weight = given["image"], given["weight"]
        return {"scores": self.model(image * weight[:, None, None, None]) + weight[:, None]}["scores"]


@pytest.mark.parametrize(("plan", "grid"), [("model", "2x2"), ("domain", "3x1"), ("batch", "1x4"), ("mixed", "2x1")])
def test_dictionaries_of_inputs(plan: str, grid: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(1)
        return OfDictionary().double()

    compare(make, Training({"image": images(), "weight": torch.linspace(1, 2, BATCH, dtype=torch.float64)}), plan, grid)


@pytest.mark.parametrize(("plan", "grid"), [("model", "2x2"), ("domain", "2x2"), ("batch", "3x1"), ("mixed", "2x1")])
@pytest.mark.parametrize("name", ["layer_scale", "weights_elsewhere", "excited"])
def test_mixed_precision_equals_that_of_one_process(name: str, plan: str, grid: str) -> None:
    """To a few roundings of bfloat16, which has 8 bits."""

    def around() -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)

    training = Training(images().float(), around=around, relative=8 * 2.0**-8)
    compare(lambda: made(name, torch.float32), training, plan, grid)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
def test_compiled_models_are_refused() -> None:
    scripted = nn.Sequential(torch.jit.script(nn.Linear(3, 3)))

    def run(fabric: Fabric) -> None:
        model = Model(lambda self, h: h)
        model.last = torch.compile(model.last, backend="eager")  # type: ignore[assignment]
        with pytest.raises(UsageError, match="layer last is compiled"):
            parallelize(model, Grid(2, 1), fabric=fabric)
        with pytest.raises(UsageError, match=r"layer 0 is compiled \(torch.jit\)"):
            parallelize(scripted, Grid(2, 1), fabric=fabric)
        model = Model(lambda self, h: h)
        model.compile(backend="eager")
        with pytest.raises(UsageError, match=r"Model is compiled \(torch.compile\)"):
            parallelize(model, Grid(2, 1), fabric=fabric)

    run_ranks(2, run)


def test_a_forward_after_a_backward_that_failed() -> None:
    """Parameters are the process's own again."""

    def run(fabric: Fabric) -> None:
        parallel = parallelize(made("layer_scale"), Grid(2, 1), fabric=fabric)
        parallel.batch.size = BATCH
        output = parallel(images())
        fails = output.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        fails.remove()
        assert parallel(images()).shape == (BATCH, CLASSES)
        assert not any(isinstance(each, Placed) for each in parallel.parameters())

    run_ranks(2, run)
