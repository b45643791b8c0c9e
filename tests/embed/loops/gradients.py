"""Gradients that are changed before the step."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.embed.loops.loop import Loop, plain_sgd
from tests.embed.loops.rows import row


@row("`clip_grad_norm_`")
def clip_norm(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        loop.seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()


@row("`clip_grad_value_`")
def clip_value(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()


@row("`session.clip_grad_norm_`, `session.clip_grad_value_`")
def session_clip(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        loop.seen.append(float(loop.clip_grad_norm_(0.1, 1.0)))
        loop.seen.append(float(loop.clip_grad_norm_(0.05)))
        loop.clip_grad_value_(0.01)
        optimizer.step()


@row("clipping that starts later, with `overlap=True`", refused="on its way")
def late_clip(loop: Loop) -> None:
    model, optimizer = loop.start(overlap=True)
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        if number > 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@row("clipping that starts later, with `overlap=False`")
def late_clip_held(loop: Loop) -> None:
    model, optimizer = loop.start(overlap=False)
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        if number > 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@row("gradient norms that are only read")
def read_norms(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        loop.seen.append(float(sum(parameter.grad.norm() for parameter in model.parameters())))
        optimizer.step()


@row("gradient noise, from a generator with one seed on all workers")
def noise(loop: Loop) -> None:
    model, optimizer = loop.start()
    generator = torch.Generator().manual_seed(1)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        for parameter in model.parameters():
            parameter.grad += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()


@row("gradient noise that each worker draws for itself", refused="not in the same way")
def own_noise(loop: Loop) -> None:
    model, optimizer = loop.start()
    generator = torch.Generator().manual_seed(loop.rank)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        for parameter in model.parameters():
            parameter.grad += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()


@row("`p.grad` changed by hand: in place, through `.data`, by `_foreach`, replaced")
def by_hand(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        if number % 2:
            model[0].weight.grad = model[0].weight.grad.sign()
        model[0].bias.grad.data.mul_(0.5)
        model[2].weight.grad[0] = 0.0
        torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 0.7)
        optimizer.step()


@row("`p.grad = None` for some parameters")
def without(loop: Loop) -> None:
    model, optimizer = loop.start(plain_sgd)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        model[0].bias.grad = None
        optimizer.step()


@row("gradients of two losses, kept and combined (PCGrad)")
def combined(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        kept = []
        for number in range(2):
            optimizer.zero_grad()
            (model(inputs).square().mean() if number else cross_entropy(model(inputs), target)).backward()
            kept.append([parameter.grad for parameter in model.parameters()])
        for parameter, one, two in zip(model.parameters(), *kept, strict=True):
            inner = (one * two).sum()
            parameter.grad = one + two - (inner.clamp(max=0.0) / two.square().sum()) * two
        optimizer.step()


@row("hooks on parameters (`register_hook`), linear or not")
def hooks(loop: Loop) -> None:
    model, optimizer = loop.start()
    handle = model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
    for number, (inputs, target) in enumerate(loop.batches()):
        if number == 3:
            handle.remove()
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("hooks on modules, in forward and backward")
def module_hooks(loop: Loop) -> None:
    model, optimizer = loop.start()
    model[0].register_forward_hook(lambda module, inputs, output: 0.5 * output)
    model[1].register_full_backward_hook(lambda module, inputs, outputs: (2.0 * inputs[0],))
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("`GradScaler`: `unscale_`, clipping, `step`, `update`, with skipped steps")
def scaler(loop: Loop) -> None:
    model, optimizer = loop.start()
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        if number in (0, 2) and loop.places[0] == 0:
            loss = loss * math.inf  # one worker's gradients are too large
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        loop.seen.append(grad_scaler.get_scale())
