"""More than one backward a step, or none; second derivatives, several passes, closures."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.embed.loops.loop import Loop
from tests.embed.loops.rows import SERVERS, row

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


@row("gradients accumulated within `session.accumulating()`, and dropped: `zero_grad()`, `p.grad = None`")
def dropped(loop: Loop) -> None:
    model, optimizer = loop.start()

    def drop(step: int) -> None:
        if step == 1:
            for parameter in model.parameters():
                parameter.grad = None
        elif step == 2:
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=step != 3)

    for step, (inputs, target) in enumerate(loop.batches()):
        for _ in range(2):
            drop(step)
            with loop.accumulating():
                cross_entropy(model(inputs[::2]), target[::2]).backward()
        (cross_entropy(model(inputs[1::2]), target[1::2]) / 2).backward()
        optimizer.step()


@row("gradients read or changed within `session.accumulating()`", refused="only this worker's part")
def read_while_accumulating(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        with loop.accumulating():
            cross_entropy(model(inputs[::2]), target[::2]).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
        cross_entropy(model(inputs[1::2]), target[1::2]).backward()
        optimizer.step()


@row("forwards between `backward()` and `step()`, from the first steps on or with `overlap=False`")
def forward_before_step(loop: Loop) -> None:
    model, optimizer = loop.start()
    for inputs, target in loop.batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        with torch.no_grad():
            loop.seen.append(float(loop.mean(cross_entropy(model(inputs), target))))
        optimizer.step()


@row("forwards between `backward()` and `step()` later, without `overlap=False`", refused="a forward between backward")
def late_forward_before_step(loop: Loop) -> None:
    model, optimizer = loop.start()
    for step, (inputs, target) in enumerate(loop.batches()):
        optimizer.zero_grad()
        cross_entropy(model(inputs), target).backward()
        if step > 2:
            model[0](inputs)
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
