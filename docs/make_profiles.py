"""Writes the shipped profiles, zmqtrain/train/profiles/*.json: ``make docs``. A test compares the two.

A model is described by its layers; parameters, arithmetic and the size of each layer's output follow. A layer takes as long as its
arithmetic or its memory traffic does on a nominal device, whichever is longer, and a while to be launched. Where somebody has
measured a step, all times are scaled so that the step takes what was measured. So the sums are as good as their source; how a sum
is divided between the layers is a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "zmqtrain" / "train" / "profiles"
ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Device:
    """How much of what it could do at best a device does."""

    name: str
    flops: float
    bandwidth: float  # bytes/s
    share: float = 0.75
    launch_s: float = 10e-6

    def seconds(self, flops: float, nbytes: float) -> float:
        return self.launch_s + max(flops / self.flops, nbytes / self.bandwidth) / self.share


P100 = Device("P100", 10.6e12, 732e9)
K40 = Device("K40", 5.0e12, 288e9)


@dataclass(frozen=True)
class Row:
    """A layer: sizes and arithmetic of the forward, of one sample."""

    name: str
    numel: int
    flops: int
    output: int
    traffic: int  # elements read and written
    first: bool = False  # no gradient of its input is needed


@dataclass
class Net:
    """Layers in the order of the forward. ``shape`` is that of one sample's output so far."""

    shape: tuple[int, ...]
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, numel: int, flops: int, shape: tuple[int, ...], *, relu: bool = False, more: int = 0) -> None:
        """``more``: elements that are read or written beside the input and the output."""
        before, after = math.prod(self.shape), math.prod(shape)
        traffic = before + after * (3 if relu else 1) + more
        self.rows.append(Row(name, numel, flops, after, traffic, not self.rows))
        self.shape = shape

    def conv(
        self,
        name: str,
        out: int,
        kernel: int,
        stride: int = 1,
        pad: int = 0,
        *,
        groups: int = 1,
        bias: bool = True,
        relu: bool = True,
    ) -> None:
        channels, height, width = self.shape
        high, wide = ((size + 2 * pad - kernel) // stride + 1 for size in (height, width))
        weights = out * (channels // groups) * kernel * kernel
        self.add(name, weights + out * bias, 2 * weights * high * wide, (out, high, wide), relu=relu)

    def pool(self, name: str, kernel: int, stride: int, pad: int = 0, *, ceil: bool = True) -> None:
        channels, height, width = self.shape
        rounded: Callable[[float], int] = math.ceil if ceil else math.floor
        high, wide = (rounded((size + 2 * pad - kernel) / stride) + 1 for size in (height, width))
        self.add(name, 0, channels * high * wide * kernel * kernel, (channels, high, wide))

    def elementwise(self, name: str, flops: int) -> None:
        """So much arithmetic for each element."""
        self.add(name, 0, flops * math.prod(self.shape), self.shape)

    def batch_norm(self, name: str, *, relu: bool = True, residual: bool = False) -> None:
        """``residual``: another output of this shape is added."""
        numel = math.prod(self.shape)
        self.add(name, 2 * self.shape[0], 8 * numel, self.shape, relu=relu, more=numel * (2 if residual else 1))

    def dense(self, name: str, out: int, *, relu: bool = False, bias: bool = True) -> None:
        """Over the last dimension of a sequence, or over all of an image."""
        *rest, inputs = self.shape if len(self.shape) < 3 else (math.prod(self.shape),)
        weights = inputs * out
        self.add(name, weights + out * bias, 2 * weights * math.prod(rest), (*rest, out), relu=relu)


@dataclass(frozen=True)
class Model:
    """A profile to be written."""

    net: Net
    batch_size: int
    samples: int
    device: Device
    source: str
    step_s: float | None = None
    """Measured, forward and backward, and the update where ``with_update``."""
    forward_s: float | None = None
    backward_s: float | None = None
    with_update: bool = False

    def profile(self, name: str) -> dict[str, Any]:
        rows, device = self.net.rows, self.device
        times = [(self._seconds(row, 1), self._seconds(row, 1 if row.first else 2)) for row in rows]
        # Momentum: gradient, momentum and parameter are read, the last two written.
        update_s = device.seconds(0, 5 * ITEM * sum(row.numel for row in rows))
        forward_s, backward_s = (sum(column) for column in zip(*times, strict=True))
        scales = [1.0, 1.0]
        if self.step_s is not None:
            step_s = self.step_s - update_s * self.with_update
            scales = [step_s / (forward_s + backward_s)] * 2
        elif self.forward_s is not None and self.backward_s is not None:
            scales = [self.forward_s / forward_s, self.backward_s / backward_s]
        layers = [
            {
                "name": row.name,
                "numel": row.numel,
                "forward_s": _short(forward * scales[0]),
                "backward_s": _short(backward * scales[1]),
                "flops_forward": row.flops,
                "activation_numel": row.output,
            }
            for row, (forward, backward) in zip(rows, times, strict=True)
        ]
        return {
            "name": name,
            "source": self.source,
            "batch_size": self.batch_size,
            "samples": self.samples,
            "update_s": _short(update_s),
            "layers": layers,
        }

    def _seconds(self, row: Row, passes: int) -> float:
        """The backward is two such passes: for the gradients of the parameters, and of the input."""
        nbytes = ITEM * (row.traffic * self.batch_size + row.numel)
        return self.device.seconds(passes * row.flops * self.batch_size, passes * nbytes)


def nominal(device: Device, what: str) -> str:
    """The source of times that nobody has measured."""
    return (
        f"{what}. Times are nominal, not measured: a device like a {device.name} at {device.share:.0%} of its "
        f"{device.flops / 1e12:g} TFLOP/s and {device.bandwidth / 1e9:g} GB/s, {device.launch_s * 1e6:g} us to launch a layer"
    )


def lenet() -> Model:
    net = Net((1, 28, 28))
    net.conv("conv1", 20, 5, relu=False)
    net.pool("pool1", 2, 2)
    net.conv("conv2", 50, 5, relu=False)
    net.pool("pool2", 2, 2)
    net.dense("ip1", 500, relu=True)
    net.dense("ip2", 10)
    return Model(net, 64, 60_000, P100, nominal(P100, "LeNet as in Caffe's example lenet_train_test"))


def cifarnet() -> Model:
    net = Net((3, 32, 32))
    for number, out in enumerate((32, 32, 64), start=1):
        net.conv(f"conv{number}", out, 5, pad=2)
        net.pool(f"pool{number}", 3, 2)
    net.dense("ip1", 64)
    net.dense("ip2", 10)
    return Model(net, 100, 50_000, P100, nominal(P100, "CIFARNet as in Caffe's example cifar10_quick_train_test"))


def alexnet() -> Model:
    net = Net((3, 227, 227))
    net.conv("conv1", 96, 11, 4)
    net.pool("pool1", 3, 2)
    net.elementwise("norm1", 12)
    net.conv("conv2", 256, 5, pad=2, groups=2)
    net.pool("pool2", 3, 2)
    net.elementwise("norm2", 12)
    net.conv("conv3", 384, 3, pad=1)
    net.conv("conv4", 384, 3, pad=1, groups=2)
    net.conv("conv5", 256, 3, pad=1, groups=2)
    net.pool("pool5", 3, 2)
    net.dense("fc6", 4096, relu=True)
    net.dense("fc7", 4096, relu=True)
    net.dense("fc8", 1000)
    source = (
        "AlexNet with two groups as in Caffe's bvlc_reference_caffenet (CaffeNet). Measured: 26.5 s for 20 steps of 256 images, "
        "update included, on a K40 without ECC at its highest clock (Caffe, docs/performance_hardware.md); divided between forward "
        "and backward, and between the layers, by a model"
    )
    return Model(net, 256, 1_281_167, K40, source, step_s=26.5 / 20, with_update=True)


def vgg16() -> Model:
    net = Net((3, 224, 224))
    for stage, (convolutions, out) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), start=1):
        for number in range(1, convolutions + 1):
            net.conv(f"conv{stage}_{number}", out, 3, pad=1)
        net.pool(f"pool{stage}", 2, 2)
    net.dense("fc6", 4096, relu=True)
    net.dense("fc7", 4096, relu=True)
    net.dense("fc8", 1000)
    return Model(net, 32, 1_281_167, P100, nominal(P100, "VGG-16 (configuration D)"))


