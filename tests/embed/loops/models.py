"""Models and losses."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.embed.loops.loop import BUILDING, SHARE, Loop, sgd
from tests.embed.loops.rows import row

# Models.


@row("activation checkpointing, `use_reentrant=False`")
def checkpointed(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], inputs, use_reentrant=False)
        cross_entropy(model[2](hidden), target).backward()
        optimizer.step()


@row("activation checkpointing, `use_reentrant=True`")
def checkpointed_reentrant(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        hidden = checkpoint(model[:2], inputs.requires_grad_(), use_reentrant=True)
        cross_entropy(model[2](hidden), target).backward()
        optimizer.step()


@row("`torch.compile` of the model, before `replicate()` or after")
def compiled(loop: Loop) -> None:
    raw = loop.build()
    with BUILDING:
        model = torch.compile(raw, backend="eager")
        model(loop.batch(0)[0])
    _, optimizer = loop.replicate(model, sgd(model.parameters()))
    again = torch.compile(raw, backend="eager")
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        with BUILDING:
            output = (again if number % 2 else model)(inputs)
        cross_entropy(output, target).backward()
        optimizer.step()


# Losses.

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


@row(
    'class weights, `ignore_index`, `reduction="sum"`, a root of a mean, a sum that is divided by a fixed number, a mean over some '
    "samples, a quotient of sums (Dice), the hardest samples, pairs of samples: `loss.backward()`",
    refused="not a mean over this worker's samples",
)
def weighted_without(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target, weight=CLASS_WEIGHTS).backward()
        optimizer.step()


@row("class weights: `session.backward(total, weight)`")
def weighted(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        total = cross_entropy(model(inputs), target, weight=CLASS_WEIGHTS, reduction="sum")
        loop.seen.append(loop.backward(total, CLASS_WEIGHTS[target].sum()))
        optimizer.step()


@row("`ignore_index`, with no target left on some workers: `session.backward(total, weight)`")
def ignored(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        target[target == 2] = -100
        if 1 in loop.places:
            target[-SHARE if len(loop.places) in (1, 2) else SHARE :][:SHARE] = -100
        optimizer.zero_grad()
        total = cross_entropy(model(inputs), target, reduction="sum")
        loop.seen.append(loop.backward(total, (target != -100).sum()))
        loop.seen.append(float(loop.clip_grad_norm_(0.2)))
        optimizer.step()


@row("workers with batches of different sizes: `session.backward(total, weight)`")
def uneven(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        if loop.places[-1] == 1:
            inputs, target = inputs[:-2], target[:-2]
        elif loop.places == [0, 1, 2, 3]:
            rows = [row for row in range(4 * SHARE) if row not in (2 * SHARE - 2, 2 * SHARE - 1)]
            inputs, target = inputs[rows], target[rows]
        optimizer.zero_grad()
        total = cross_entropy(model(inputs), target, reduction="sum")
        loop.backward(total, len(target))
        optimizer.step()


@row("loops of different length on workers of one group, or of groups that wait for each other", refused="ended its session after")
def lengths(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        if number == 3 and loop.rank == 1:
            break
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
