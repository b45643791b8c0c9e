"""The optimizer as plain data: what a server builds steps exactly as the task's own."""

from __future__ import annotations

import msgpack
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zmqtrain.errors import CheckpointError, TaskError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.optimizer import bare_step, build_optimizer, describe_optimizer, require_state, set_hyperparameters

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.95), amsgrad=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01, dtype=torch.float64)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}


def over_the_wire(spec: OptimizerSpec) -> OptimizerSpec:
    name, groups = msgpack.unpackb(msgpack.packb([spec.name, list(spec.groups)]))
    return OptimizerSpec(name, tuple(groups))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_built_optimizer_steps_like_the_task_s_own_on_flat_pieces(name: str) -> None:
    torch.manual_seed(1)
    whole = torch.randn(4, 6, dtype=torch.float64)
    flat = whole.clone().reshape(-1)
    pieces = [flat[:10].clone(), flat[10:].clone()]
    theirs = OPTIMIZERS[name]([whole])
    ours = build_optimizer(over_the_wire(describe_optimizer(theirs)), [pieces])
    for _ in range(4):
        gradient = torch.randn(4, 6, dtype=torch.float64)
        whole.grad = gradient
        pieces[0].grad, pieces[1].grad = gradient.reshape(-1)[:10], gradient.reshape(-1)[10:]
        theirs.step()
        ours.step()
    torch.testing.assert_close(torch.cat(pieces), whole.reshape(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bare_step_is_the_step_to_the_last_bit(name: str) -> None:
    start = torch.randn(9, generator=torch.Generator().manual_seed(1))
    found = []
    for take in (lambda optimizer: optimizer.step, bare_step):
        values = torch.nn.Parameter(start.clone())
        optimizer = OPTIMIZERS[name]([values])
        step = take(optimizer)
        for number in range(4):
            values.grad = (number + start).sin()
            with torch.no_grad():
                step()
        found.append(values.detach())
    assert torch.equal(*found)


def test_the_step_of_an_own_class_or_with_hooks_is_left_as_it_is() -> None:
    class Own(torch.optim.SGD):
        pass

    called: list[int] = []
    optimizers = [kind([torch.nn.Parameter(torch.zeros(2))], lr=0.1) for kind in (Own, torch.optim.SGD)]
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: called.append(1))
        bare_step(optimizer)()
    assert len(called) == 2


def test_parameter_groups_and_a_schedule_s_changes_are_kept() -> None:
    a, b = torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    theirs = torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "weight_decay": 0.25}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(theirs, step_size=1, gamma=0.5)
    ours = build_optimizer(over_the_wire(describe_optimizer(theirs)), [[torch.zeros(3)], [torch.zeros(2)]])
    assert [g["lr"] for g in ours.param_groups] == [0.5, 0.1]
    assert [g["weight_decay"] for g in ours.param_groups] == [0, 0.25]
    theirs.step()
    schedule.step()
    set_hyperparameters(ours, over_the_wire(describe_optimizer(theirs)).groups)
    assert [g["lr"] for g in ours.param_groups] == [0.25, 0.05]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("os:system", "run only the optimizers of torch.optim"),
        ("torch.optim:LBFGS", "needs whole tensors"),
        ("torch.optim:Nonesuch", "has no optimizer"),
        ("torch.optim.lr_scheduler:StepLR", "has no optimizer"),
    ],
)
def test_what_a_server_must_not_build_is_refused(name: str, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        build_optimizer(OptimizerSpec(name, ({"lr": 0.1},)), [[torch.zeros(1)]])


class Momentless(torch.optim.SGD):
    """An optimizer of the user's own."""


def test_an_own_optimizer_is_built_only_when_allowed() -> None:
    spec = describe_optimizer(Momentless([torch.zeros(1)], lr=0.5))
    with pytest.raises(TaskError, match="Momentless"):
        build_optimizer(spec, [[torch.zeros(1)]])


def test_what_an_optimizer_keeps_is_found_out_once_for_each_of_its_groups() -> None:
    plain, more = ([torch.nn.Parameter(torch.zeros(3)) for _ in range(20)] for _ in range(2))
    optimizer = torch.optim.Adam([{"params": more, "amsgrad": True}, {"params": plain}], lr=0.0123)
    kept = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    steps: list[object] = []
    hook = register_optimizer_step_pre_hook(lambda tried, *_: steps.append(tried))
    try:
        for parameter in plain:
            require_state(optimizer, "plain", parameter, kept)
        for parameter in more:
            with pytest.raises(CheckpointError, match="lacks max_exp_avg_sq of more"):
                require_state(optimizer, "more", parameter, kept)
    finally:
        hook.remove()
    assert len(steps) == 2