def googlenet() -> Model:
    net = Net((3, 224, 224))
    net.conv("conv1/7x7_s2", 64, 7, 2, 3)
    net.pool("pool1/3x3_s2", 3, 2)
    net.elementwise("pool1/norm1", 12)
    net.conv("conv2/3x3_reduce", 64, 1)
    net.conv("conv2/3x3", 192, 3, pad=1)
    net.elementwise("conv2/norm2", 12)
    net.pool("pool2/3x3_s2", 3, 2)
    _inception(net, "3a", 64, 96, 128, 16, 32, 32)
    _inception(net, "3b", 128, 128, 192, 32, 96, 64)
    net.pool("pool3/3x3_s2", 3, 2)
    _inception(net, "4a", 192, 96, 208, 16, 48, 64)
    _inception(net, "4b", 160, 112, 224, 24, 64, 64)
    _inception(net, "4c", 128, 128, 256, 24, 64, 64)
    _inception(net, "4d", 112, 144, 288, 32, 64, 64)
    _inception(net, "4e", 256, 160, 320, 32, 128, 128)
    net.pool("pool4/3x3_s2", 3, 2)
    _inception(net, "5a", 256, 160, 320, 32, 128, 128)
    _inception(net, "5b", 384, 192, 384, 48, 128, 128)
    net.pool("pool5/7x7_s1", 7, 1)
    net.dense("loss3/classifier", 1000)
    source = (
        "GoogLeNet as in Caffe's bvlc_googlenet, without its auxiliary heads. Measured: forward 562.841 ms and backward 1123.84 ms "
        "of 128 images, on a K40c with cuDNN (Caffe, models/bvlc_googlenet/readme.md, which does not say whether with auxiliary "
        "heads); divided between the layers by a model"
    )
    return Model(net, 128, 1_281_167, K40, source, forward_s=0.562841, backward_s=1.12384)


