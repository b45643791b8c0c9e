"""Training loops as people write them. Each runs in a session, and in plain PyTorch on the whole batch (`Plain`)."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from zmqtrain.embed.session import Session

STEPS = 5
SHARE = 4
"""Samples of a worker in a step."""
FEATURES, CLASSES = 6, 3
_BUILDING = threading.Lock()


class Loop:
    """What a loop is given: the session, or what stands for it in plain PyTorch; and this worker's samples."""

    def __init__(self, session: Session | None, places: list[int], dtype: torch.dtype = torch.float64) -> None:
        """``places``: which shares of a step's samples it has."""
        self.session, self.places, self.dtype = session, places, dtype
        self.model: nn.Module = nn.Identity()
        self.seen: list[float] = []

    @property
    def rank(self) -> int:
        return self.session.rank if self.session else 0

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This worker's samples of a step."""
        generator = torch.Generator().manual_seed(100 + step)
        inputs = torch.randn(4 * SHARE, FEATURES, generator=generator, dtype=self.dtype)
        target = torch.randint(CLASSES, (4 * SHARE,), generator=generator)
        rows = [row for place in self.places for row in range(place * SHARE, (place + 1) * SHARE)]
        return inputs[rows], target[rows]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(STEPS):
            yield self.batch(step)

    def build(self, make: Callable[[], nn.Module] | None = None) -> nn.Module:
        with _BUILDING:  # workers are threads here, with one random state
            torch.manual_seed(5)
            self.model = (make or network)().to(self.dtype)
        return self.model

    def start(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        make: Callable[[], nn.Module] | None = None,
        **how: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.build(make)
        return self.replicate(model, (optimizer or sgd)(model.parameters()), **how)

    def replicate(self, model: nn.Module, optimizer: Any, **how: Any) -> tuple[nn.Module, Any]:
        return self.session.replicate(model, optimizer, **how) if self.session else (model, optimizer)

    def mean(self, value: Tensor) -> Tensor:
        return self.session.all_reduce(value.detach().clone(), "mean") if self.session else value.detach()

    def clip_grad_norm_(self, *arguments: Any) -> Tensor:
        if self.session:
            return self.session.clip_grad_norm_(*arguments)
        return nn.utils.clip_grad_norm_(self.model.parameters(), *arguments)

    def clip_grad_value_(self, value: float) -> None:
        if self.session:
            self.session.clip_grad_value_(value)
        else:
            nn.utils.clip_grad_value_(self.model.parameters(), value)

    def backward(self, total: Tensor, weight: Any) -> float:
        if self.session:
            return self.session.backward(total, weight)
        (total / weight).backward()
        return float(total / weight)

    def accumulating(self) -> Any:
        from contextlib import nullcontext

        return self.session.accumulating() if self.session else nullcontext()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=1e-3)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


#: Kinds of exchange, as the table's columns have them.
ALLREDUCE, SYNC, ASYNC, GOSSIP, AVERAGING = KINDS = ("allreduce", "servers, sync", "servers, async", "gossip", "averaging")
SERVERS = (SYNC, ASYNC)


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    run: Callable[[Loop], Any]
    refused: dict[str, str] = field(default_factory=dict)
    """By exchange: the beginning of a pattern that the error has."""
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12


ROWS: list[Row] = []


def row(name: str, *, refused: str | None = None, by: tuple[str, ...] = KINDS, **fields: Any) -> Callable[[Any], Any]:
    """Add the function to the table. ``refused`` by the exchanges ``by``, with an error that matches."""

    def add(run: Callable[[Loop], Any]) -> Callable[[Loop], Any]:
        ROWS.append(Row(name, run, dict.fromkeys(by, refused) if refused else {}, **fields))
        return run

    return add


# Ordinary loops.


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


# Gradients that are changed before the step.


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


# More than one backward a step, or none.


