"""torchvision's models with few blocks and narrow layers: their own forwards, on data for which a test takes little time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

_SEEDING = threading.Lock()
CLASSES = 5


if find_spec("torchvision") is None:
    pytest.skip("torchvision is not installed", allow_module_level=True)


class _Models:
    """`torchvision.models`, imported by the first test that makes one: every process of a run collects all tests."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torchvision.models"), name)


models = _Models()


def narrow(model: nn.Module, factor: int) -> nn.Module:
    """The model with a part of the channels of each layer, but for those of images and classes."""

    def part(width: int) -> int:
        return width if width in (3, CLASSES) else max(width // factor, 1)

    for name, module in list(model.named_modules()):
        made: nn.Module | None = None
        if isinstance(module, nn.Conv2d):
            groups = 1 if module.groups == 1 else part(module.groups)
            made = nn.Conv2d(part(module.in_channels), part(module.out_channels), module.kernel_size, module.stride, module.padding,
                             module.dilation, groups, module.bias is not None)  # fmt: skip
        elif isinstance(module, nn.BatchNorm2d):
            made = nn.BatchNorm2d(part(module.num_features), module.eps, module.momentum)
        elif isinstance(module, nn.Linear):
            made = nn.Linear(part(module.in_features), part(module.out_features), module.bias is not None)
        if made is not None:
            outer, _, own = name.rpartition(".")
            setattr(model.get_submodule(outer), own, made)
    return model


def _wide(make: Callable[[], nn.Module], factor: int = 8) -> nn.Module:
    with torch.device("meta"):
        model = make()
    return narrow(model, factor)


def _resnet18() -> nn.Module:
    block = models.resnet.BasicBlock
    return _wide(lambda: models.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES))


def _resnet50() -> nn.Module:
    block = models.resnet.Bottleneck
    return _wide(lambda: models.ResNet(block, [1, 2, 1, 1], num_classes=CLASSES), 16)


def _vgg11_bn() -> nn.Module:
    return _wide(lambda: models.vgg11_bn(num_classes=CLASSES, dropout=0.0), 16)


def _mobilenet() -> nn.Module:
    make = partial(models.mobilenetv3.InvertedResidualConfig, width_mult=1.0)
    # Input, kernel, expanded, output, squeeze-and-excitation, activation, stride, dilation.
    setting = [make(8, 3, 8, 8, True, "RE", 2, 1), make(8, 3, 18, 12, False, "RE", 2, 1), make(12, 5, 24, 12, True, "HS", 1, 1)]
    return models.MobileNetV3(setting, 16, num_classes=CLASSES, dropout=0.0)  # type: ignore[no-any-return]


def _regnet() -> nn.Module:
    parameters = models.regnet.BlockParams([1, 2], [8, 16], [4, 4], [1.0, 1.0], [2, 2], 0.25)
    return models.RegNet(parameters, num_classes=CLASSES, stem_width=8)  # type: ignore[no-any-return]


def _efficientnet(depth: float = 0.0) -> nn.Module:
    make = models.efficientnet.MBConvConfig
    setting = [make(1, 3, 1, 8, 8, 1), make(4, 3, 2, 8, 12, 2), make(4, 5, 2, 12, 12, 1)]
    return models.EfficientNet(setting, 0.0, depth, num_classes=CLASSES, last_channel=32)  # type: ignore[no-any-return]


def _convnext(depth: float = 0.0) -> nn.Module:
    make = models.convnext.CNBlockConfig
    setting = [make(8, 12, 1), make(12, 16, 2), make(16, None, 1)]
    return models.ConvNeXt(setting, depth, 0.5, num_classes=CLASSES)  # type: ignore[no-any-return]


def _swin(depth: float = 0.0) -> nn.Module:
    return models.SwinTransformer(  # type: ignore[no-any-return]
        [4, 4], 12, [2, 2], [3, 6], [3, 3], mlp_ratio=2.0, stochastic_depth_prob=depth, num_classes=CLASSES
    )


#: Name -> (model, height and width of its images).
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18": (_resnet18, 33),
    "resnet50": (_resnet50, 40),
    "alexnet": (lambda: _wide(lambda: models.AlexNet(CLASSES, dropout=0.0), 16), 67),
    "vgg11_bn": (_vgg11_bn, 32),
    "squeezenet1_1": (lambda: _wide(lambda: models.SqueezeNet("1_1", CLASSES, dropout=0.0), 4), 47),
    "shufflenet_v2_x0_5": (lambda: models.ShuffleNetV2([1, 2, 1], [8, 12, 16, 24, 32], CLASSES), 48),
    "googlenet": (lambda: _wide(lambda: models.GoogLeNet(CLASSES, True, init_weights=False, dropout=0.0, dropout_aux=0.0)), 64),
    "densenet121": (lambda: models.DenseNet(4, (2, 1, 2), 8, num_classes=CLASSES), 40),
    "densenet121_memory_efficient": (lambda: models.DenseNet(4, (2, 1, 1), 8, num_classes=CLASSES, memory_efficient=True), 40),
    "mobilenet_v3_small": (_mobilenet, 34),
    "regnet_y_400mf": (_regnet, 32),
    "efficientnet_b0": (_efficientnet, 32),
    "efficientnet_b0_stochastic": (partial(_efficientnet, 0.4), 32),
    "convnext_tiny": (_convnext, 36),
    "convnext_tiny_stochastic": (partial(_convnext, 0.4), 32),
    "vit_b_16": (lambda: models.VisionTransformer(24, 8, 2, 3, 12, 20, num_classes=CLASSES), 24),
    "swin_t": (_swin, 44),
    "swin_t_stochastic": (partial(_swin, 0.4), 40),
    "inception_v3": (lambda: _wide(lambda: models.Inception3(CLASSES, False, init_weights=False, dropout=0.0), 16), 107),
    "inception_v3_aux": (lambda: _wide(lambda: models.Inception3(CLASSES, True, init_weights=False, dropout=0.0), 16), 299),
}


def made(name: str) -> nn.Module:
    """The model with the same weights every time, in float64."""
    with _SEEDING:
        torch.manual_seed(1)
        model = MODELS[name][0]().double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images(name: str, samples: int) -> Tensor:
    """Data for it."""
    side = MODELS[name][1]
    return torch.randn(samples, 3, side, side, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