def _inception(net: Net, name: str, one: int, reduce3: int, three: int, reduce5: int, five: int, pooled: int) -> None:
    name, shape = f"inception_{name}", net.shape
    net.conv(f"{name}/1x1", one, 1)
    net.shape = shape
    net.conv(f"{name}/3x3_reduce", reduce3, 1)
    net.conv(f"{name}/3x3", three, 3, pad=1)
    net.shape = shape
    net.conv(f"{name}/5x5_reduce", reduce5, 1)
    net.conv(f"{name}/5x5", five, 5, pad=2)
    net.shape = shape
    net.pool(f"{name}/pool", 3, 1, 1)
    net.conv(f"{name}/pool_proj", pooled, 1)
    net.shape = (one + three + five + pooled, *shape[1:])


def resnet50() -> Model:
    net = Net((3, 224, 224))
    net.conv("conv1", 64, 7, 2, 3, bias=False, relu=False)
    net.batch_norm("bn1")
    net.pool("maxpool", 3, 2, 1, ceil=False)
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            _bottleneck(net, f"layer{stage}.{block}", width, stride=2 if stage > 1 and block == 0 else 1, project=block == 0)
    net.pool("avgpool", 7, 1)
    net.dense("fc", 1000)
    source = (
        "ResNet-50 with names and strides as in torchvision. Measured: 96 ms a step of 32 images on a P100 (Daily et al. 2018, "
        "GossipGraD); divided between forward and backward, and between the layers, by a model"
    )
    return Model(net, 32, 1_281_167, P100, source, step_s=0.096)


