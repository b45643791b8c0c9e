"""Parameters that come and go, and weights that the loop itself changes or reads."""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.embed.loops.loop import CLASSES, FEATURES, SHARE, Loop, network, plain_sgd, sgd
from tests.embed.loops.rows import SERVERS, row

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


@row("a second optimizer, of other parameters of the model, that is not replicated", refused="is trained, but not by the optimizer")
def second_optimizer(loop: Loop) -> None:
    model = loop.build()
    model, optimizer = loop.replicate(model, sgd(model[0].parameters()))
    own = sgd(model[2].parameters())
    for inputs, target in loop.batches():
        model.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        own.step()


@row("a second optimizer, of parameters outside of the model", refused="another optimizer, which was not given to")
def second_optimizer_outside(loop: Loop) -> None:
    model, optimizer = loop.start()
    scale = torch.nn.Parameter(torch.ones((), dtype=loop.dtype))
    own = plain_sgd([scale])
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        own.zero_grad()
        cross_entropy(scale * model(inputs), target).backward()
        optimizer.step()
        own.step()


@row("optimizers that run within `backward()` (`register_post_accumulate_grad_hook`)", refused="only this worker's part")
def within_backward(loop: Loop) -> None:
    model, _ = loop.start()
    for parameter in model.parameters():
        own = plain_sgd([parameter])
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    for inputs, target in loop.batches():
        cross_entropy(model(inputs), target).backward()


@row("hooks on the optimizer's step", refused="hooks on its step", by=SERVERS)
def step_hooks(loop: Loop) -> None:
    model, optimizer = loop.start()

    def shrink(*_: object) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    optimizer.register_step_post_hook(shrink)
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


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


@row(
    "weights and gradients rounded: `model.float()` and `model.double()` in mid-training",
    refused="changed by hand|on its way",
    by=SERVERS,
)
def rounded(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        if number in (1, 3):
            model.float()
            model.double()
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("`model.to(device)`, `model.double()` and the like where the model is so already, at any time")
def converted_to_itself(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        if number > 2:
            model.to("cpu")
            model.to(torch.float64)
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        if number == 3:
            model.double()
        optimizer.step()
        model.cpu()


@row("the same to another type, between `backward()` and `step()`, without `overlap=False`", refused="model was converted")
def converted_late(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        if number > 2:
            model.float()
            model.double()
        optimizer.step()


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


@row("`model.share_memory()` after `replicate()`, and a model that is sent to another process", refused="model was moved")
def shared_late(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        if number == 3:
            model.share_memory()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()


@row("`model.share_memory()` before `replicate()`", refused="shared with other processes")
def shared_early(loop: Loop) -> None:
    model = loop.build().share_memory()
    loop.replicate(model, sgd(model.parameters()))


@row("a copy of the model in shared memory that gets its parameters now and then")
def shared_copy(loop: Loop) -> None:
    model, optimizer = loop.start()
    copied = copy.deepcopy(model).share_memory()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        copied.load_state_dict(model.state_dict())
    loop.seen.extend(float(parameter.sum()) for parameter in copied.parameters())


@row("`optimizer.state` and `optimizer.state_dict()` read", refused="have its state", by=SERVERS)
def inspected(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        loop.seen += [float(each["momentum_buffer"].sum()) for each in optimizer.state_dict()["state"].values()]


@row("`optimizer.state` cleared in mid-training, or replaced", refused="have its state", by=SERVERS)
def forgotten(loop: Loop) -> None:
    model, optimizer = loop.start()
    for number, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
        if number == 2:
            optimizer.state = defaultdict(dict)
        if number == 3:
            optimizer.state.clear()


class Projected(nn.Module):
    """Begins with a random projection, which is not trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("buffer", torch.randn(FEATURES, FEATURES, generator=generator))
        self.frozen = nn.Parameter(torch.randn(FEATURES, FEATURES, generator=generator), requires_grad=False)
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(torch.cos(inputs @ self.buffer) @ self.frozen)
        return scores


@row("other buffers and frozen parameters on each worker at `replicate()`: all begin with rank 0's")
def built_apart(loop: Loop) -> None:
    model, optimizer = loop.start(make=lambda: Projected(loop.rank))
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        optimizer.step()
