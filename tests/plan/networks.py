"""Small networks whose figures can be worked out by hand, and AlexNet."""

from __future__ import annotations

from zmqtrain.plan.layers import LayerShape, Stage, stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.shipped import Alexnet

#: 2 us and 6 GB/s, as in the paper's study.
LINK = Link(2e-6, 1 / 6e9, 1 / 20e9)


def alexnet() -> tuple[Stage, ...]:
    return stages(Alexnet().layers())


def linear(name: str, inputs: int, outputs: int) -> LayerShape:
    return LayerShape(name, "linear", (inputs,), (outputs,), inputs * outputs, flops=2 * inputs * outputs)


def conv(name: str, channels: int, out: int, rows: int, kernel: int = 3) -> LayerShape:
    """Padded, so that the image keeps its size."""
    weights = out * channels * kernel * kernel
    shape = (channels, rows, rows), (out, rows, rows)
    pad = (kernel // 2, kernel // 2)
    return LayerShape(name, "conv", *shape, weights, kernel=(kernel, kernel), padding=pad, flops=2 * weights * rows * rows)


def small() -> tuple[Stage, ...]:
    """Two convolutions with a pool, and two fully connected layers: small enough to try all plans."""
    pool = LayerShape("pool", "pool", (8, 8, 8), (8, 4, 4), kernel=(2, 2), stride=(2, 2))
    layers = [conv("conv1", 3, 8, 8, 5), pool, conv("conv2", 8, 8, 4), linear("fc1", 128, 64), linear("fc2", 64, 10)]
    return stages(layers)
