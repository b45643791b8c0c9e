"""AlexNet's layers, in the variants that arise from different readings of the paper, by names such as ``alexnet-grouped-224``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Literal

from zmqtrain.errors import UsageError
from zmqtrain.plan.layers import LayerShape
from zmqtrain.topology.suggest import did_you_mean

Image = Literal["227", "224", "224-padded"]
#: The image sizes of the variants, which the first convolution treats differently.
IMAGES: tuple[Image, ...] = ("227", "224", "224-padded")


@dataclass(frozen=True, slots=True)
class Alexnet:
    """A variant of AlexNet. Krizhevsky's had two groups of channels, and images of 224 that fit only as 227, or padded."""

    image: Image = "227"
    """``227``: no padding in the first convolution, 55 rows. ``224``: the same, 54 rows. ``224-padded``: padded so that every layer
    divides its rows by its stride (56 rows, then 28, 14, 7)."""
    grouped: bool = False
    """Whether convolutions 2, 4 and 5 see one half of the channels each."""

    @property
    def name(self) -> str:
        """The name in a topology file."""
        return "alexnet" + "-grouped" * self.grouped + (f"-{self.image}" if self.image != "227" else "")

    def layers(self, *, biases: bool = False) -> tuple[LayerShape, ...]:
        """Convolutions and fully connected layers with the pools between them."""
        size = 224 if self.image != "227" else 227
        groups = 2 if self.grouped else 1
        padded = self.image == "224-padded"
        found: list[LayerShape] = []

        def conv(name: str, channels: int, rows: int, out: int, kernel: int, stride: int, groups: int) -> int:
            after = -(-rows // stride) if padded or stride == 1 else (rows - kernel) // stride + 1
            weights = out * (channels // groups) * kernel * kernel
            padding = kernel // 2 if padded or stride == 1 else 0
            found.append(
                LayerShape(
                    name,
                    "conv",
                    (channels, rows, rows),
                    (out, after, after),
                    weights + out * biases,
                    kernel=(kernel, kernel),
                    stride=(stride, stride),
                    padding=(padding, padding),
                    flops=2 * weights * after * after,
                )
            )
            return after

        def pool(name: str, channels: int, rows: int) -> int:
            after = rows // 2 if padded else (rows - 3) // 2 + 1
            found.append(LayerShape(name, "pool", (channels, rows, rows), (channels, after, after), kernel=(3, 3), stride=(2, 2)))
            return after

        def linear(name: str, inputs: int, out: int) -> None:
            found.append(LayerShape(name, "linear", (inputs,), (out,), inputs * out + out * biases, flops=2 * inputs * out))

        rows = pool("pool1", 96, conv("conv1", 3, size, 96, 11, 4, 1))
        rows = pool("pool2", 256, conv("conv2", 96, rows, 256, 5, 1, groups))
        conv("conv3", 256, rows, 384, 3, 1, 1)
        conv("conv4", 384, rows, 384, 3, 1, groups)
        conv("conv5", 384, rows, 256, 3, 1, groups)
        rows = pool("pool5", 256, rows)
        linear("fc6", 256 * rows * rows, 4096)
        linear("fc7", 4096, 4096)
        linear("fc8", 4096, 1000)
        return tuple(found)


TABLES = {table.name: table for table in itertools.starmap(Alexnet, itertools.product(IMAGES, (False, True)))}


def shipped_table(name: str) -> Alexnet:
    """The table with this name. Raises `UsageError`."""
    if name in TABLES:
        return TABLES[name]
    meant = did_you_mean(name, TABLES)
    hint = f"; did you mean {meant!r}?" if meant else ""
    raise UsageError(f"[plan] layers = {name!r}: there is no such table of layers; choose one of {', '.join(sorted(TABLES))}{hint}")


def before_pooling(layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """The same layers, with activations counted before pooling: d_i is a layer's output and the next layer's input."""
    found: list[LayerShape] = []
    for layer in layers:
        if layer.kind == "pool":
            found.append(replace(layer, outputs=layer.inputs))
        elif found:
            found.append(replace(layer, inputs=found[-1].outputs))
        else:
            found.append(layer)
    return tuple(found)
