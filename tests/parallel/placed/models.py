"""Small models of every kind, with the data that they take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.parallel.turns import turn


def alexnet() -> nn.Module:
    """All layers of AlexNet, narrow."""
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, 6, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(3),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(6, 8, 5, padding=2, groups=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(8, 9, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(9, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        ),
        nn.Flatten(),
        nn.Sequential(
            nn.Dropout(0.3), nn.Linear(8 * 2 * 2, 14), nn.ReLU(), nn.Dropout(0.3), nn.Linear(14, 12), nn.ReLU(), nn.Linear(12, 5)
        ),
    )


class Block(nn.Module):
    """A residual block, with a projection where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.project = nn.Conv2d(before, after, 1, stride=stride, bias=False) if stride > 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.first(x)))
        out = self.norm2(self.second(out))
        out += x if self.project is None else self.project(x)
        return out.relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 6, 2), Block(6, 6, 1))
        self.classifier = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.stem(x)))
        x = functional.adaptive_avg_pool2d(x, 1)
        return self.classifier(x.view(x.size(0), -1))  # type: ignore[no-any-return]


class Vgg(nn.Module):
    """Blocks whose forward a user has written with functions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.c, self.d = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.classifier = nn.Linear(4 * 3 * 3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.b(functional.relu(self.a(x)))), 2)
        side = functional.relu(self.c(x))
        x = functional.avg_pool2d(torch.cat([self.d(side), x[:, :2]], 1), 2)[:, 1:5]
        return self.classifier(torch.flatten(x, 1))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 12)
        self.places = nn.Parameter(torch.randn(7, 12))
        layer = nn.TransformerEncoderLayer(12, 4, 20, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.encoder(self.words(words) + self.places))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 10, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(10, 5)

    def forward(self, words: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.words(words))
        return self.head(outputs[:, -1])  # type: ignore[no-any-return]


def images(side: int) -> Callable[[int], Tensor]:
    return lambda samples: torch.randn(samples, 3, side, side, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def words(samples: int) -> Tensor:
    return torch.randint(11, (samples, 7), generator=torch.Generator().manual_seed(3))


#: Name -> (model, data).
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "alexnet": (alexnet, images(95)),
    "resnet": (ResNet, images(12)),
    "vgg": (Vgg, images(12)),
    "transformer": (Transformer, words),
    "lstm": (Recurrent, words),
}


def made(name: str, dtype: torch.dtype = torch.float64, *, dropout: bool = True) -> nn.Module:
    """The model with the same weights every time. From any thread."""
    with turn():
        torch.manual_seed(1)
        model = MODELS[name][0]().to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, nn.LSTM | nn.MultiheadAttention):
                module.dropout = 0.0
    return model
