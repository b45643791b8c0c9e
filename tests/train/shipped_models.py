"""The models of the shipped profiles as torch modules, with the profiles' names. Written from their definitions, not from the
script that makes the profiles."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def chain(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def lenet() -> nn.Module:
    return chain(
        conv1=nn.Conv2d(1, 20, 5),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(20, 50, 5),
        pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        ip1=nn.Linear(800, 500),
        relu=nn.ReLU(),
        ip2=nn.Linear(500, 10),
    )


def cifarnet() -> nn.Module:
    return chain(
        conv1=nn.Conv2d(3, 32, 5, padding=2),
        pool1=nn.MaxPool2d(3, 2, ceil_mode=True),
        conv2=nn.Conv2d(32, 32, 5, padding=2),
        pool2=nn.AvgPool2d(3, 2, ceil_mode=True),
        conv3=nn.Conv2d(32, 64, 5, padding=2),
        pool3=nn.AvgPool2d(3, 2, ceil_mode=True),
        flat=nn.Flatten(),
        ip1=nn.Linear(1024, 64),
        ip2=nn.Linear(64, 10),
    )


def alexnet() -> nn.Module:
    return chain(
        conv1=nn.Conv2d(3, 96, 11, stride=4),
        pool1=nn.MaxPool2d(3, 2),
        norm1=nn.LocalResponseNorm(5),
        conv2=nn.Conv2d(96, 256, 5, padding=2, groups=2),
        pool2=nn.MaxPool2d(3, 2),
        norm2=nn.LocalResponseNorm(5),
        conv3=nn.Conv2d(256, 384, 3, padding=1),
        conv4=nn.Conv2d(384, 384, 3, padding=1, groups=2),
        conv5=nn.Conv2d(384, 256, 3, padding=1, groups=2),
        pool5=nn.MaxPool2d(3, 2),
        flat=nn.Flatten(),
        fc6=nn.Linear(9216, 4096),
        fc7=nn.Linear(4096, 4096),
        fc8=nn.Linear(4096, 1000),
    )


def vgg16() -> nn.Module:
    modules: dict[str, nn.Module] = {}
    channels = 3
    for stage, widths in enumerate(([64] * 2, [128] * 2, [256] * 3, [512] * 3, [512] * 3), start=1):
        for number, width in enumerate(widths, start=1):
            modules[f"conv{stage}_{number}"] = nn.Conv2d(channels, width, 3, padding=1)
            channels = width
        modules[f"pool{stage}"] = nn.MaxPool2d(2)
    head = {"flat": nn.Flatten(), "fc6": nn.Linear(25088, 4096), "fc7": nn.Linear(4096, 4096), "fc8": nn.Linear(4096, 1000)}
    return chain(**modules, **head)


class Inception(nn.Module):
    """Hangs its layers into the parent, whose names they carry."""

    def __init__(self, parent: nn.Module, name: str, inputs: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, pooled = widths
        self.parts: list[Callable[[Tensor], Tensor]] = []
        for branch in (
            {"1x1": nn.Conv2d(inputs, one, 1)},
            {"3x3_reduce": nn.Conv2d(inputs, reduce3, 1), "3x3": nn.Conv2d(reduce3, three, 3, padding=1)},
            {"5x5_reduce": nn.Conv2d(inputs, reduce5, 1), "5x5": nn.Conv2d(reduce5, five, 5, padding=2)},
            {"pool": nn.MaxPool2d(3, 1, 1), "pool_proj": nn.Conv2d(inputs, pooled, 1)},
        ):
            for part, module in branch.items():
                parent.add_module(f"inception_{name}/{part}", module)
            self.parts.append(nn.Sequential(*branch.values()))
        self.outputs = one + three + five + pooled

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


class GoogLeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[Tensor], Tensor]] = []
        self.step("conv1/7x7_s2", nn.Conv2d(3, 64, 7, 2, 3))
        self.step("pool1/3x3_s2", nn.MaxPool2d(3, 2, ceil_mode=True))
        self.step("pool1/norm1", nn.LocalResponseNorm(5))
        self.step("conv2/3x3_reduce", nn.Conv2d(64, 64, 1))
        self.step("conv2/3x3", nn.Conv2d(64, 192, 3, padding=1))
        self.step("conv2/norm2", nn.LocalResponseNorm(5))
        self.step("pool2/3x3_s2", nn.MaxPool2d(3, 2, ceil_mode=True))
        channels = 192
        for name, widths in {
            "3a": (64, 96, 128, 16, 32, 32),
            "3b": (128, 128, 192, 32, 96, 64),
            "4a": (192, 96, 208, 16, 48, 64),
            "4b": (160, 112, 224, 24, 64, 64),
            "4c": (128, 128, 256, 24, 64, 64),
            "4d": (112, 144, 288, 32, 64, 64),
            "4e": (256, 160, 320, 32, 128, 128),
            "5a": (256, 160, 320, 32, 128, 128),
            "5b": (384, 192, 384, 48, 128, 128),
        }.items():
            if name in ("4a", "5a"):
                self.step(f"pool{int(name[0]) - 1}/3x3_s2", nn.MaxPool2d(3, 2, ceil_mode=True))
            inception = Inception(self, name, channels, widths)
            self.steps.append(inception)
            channels = inception.outputs
        self.step("pool5/7x7_s1", nn.AvgPool2d(7, 1))
        self.steps.append(nn.Flatten())
        self.step("loss3/classifier", nn.Linear(1024, 1000))

    def step(self, name: str, module: nn.Module) -> None:
        self.add_module(name, module)
        self.steps.append(module)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = None
        if inputs != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        y = self.bn3(self.conv3(functional.relu(y)))
        return functional.relu(y + (x if self.downsample is None else self.downsample(x)))


def resnet50() -> nn.Module:
    model = chain(
        conv1=nn.Conv2d(3, 64, 7, 2, 3, bias=False), bn1=nn.BatchNorm2d(64), relu=nn.ReLU(), maxpool=nn.MaxPool2d(3, 2, 1)
    )
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        layer = nn.Sequential()
        for block in range(blocks):
            layer.append(Bottleneck(inputs, width, 2 if stage > 1 and block == 0 else 1))
            inputs = 4 * width
        model.add_module(f"layer{stage}", layer)
    model.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
    model.add_module("flat", nn.Flatten())
    model.add_module("fc", nn.Linear(2048, 1000))
    return model


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(65, 512)
        self.lstm1 = nn.LSTM(512, 512, batch_first=True)
        self.lstm2 = nn.LSTM(512, 512, batch_first=True)
        self.scores = nn.Linear(512, 65)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.lstm2(self.lstm1(self.embedding(x))[0])[0])
        return scores


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(768, 3 * 768)
        self.c_proj = nn.Linear(768, 768)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(2, (12, 64)).transpose(1, 2) for part in self.c_attn(x).split(768, 2))
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(768), Attention(), nn.LayerNorm(768)
        self.mlp = chain(c_fc=nn.Linear(768, 3072), gelu=nn.GELU(), c_proj=nn.Linear(3072, 768))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50257, 768), nn.Embedding(1024, 768)
        self.h = nn.Sequential(*(Block() for _ in range(12)))
        self.ln_f = nn.LayerNorm(768)
        self.lm_head = nn.Linear(768, 50257, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.wte(x) + self.wpe(torch.arange(1024, device=x.device))
        scores: Tensor = self.lm_head(self.ln_f(self.h(y)))
        return scores


#: By the profile's name: the model, and the shape of a sample (of whole numbers, where it has one dimension).
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lenet, (1, 28, 28)),
    "cifarnet": (cifarnet, (3, 32, 32)),
    "alexnet": (alexnet, (3, 227, 227)),
    "vgg16": (vgg16, (3, 224, 224)),
    "googlenet": (GoogLeNet, (3, 224, 224)),
    "resnet50": (resnet50, (3, 224, 224)),
    "lstm": (Lstm, (64,)),
    "transformer": (Transformer, (1024,)),
}
