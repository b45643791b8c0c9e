"""Learning rates."""

from __future__ import annotations

from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

from tests.embed.loops.loop import STEPS, Loop
from tests.embed.loops.rows import row


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
