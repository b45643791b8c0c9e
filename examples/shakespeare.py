"""Predict the next character of a text, with an LSTM or a small transformer.

    zmqtrain launch launch/shakespeare-lstm.toml --data FILE

FILE is any plain text (or a folder with ``shakespeare.txt``); the well-known one holds 1.1 MB of Shakespeare's plays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from zmqtrain import Task
from zmqtrain.errors import UsageError


def task(data: str, model: Literal["lstm", "transformer"] = "lstm", lr: float = 2e-3, width: int = 128, length: int = 64) -> Task:
    """``data`` is what ``--data`` or ZMQTRAIN_DATA says; the others come from ``[job] args``."""
    if model not in ("lstm", "transformer"):
        raise UsageError(f'[job] args: model = {model!r} is neither "lstm" nor "transformer"')
    text, characters = read(data)
    split = len(text) * 9 // 10
    return Task(
        model=lambda: Lstm(characters, width) if model == "lstm" else Transformer(characters, width, length),
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        train_data=Passages(text[:split], length),
        eval_data=Passages(text[split:], length),
        metrics={"accuracy": accuracy},
    )


def read(data: str) -> tuple[Tensor, int]:
    """The text as numbers of characters (int64, one dimension), and how many different characters there are."""
    file = Path(data, "shakespeare.txt") if Path(data).is_dir() else Path(data)
    if not file.exists():
        raise UsageError(f"there is no text {file}: --data must be a text file, or a folder that holds shakespeare.txt")
    text = file.read_text(encoding="utf-8")
    number = {character: index for index, character in enumerate(sorted(set(text)))}
    return torch.tensor([number[character] for character in text]), len(number)


class Passages(Dataset[tuple[Tensor, Tensor]]):
    """A text in passages of ``length`` characters; the target is the passage one character further on."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start, stop = index * self.length, (index + 1) * self.length
        return self.text[start:stop], self.text[start + 1 : stop + 1]


class Lstm(nn.Module):
    """Passages (N, length) to scores (N, length, characters)."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, 2 * width, batch_first=True)
        self.scores = nn.Linear(2 * width, characters)

    def forward(self, passages: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(passages))
        scores: Tensor = self.scores(states)
        return scores


class Transformer(nn.Module):
    """Two layers of causal self-attention. Passages (N, length) to scores (N, length, characters)."""

    def __init__(self, characters: int, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(torch.randn(length, width) / 50)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.scores = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, passages: Tensor) -> Tensor:
        states = self.layers(self.embedding(passages) + self.position, mask=self.mask, is_causal=True)
        scores: Tensor = self.scores(states)
        return scores


def loss(scores: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, the mean over all characters."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def accuracy(scores: Tensor, target: Tensor) -> Tensor:
    """The share of characters predicted rightly."""
    return (scores.argmax(-1) == target).float().mean()