def _bottleneck(net: Net, name: str, width: int, *, stride: int, project: bool) -> None:
    shape = net.shape
    net.conv(f"{name}.conv1", width, 1, bias=False, relu=False)
    net.batch_norm(f"{name}.bn1")
    net.conv(f"{name}.conv2", width, 3, stride, 1, bias=False, relu=False)
    net.batch_norm(f"{name}.bn2")
    net.conv(f"{name}.conv3", 4 * width, 1, bias=False, relu=False)
    net.batch_norm(f"{name}.bn3", relu=not project, residual=not project)
    if project:
        net.shape = shape
        net.conv(f"{name}.downsample.0", 4 * width, 1, stride, bias=False, relu=False)
        net.batch_norm(f"{name}.downsample.1", residual=True)


def lstm() -> Model:
    characters, width, length, layers = 65, 512, 64, 2
    net = Net((length,))
    net.add("embedding", characters * width, 0, (length, width))
    for layer in range(1, layers + 1):
        weights = 4 * width * (width + width)
        # Weights are read anew for each character; gates and states are kept for the backward.
        net.add(
            f"lstm{layer}",
            weights + 8 * width,
            (2 * weights + 30 * width) * length,
            (length, width),
            more=6 * width * length,
        )
    net.dense("scores", characters)
    what = f"LSTM over characters: {layers} layers of {width}, {characters} characters, passages of {length}"
    return Model(net, 32, 15_685, P100, nominal(P100, what))


def transformer() -> Model:
    words, width, length, heads, blocks = 50_257, 768, 1024, 12, 12
    net = Net((length,))
    net.add("wte", words * width, 0, (length, width))
    net.add("wpe", length * width, length * width, (length, width))
    for block in range(blocks):
        name = f"h.{block}"
        _layer_norm(net, f"{name}.ln_1")
        net.dense(f"{name}.attn.c_attn", 3 * width)
        scores = heads * length * length
        net.add(f"{name}.attn", 0, 4 * length * length * width + 8 * scores, (length, width), more=4 * scores)
        net.dense(f"{name}.attn.c_proj", width)
        _layer_norm(net, f"{name}.ln_2")
        net.dense(f"{name}.mlp.c_fc", 4 * width, relu=True)
        net.dense(f"{name}.mlp.c_proj", width)
    _layer_norm(net, "ln_f")
    net.add("lm_head", 0, 2 * width * words * length, (length, words), more=words * width)
    what = (
        f"GPT-2 small: {blocks} blocks of width {width} with {heads} heads, {words} words, {length} of them a sample; the head is "
        "the embedding's transpose"
    )
    return Model(net, 8, 1 << 23, P100, nominal(P100, what))


def _layer_norm(net: Net, name: str) -> None:
    length, width = net.shape
    net.add(name, 2 * width, 8 * length * width, net.shape, more=length * width)


MODELS: Sequence[Callable[[], Model]] = (lenet, cifarnet, alexnet, vgg16, googlenet, resnet50, lstm, transformer)


def documents() -> dict[str, str]:
    """The content of each file, by name."""
    return {f"{make.__name__}.json": _written(make().profile(make.__name__)) for make in MODELS}


def _written(profile: dict[str, Any]) -> str:
    """JSON with a line for each layer."""
    head = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in profile.items() if key != "layers"]
    layers = ",\n".join(f"  {json.dumps(layer)}" for layer in profile["layers"])
    return "{" + "\n ".join(head) + f'\n "layers": [\n{layers}\n]}}\n'


def _short(seconds: float) -> float:
    """To five digits."""
    return float(f"{seconds:.5g}")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, document in documents().items():
        (FOLDER / name).write_text(document)
