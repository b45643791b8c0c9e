"""Ordinary loops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.embed.loops.loop import CLASSES, FEATURES, Loop
from tests.embed.loops.rows import row


@row("`zero_grad()`, forward, `backward()`, `step()`")
def ordinary(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()


@row("AdamW with two parameter groups")
def adam(loop: Loop) -> None:
    model = loop.build()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01, "weight_decay": 0.0}]
    model, optimizer = loop.replicate(model, torch.optim.AdamW(groups, lr=0.03))
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("`zero_grad()` after `step()`, or between forward and `backward()`; `model.zero_grad()`; `set_to_none=False`")
def zeroing(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        loss = cross_entropy(model(inputs), target)
        if number % 3 == 0:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 3 == 0:
            optimizer.zero_grad()
        elif number % 3 == 1:
            model.zero_grad()
        if number % 3 == 2:
            optimizer.zero_grad(set_to_none=False)


@row("never `zero_grad()`: gradients of all steps add up")
def never_zeroed(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("evaluation in mid-epoch")
def evaluation(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        model.eval()
        with torch.no_grad():
            loop.seen.append(float(loop.mean(cross_entropy(model(inputs), target))))
        model.train()
        loss.backward()
        optimizer.step()
        cross_entropy(model(inputs), target)  # with gradients enabled, and no backward


@row("submodules called one by one instead of the model")
def submodules(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model[2](model[1](model[0](inputs))), target).backward()
        optimizer.step()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Any:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


@row("weights that layers share")
def shared(loop: Loop) -> None:
    model, optimizer = loop.start(make=Shared)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("a model in bfloat16", dtype=torch.bfloat16, tolerance=0.05)
def brain_float(loop: Loop) -> None:
    ordinary(loop)
