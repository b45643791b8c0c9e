"""Models that benchmarks train: as they are commonly written, for 1,000 classes, of 224x224 images or of sequences."""

from __future__ import annotations

from torch import nn

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
    layers: list[nn.Module] = []
    channels = 3
    for count, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *_head(512 * 7 * 7))


def transformer() -> nn.Sequential:
    """A small transformer (Vaswani et al. 2017), over sequences of features: 13 million parameters."""
    layers = [nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, WIDTH)), nn.Flatten(), nn.Linear(WIDTH, 1000))


def lenet() -> nn.Sequential:
    """The LeNet of Caffe's MNIST example (LeCun et al. 1998): 431,080 parameters, for images of 28x28 and 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def cifarnet() -> nn.Sequential:
    """The shape of Caffe's CIFARNet, as `examples/cifar10.py` has it: 145,578 parameters, for images of 32x32 and 10 classes."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10))


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
