"""Optimizers that a task brings along: what they keep, count, draw or take of all parameters at once is as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from tests.train.test_worker import alone
from tests.train.world import Recipe, run, topology_of
from zmqtrain.errors import TaskError

EXCHANGES: dict[str, dict[str, Any]] = {
    "allreduce": {"kind": "allreduce"},
    "gossip": {"kind": "gossip"},
    "averaging": {"kind": "averaging"},
}


class Clips(SGD):
    """Clips by the norm of all gradients itself."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class Counts(SGD):
    """Counts steps in a parameter group, as schedule-free optimizers do, and sets its rate by that."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


class LooksBack(SGD):
    """Keeps a list of slow weights beside torch's state, in the order of the parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            parameters = (p for group in self.param_groups for p in group["params"])
            for slow, parameter in zip(self.slow, parameters, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class Noisy(SGD):
    """Draws noise for the weights (SGLD)."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)


class Beside(SGD):
    """Keeps tensors and counts in other places than a parameter's state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.averages, self.fixed = {"norm": torch.zeros(())}, torch.ones(3)

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.averages["norm"] += 1
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1


class Named(SGD):
    """Keeps something that is no number."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {"steps": self.state[parameter].get("steps", 0) + 1, "mode": "fast"}


def hooked(parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of torch, with a hook that takes the norm of all gradients."""
    optimizer = SGD(parameters, lr=0.1)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def with_tensor_rate(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(0.02))


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "clips": lambda p: Clips(p, lr=0.1),
    "counts": lambda p: Counts(p, lr=0.1),
    "beside": lambda p: Beside(p, lr=0.1),
    "looks back": lambda p: LooksBack(p, lr=0.1),
    "hooked": hooked,
    "a rate in a tensor": with_tensor_rate,
}


async def trained(recipe: Recipe, exchange: str | dict[str, Any], *, size: int = 2, steps: int = 5, groups: int = 1) -> Tensor:
    exchange = EXCHANGES[exchange] if isinstance(exchange, str) else exchange
    shape = {"groups": groups, "group_size": size, "batch_size": 12 // groups}
    result = await run(topology_of(job={"steps": steps}, compute=shape, exchange=exchange), recipe)
    for error in result.errors.values():
        raise error
    return recipe.parameters("worker/0")


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("exchange", "size"), [("allreduce", 1), ("allreduce", 2), ("gossip", 1), ("averaging", 2)])
async def test_an_optimizer_of_the_tasks_own_equals_one_process(kind: str, exchange: str, size: int) -> None:
    recipe = Recipe(optimizer=OPTIMIZERS[kind], schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8))
    expected = alone(recipe, 5, 12)
    assert torch.allclose(await trained(recipe, exchange, size=size), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("exchange", EXCHANGES)
async def test_the_workers_of_a_group_draw_the_same_in_their_optimizers(exchange: str) -> None:
    drawn: dict[str, list[Tensor]] = {}

    def recorded(peer: str) -> type[Noisy]:
        class Recorded(Noisy):
            def step(self, closure: Any = None) -> Any:
                super().step(closure)
                drawn.setdefault(peer, []).append(
                    torch.cat([p.detach().reshape(-1).clone() for p in self.param_groups[0]["params"]])
                )

        return Recorded

    class PerPeer(Recipe):
        def __call__(self, peer: str) -> Any:
            self.fields["optimizer"] = lambda p: recorded(peer)(p, lr=0.1)
            return super().__call__(peer)

    await trained(PerPeer(), exchange, size=2, steps=3)
    first, second = drawn["worker/0"], drawn["worker/1"]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


async def test_model_servers_refuse_hooks_on_the_optimizers_step() -> None:
    with pytest.raises(TaskError, match="hooks on its step would not be called"):
        await trained(Recipe(optimizer=hooked), {"kind": "model_server", "staleness": "sync"})


async def test_gossip_and_averaging_refuse_an_optimizer_with_a_closure() -> None:
    with pytest.raises(TaskError, match="calls the model itself"):
        await trained(Recipe(optimizer=lambda p: torch.optim.LBFGS(p)), "averaging")


class Unfreezes(torch.optim.lr_scheduler.LRScheduler):
    """Freezes all but the last parameter at first, and frees one more at each step."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            for number, parameter in enumerate(reversed(group["params"])):
                parameter.requires_grad_(number <= self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("exchange", [{"kind": "allreduce"}, {"kind": "model_server", "staleness": "sync"}])
async def test_parameters_that_a_schedule_has_frozen_at_first_are_trained_once_it_frees_them(exchange: dict[str, Any]) -> None:
    def recipe() -> Recipe:
        return Recipe(optimizer=lambda p: SGD(p, lr=0.1, momentum=0.9), schedule=Unfreezes)

    first, last = [await trained(recipe(), exchange, steps=steps, size=2) for steps in (1, 7)]
    assert torch.allclose(last, alone(recipe(), 7, 12), rtol=1e-9, atol=0)
    assert bool((first != last).all()), "all of them move in the end"


@pytest.mark.parametrize(
    ("kind", "what"),
    [("counts", "'lr', 'k'"), ("looks back", "'slow'"), ("beside", """'averages', "state['all']\""""), ("clips", None)],
)
async def test_what_an_optimizer_keeps_beside_its_state_is_warned_of_with_the_first_checkpoint(
    kind: str, what: str | None, tmp_path: Path
) -> None:
    shape = {"groups": 1, "group_size": 2, "batch_size": 12}
    topology = topology_of(job={"steps": 4, "checkpoint_every": 2}, compute=shape)
    result = await run(topology, Recipe(optimizer=OPTIMIZERS[kind]), folder=tmp_path)
    assert not result.errors
    warnings = [event["text"] for recorder in result.recorders.values() for event in recorder.of("warning")]
    assert [what is not None and what in text for text in warnings] == [True] * (what is not None)


@pytest.mark.parametrize("every", [1, 2])
async def test_a_state_that_checkpoints_cannot_hold_is_refused_with_the_first_steps(every: int, tmp_path: Path) -> None:
    def topology(checkpoint_every: Any) -> Any:
        job = {"steps": 5, "checkpoint_every": checkpoint_every}
        return topology_of(job=job, compute={"groups": 2, "batch_size": 12}, exchange={"kind": "allreduce", "every": every})

    recipe = Recipe(optimizer=lambda p: Named(p, lr=0.1))
    result = await run(topology("10 min"), recipe, folder=tmp_path)
    errors = [str(error) for error in result.errors.values() if isinstance(error, TaskError)]
    assert any("optimizer Named keeps 'mode' in optimizer.state, which is a str" in error for error in errors)
    assert all(len(recorder.of("step")) <= every for recorder in result.recorders.values())
    result = await run(topology(0), recipe, folder=tmp_path)
    assert not result.errors
