"""Models that benchmarks train: as they are commonly written, for 1,000 classes, of 224x224 images or of sequences."""

from __future__ import annotations

from torch import Tensor, nn

#: The transformer's: tokens of a sample, and features of a token.
SEQUENCE, WIDTH = 64, 512


def alexnet() -> nn.Sequential:
    """AlexNet in one piece (Krizhevsky 2014): 61 million parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        *_head(256 * 6 * 6),
    )


def vgg16() -> nn.Sequential:
    """VGG-16 (Simonyan and Zisserman 2014): 138 million parameters."""
    return _vgg((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))


def transformer() -> nn.Sequential:
    """A small transformer (Vaswani et al. 2017), over sequences of features: 13 million parameters."""
    layers = [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, WIDTH)), nn.Flatten(), nn.Linear(WIDTH, 1000))


def cifarnet() -> nn.Sequential:
    """The shape of Caffe's CIFARNet, as `examples/cifar10.py` has it: 145,578 parameters, for images of 32x32 and 10 classes."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


def _vgg(*blocks: tuple[int, int]) -> nn.Sequential:
    """``blocks``: convolutions before each pool, and their channels."""
    layers: list[nn.Module] = []
    channels = 3
    for count, width in blocks:
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *_head(512 * 7 * 7))


def _head(features: int) -> list[nn.Module]:
    """Without dropout, so that runs can be compared."""
    return [
        nn.Flatten(),
        nn.Linear(features, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 1000),
    ]


class _Residual(nn.Module):
    """A block of ResNet-18: two convolutions, and what they are given besides."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.project = (
            nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)) if before != after else None
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x if self.project is None else self.project(x)
        return self.relu(out)  # type: ignore[no-any-return]


def resnet18() -> nn.Sequential:
    """ResNet-18 (He et al. 2015): 12 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [_Residual(channels, width, 1 if width == 64 else 2), _Residual(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def vgg11() -> nn.Sequential:
    """VGG-11 (Simonyan and Zisserman 2014): 133 million parameters."""
    return _vgg((1, 64), (1, 128), (2, 256), (2, 512), (2, 512))


def perceptron() -> nn.Sequential:
    """Large linear layers: 29 million parameters."""
    return nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))