@row("gradients accumulated within `session.accumulating()`")
def accumulating(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        with loop.accumulating():
            (cross_entropy(model(inputs[::2]), target[::2]) / 2).backward()
        (cross_entropy(model(inputs[1::2]), target[1::2]) / 2).backward()
        optimizer.step()


@row("gradients accumulated within `session.accumulating()`, and clipped")
def accumulating_clipped(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        with loop.accumulating():
            (cross_entropy(model(inputs[::2]), target[::2]) / 2).backward()
        (cross_entropy(model(inputs[1::2]), target[1::2]) / 2).backward()
        loop.seen.append(float(loop.clip_grad_norm_(0.1)))
        optimizer.step()


@row("gradients accumulated over several `backward()`")
def accumulated(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        for part in range(2):
            (cross_entropy(model(inputs[part::2]), target[part::2]) / 2).backward()
        optimizer.step()


@row("`step()` in every second iteration only")
def every_second(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        (cross_entropy(model(inputs), target) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@row("`retain_graph=True` and a second `backward()`")
def retained(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()


@row("the model called twice before `backward()`")
def twice(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        (cross_entropy(model(inputs), target) + model(-inputs).square().mean()).backward()
        optimizer.step()


@row("`step()` twice for one `backward()`", refused="without a forward and a backward")
def stepped_twice(loop: Loop) -> None:
    model, optimizer = loop.start(overlap=True)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        optimizer.step()


@row("`step()` left out for some batches, from the first steps on or with `overlap=False`")
def left_out(loop: Loop) -> None:
    model, optimizer = loop.start(overlap=False)
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        if number != 2:
            optimizer.step()


@row("`step()` left out later, without `overlap=False`", refused=r"optimizer\.step\(\) was left out|gradients have been sent")
def left_out_late(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        if number != 3:
            optimizer.step()


# Second derivatives, several passes, closures.


@row("a gradient penalty: `torch.autograd.grad(..., create_graph=True)` of the inputs")
def penalty(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        inputs.requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        (cross_entropy(output, target) + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()


@row("`torch.autograd.grad` of the parameters, averaged by `session.all_reduce`, put into `p.grad`")
def own_gradients(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        gradients = torch.autograd.grad(cross_entropy(model(inputs), target), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = loop.mean(gradient)
        optimizer.step()


@row("`torch.autograd.grad` of the parameters, put into `p.grad` as it is", refused="not in the same way")
def unsummed_gradients(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        gradients = torch.autograd.grad(cross_entropy(model(inputs), target), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


@row("`backward(create_graph=True)`", refused="create_graph")
def graph_of_gradients(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward(create_graph=True)
        optimizer.step()


def _climb(model: nn.Module) -> list[Tensor]:
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    return [0.05 * parameter.grad / norm for parameter in model.parameters()]


@row("SAM: two passes, weights changed for the second and restored")
def sharpness(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        climb, before = _climb(model), [parameter.data for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), climb, strict=True):
                if number % 2:
                    parameter.add_(step)
                else:
                    parameter.data = parameter.data + step
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        with torch.no_grad():
            for parameter, step, old in zip(model.parameters(), climb, before, strict=True):
                if number % 2:
                    parameter.sub_(step)
                else:
                    parameter.data = old
        optimizer.step()


@row("`step(closure)`: LBFGS with line search", refused="LBFGS", by=SERVERS, tolerance=1e-9)  # line searches make more of rounding
def closures(loop: Loop) -> None:
    model, optimizer = loop.start(lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"))
    for inputs, target in loop.batches():

        def closure(inputs: Tensor = inputs, target: Tensor = target) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), target)
            loss.backward()
            return loss

        loop.seen.append(float(optimizer.step(closure)))


@row("`step(closure)` of other optimizers", refused="closure", by=SERVERS)
def sgd_closures(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():

        def closure(inputs: Tensor = inputs, target: Tensor = target) -> float:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), target)
            loss.backward()
            return loss.item()

        loop.seen.append(optimizer.step(closure))


# Learning rates.


@row("schedules, stepped once a step or an epoch")
def schedules(loop: Loop) -> None:
    model, optimizer = loop.start()
    cycle = OneCycleLR(optimizer, max_lr=0.5, total_steps=STEPS + 1)
    decay = ExponentialLR(optimizer, 0.9)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        cycle.step()
    decay.step()
    optimizer.zero_grad()
    cross_entropy(model(loop.batch(0)[0]), loop.batch(0)[1]).backward()
    optimizer.step()


@row("`ReduceLROnPlateau` with a metric that all workers share")
def plateau(loop: Loop) -> None:
    model, optimizer = loop.start()
    schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        schedule.step(float(loop.mean(loss)))
        loop.seen.append(optimizer.param_groups[0]["lr"])


@row("`ReduceLROnPlateau` with each worker's own metric", refused="the optimizer.s settings .* differ between workers")
def own_plateau(loop: Loop) -> None:
    model, optimizer = loop.start()
    schedule = ReduceLROnPlateau(optimizer, patience=0)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        schedule.step(1.0 if loop.rank % 2 else 1.0 / (1 + len(loop.seen)))
        loop.seen.append(0.0)


@row('`param_groups[i]["lr"]` set before forward, or between `backward()` and `step()`')
def rates(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.1 * (number + 1)
        optimizer.step()


# Parameters that come and go.


@row("parameters that no loss depends on")
def unused(loop: Loop) -> None:
    model, optimizer = loop.start(plain_sgd, make=lambda: nn.ModuleList([network(), nn.Linear(2, 2)]))
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model[0](inputs), target).backward()
        optimizer.step()


@row("parameters that have a gradient in some steps only", refused="no gradient in some steps", by=SERVERS)
def sometimes(loop: Loop) -> None:
    model, optimizer = loop.start(make=lambda: nn.ModuleList([network(), network()]))
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model[number % 2](inputs), target).backward()
        optimizer.step()


@row("parameters that have a gradient on some workers only", refused="no gradient in some steps", by=SERVERS)
def on_some(loop: Loop) -> None:
    model, optimizer = loop.start(torch.optim.Adam, make=lambda: nn.ModuleList([network(), nn.Linear(FEATURES, CLASSES)]))
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        output = model[0](inputs)
        mask = torch.zeros(len(inputs), 1, dtype=inputs.dtype)
        if 0 in loop.places and number > 0:  # an expert that only the first share's samples ask for
            mask[:SHARE] = 1.0
            output = output + mask * model[1](inputs)
        cross_entropy(output, target).backward()
        optimizer.step()


@row("parameters frozen in mid-training, with `overlap=False`", refused="no gradient in some steps", by=SERVERS)
def frozen(loop: Loop) -> None:
    model, optimizer = loop.start(overlap=False)
    for number, (inputs, target) in enumerate(loop.batches()):
        model[0].requires_grad_(number not in (2, 3))
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("parameters frozen in mid-training, without `overlap=False`", refused="no gradient has reached")
def frozen_late(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        model[0].requires_grad_(number < 3)
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("parameters frozen at `replicate()`, and trained later", refused="was frozen at")
def thawed(loop: Loop) -> None:
    model = loop.build()
    model[0].requires_grad_(False)
    model, optimizer = loop.replicate(model, sgd(model.parameters()))
    for number, (inputs, target) in enumerate(loop.batches()):
        model[0].requires_grad_(number > 2)
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("`add_param_group` after `replicate()`", refused="add_param_group")
def grown(loop: Loop) -> None:
    model = loop.build()
    model, optimizer = loop.replicate(model, sgd(model[2].parameters()))
    for number, (inputs, target) in enumerate(loop.batches()):
        if number == 2:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("two models with two optimizers (a GAN)", refused="replicates one model")
def adversaries(loop: Loop) -> None:
    loop.start()
    loop.start()


@row("an optimizer with more than the model's parameters", refused="do not belong to the model")
def foreign(loop: Loop) -> None:
    model, temperature = loop.build(), nn.Parameter(torch.ones(1, dtype=loop.dtype))
    loop.replicate(model, sgd([*model.parameters(), temperature]))


@row("`nn.Embedding(sparse=True)`", refused="is sparse")
def sparse(loop: Loop) -> None:
    model, optimizer = loop.start(
        lambda p: torch.optim.SGD(p, lr=0.1), make=lambda: nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Linear(8, CLASSES))
    )
    for _, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(target), target).backward()
        optimizer.step()


# Weights.


@row("weights changed by hand under `no_grad`", refused="changed by hand", by=SERVERS)
def clamped(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)


@row("weights changed through `.data`", refused="changed by hand", by=SERVERS)
def clamped_data(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)


@row("`model.load_state_dict` after `replicate()`, on all workers", refused="changed by hand", by=SERVERS)
def loaded(loop: Loop) -> None:
    model, optimizer = loop.start()
    first = copy.deepcopy(model.state_dict())
    for number, (inputs, target) in enumerate(loop.batches()):
        if number == 3:
            model.load_state_dict(first)
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("`model.load_state_dict` after `replicate()`, on one worker only", refused="weights differ|changed by hand")
def loaded_once(loop: Loop) -> None:
    model, optimizer = loop.start()
    first = copy.deepcopy(model.state_dict())
    for number, (inputs, target) in enumerate(loop.batches()):
        if number == 3 and loop.rank == 0:
            model.load_state_dict(first)
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("EMA and SWA copies (`AveragedModel`), made before `replicate()` or after")
def averaged(loop: Loop) -> None:
    model = loop.build()
    before = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    model, optimizer = loop.replicate(model, sgd(model.parameters()))
    after = AveragedModel(model)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        before.update_parameters(model)
        after.update_parameters(model)
        with torch.no_grad():
            loop.seen.append(float(loop.mean(cross_entropy(after(inputs), target))))
    loop.seen += [float(parameter.sum()) for each in (before, after) for parameter in each.module.parameters()]


@row("`copy.deepcopy(model)` in mid-training; `model.state_dict()` after any step")
def copied(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        teacher = copy.deepcopy(model)
        cross_entropy(teacher(inputs), target).backward()
        loop.seen += [float(parameter.sum()) for parameter in model.state_dict().values()]
        loop.seen.append(float(teacher[2].bias.sum()))


@row("`optimizer.state` and `optimizer.state_dict()` read", refused="have its state", by=SERVERS)
def inspected(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        loop.seen += [float(each["momentum_buffer"].sum()) for each in optimizer.state_dict()["state"].values()]


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
    with _BUILDING:
        model = torch.compile(raw, backend="eager")
        model(loop.batch(0)[0])
    _, optimizer = loop.replicate(model, sgd(model.parameters()))
    again = torch.compile(raw, backend="eager")
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        with _BUILDING:
            output = (again if number % 2 else model)(inputs)
        cross_entropy(output, target).backward()
        optimizer.step()


# Losses.

CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)


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


@row("loops of different length on different workers", refused="ended its session after")
def lengths(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        if number == 3 and loop.rank == 1:
            break
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


def table() -> str:
    """The rows as docs/sessions.md has them. ``python -m tests.embed.loops`` prints them."""
    marks = {True: "refused", False: "="}
    lines = [f"| loop | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    lines += [f"| {each.name} | {' | '.join(marks[kind in each.refused] for kind in KINDS)} |" for each in ROWS]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
