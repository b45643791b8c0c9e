"""How far ahead parameters are kept, with which momentum and rate, and that delays then shake nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from zmqtrain.exchange.look_ahead import RISE, horizon, is_mean, risen, spread, steps_ahead, with_rate_of_one
from zmqtrain.exchange.momentum import Compensation, compensated, explicit_of, implicit_momentum
from zmqtrain.exchange.norm_limit import LIMIT
from zmqtrain.exchange.optimizer import build_optimizer, describe_optimizer
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.topology.load import parse_topology


@pytest.mark.parametrize(("staleness", "updates"), [(0.0, 0.0), (1.0, 2.0), (1.5, 2.75), (3.0, 5.0), (7.0, 11.0)])
def test_the_horizon(staleness: float, updates: float) -> None:
    assert horizon(staleness) == updates


def test_a_rate_rises_with_the_root_of_the_updates_and_no_further() -> None:
    assert [risen(updates, 4.0) ** 2 for updates in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])
    assert [risen(updates, 4.0) for updates in (0, 3, 4)] == [0.5, 1.0, 1.0]
    assert risen(0, 2.5) ** 2 == pytest.approx(0.4)
    assert risen(10**12, 220.0) == 1.0
    assert [risen(0, rise) for rise in (0.0, 0.5, 1.0)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("updates", [0, 1, 5, 11])
def test_steps_ahead_is_the_sum_of_what_the_momentum_will_bring(momentum: float, updates: int) -> None:
    assert steps_ahead(momentum, updates) == pytest.approx(sum(momentum**k for k in range(1, updates + 1)))


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_a_round_of_updates_has_the_momentum_of_one(momentum: float, groups: int) -> None:
    assert spread(momentum, groups - 1) ** groups == pytest.approx(momentum)


KINDS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, alpha=0.96),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.96)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.96)),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, betas=(0.9, 0.96)),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1, betas=(0.9, 0.96)),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1, betas=(0.9, 0.96)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_four_updates_do_what_one_does_by_their_mean(kind: str) -> None:
    given = describe_optimizer(KINDS[kind]([torch.nn.Parameter(torch.zeros(3))]))
    spec = Compensation(3.0, on=True, look_ahead=True).of(given)
    build_optimizer(spec, [[torch.nn.Parameter(torch.zeros(3))]])
    changed = spec.groups[0]
    momentum, lr = explicit_of(changed), changed["lr"]
    assert momentum == pytest.approx(0.9**0.25)
    assert isinstance(lr, float)
    assert momentum is not None
    if is_mean(changed):
        betas = changed["betas"]
        assert isinstance(betas, list)
        assert betas[1] == pytest.approx(0.96**0.25)
        assert lr == pytest.approx(0.05)
    else:  # in all, four gradients move the parameters as far as their mean does at once
        assert 4 * lr / (1 - momentum) == pytest.approx((2 if kind == "rmsprop" else 1) * 0.1 / (1 - 0.9))
    if kind == "rmsprop":
        assert changed["alpha"] == pytest.approx(0.96**0.25)
    told = Compensation(3.0, on=True, look_ahead=True).describe(given)
    assert told["total"] == pytest.approx(0.9)
    assert told["look_ahead"] == {
        "updates": 5.0,
        "steps": pytest.approx(steps_ahead(momentum, 5)),
        "lr_factor": pytest.approx(lr / 0.1),
        "rise": 0.0 if kind == "sgd" else RISE * 5.0,
        "norm_limit": LIMIT if kind == "sgd" else None,
        "recovery": 4.0 if kind == "sgd" else 2.0,
    }
    own = Compensation(3.0, on=True, look_ahead=True, own_rate=True)
    assert (own.rise(given.groups[0]), own.limits(given)) == ((0.0, True) if kind == "sgd" else (RISE * 5.0, False))
    for off in (Compensation(3.0, on=True), Compensation(3.0, look_ahead=True), Compensation(0.0, on=True, look_ahead=True)):
        assert off.rise(given.groups[0]) == 0
        assert not off.limits(given)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.Rprop(p),
    ],
)
def test_what_has_no_rule_stays_as_it_is(make: Any) -> None:
    spec = describe_optimizer(make([torch.nn.Parameter(torch.zeros(3))]))
    compensation = Compensation(3.0, on=True, look_ahead=True)
    assert compensation.of(spec) == spec
    assert compensation.describe(spec)["look_ahead"] is None
    assert compensation.rise(spec.groups[0]) == 0
    assert not compensation.limits(spec)


#: Without momentum: the optimizer, and by what its rate is multiplied among four groups.
WITHOUT: dict[str, Any] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01), 0.25),
    "asgd": (lambda p: torch.optim.ASGD(p, lr=0.1), 0.25),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.96), 0.5),
    "adam": (lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.96)), 0.5),
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_without_momentum_the_rate_alone_is_fitted(kind: str) -> None:
    make, factor = WITHOUT[kind]
    spec = describe_optimizer(make([torch.nn.Parameter(torch.zeros(3))]))
    changed = Compensation(3.0, on=True, look_ahead=True).of(spec)
    built = build_optimizer(changed, [[torch.nn.Parameter(torch.zeros(3))]]).param_groups[0]
    assert built["lr"] == pytest.approx(0.1 * factor)
    assert not explicit_of(built)
    if kind == "rmsprop":
        assert built["alpha"] == pytest.approx(0.96**0.25)
    if kind == "adam":
        assert built["betas"] == (0.0, pytest.approx(0.96**0.25))
    fitted = ("lr", "momentum", "alpha") if kind == "rmsprop" else ("lr", "momentum", "betas")
    for key, value in spec.groups[0].items():
        assert key in fitted or changed.groups[0][key] == value
    told = Compensation(3.0, on=True, look_ahead=True).describe(spec)
    rate = {"lr_factor": pytest.approx(factor), "rise": 0.0, "norm_limit": None, "recovery": None}
    assert told["look_ahead"] == {"updates": 0.0, "steps": 0.0, **rate}
    assert told["total"] == 0.75, "nothing is looked ahead, so it acts like the implicit one"


@pytest.mark.parametrize("kind", WITHOUT)
@pytest.mark.parametrize(
    "compensation",
    [
        Compensation(3.0, on=True, look_ahead=False),
        Compensation(3.0, on=False, look_ahead=True),
        Compensation(3.0, on=True, look_ahead=True, own_rate=True),
        Compensation(0.0, on=True, look_ahead=True, groups=1),
        Compensation(0.0, on=True, look_ahead=True, groups=4),
    ],
    ids=["none", "a momentum of the job's", "a rate of the job's", "one group", "sync"],
)
def test_without_momentum_the_rate_is_kept(kind: str, compensation: Compensation) -> None:
    spec = describe_optimizer(WITHOUT[kind][0]([torch.nn.Parameter(torch.zeros(3))]))
    assert compensation.of(spec) == spec
    assert compensation.describe(spec)["look_ahead"] is None


def test_a_rate_of_the_job_s_own_takes_the_place_of_the_task_s_where_there_is_momentum() -> None:
    spec = describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9))
    one, other = (Compensation(3.0, on=True, look_ahead=True, own_rate=own) for own in (False, True))
    assert one.of(spec) == other.of(spec) != spec


@pytest.mark.parametrize("scheduled", [0.4, 0.1, 0.0])
def test_each_parameter_group_and_each_rate_of_a_schedule_is_fitted(scheduled: float) -> None:
    tensors = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    parts = [{"params": tensors[:1]}, {"params": tensors[1:2], "lr": 0.2}, {"params": tensors[2:], "momentum": 0.9}]
    optimizer = torch.optim.SGD(parts, lr=scheduled)
    first, second, third = Compensation(3.0, on=True, look_ahead=True).of(describe_optimizer(optimizer)).groups
    assert (first["lr"], second["lr"]) == (scheduled / 4, 0.05)
    assert third["lr"] == pytest.approx(scheduled * (1 - 0.9**0.25) / 0.1 / 4)


def test_a_momentum_of_the_job_s_own_is_kept_with_its_rate() -> None:
    spec = describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.6))
    compensation = Compensation(3.0, on=False, look_ahead=True)
    assert compensation.of(spec) == spec
    assert compensation.horizon == 5
    assert compensation.describe(spec)["look_ahead"] == {
        "updates": 5.0,
        "steps": pytest.approx(steps_ahead(0.6, 5)),
        "lr_factor": 1.0,
        "rise": 0.0,
        "norm_limit": None,
        "recovery": None,
    }


@pytest.mark.parametrize("policy", ["sync", "async"])
@pytest.mark.parametrize("groups", [1, 4])
def test_only_where_gradients_are_stale(policy: Any, groups: int) -> None:
    peers = tuple((f"worker/{group}",) for group in range(groups))
    settings = ModelServerSettings(0, 0, peers, ("server/0",), policy, compensate=True, look_ahead=True)
    spec = describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9))
    stale = policy == "async" and groups > 1
    assert settings.compensation.horizon == (5.0 if stale else 0.0)
    assert (settings.compensation.of(spec) == spec) is not stale
    assert settings.compensation.limits(spec) is stale
    adam = describe_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))]))
    assert settings.compensation.rise(adam.groups[0]) == (RISE * 5.0 if stale else 0.0)
    without = describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1))
    assert settings.compensation.of(without).groups[0]["lr"] == (0.025 if stale else 0.1)


def test_with_a_bound_of_0_a_round_is_still_of_all_groups() -> None:
    """All have read before the first one writes, so staleness is 1.5 in the mean, but four updates are a round."""
    peers = tuple((f"worker/{group}",) for group in range(4))
    settings = ModelServerSettings(0, 0, peers, ("server/0",), "bound", bound=0, compensate=True, look_ahead=True)
    assert settings.compensation.horizon == 2.75
    for momentum in (0.0, 0.9):
        spec = describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=momentum))
        changed = settings.compensation.of(spec).groups[0]
        m, lr = explicit_of(changed), changed["lr"]
        assert m is not None
        assert isinstance(lr, float)
        assert m**4 == pytest.approx(momentum)
        assert 4 * lr / (1 - m) == pytest.approx(0.1 / (1 - momentum))


def test_the_setting() -> None:
    assert parse_topology("[job]\n", file="job.toml", name="job").optimizer.look_ahead == "auto"
    parsed = parse_topology('[job]\n[optimizer]\nlook_ahead = "none"\n', file="job.toml", name="job")
    assert parsed.optimizer.look_ahead == "none"


def largest_rate(momentum: float, groups: int, *, ahead: bool) -> float:
    """The largest task's ``lr c`` at which groups that take turns do not diverge, of a quadratic of curvature c."""
    s = groups - 1
    if ahead:
        m, far = spread(momentum, s), steps_ahead(spread(momentum, s), horizon(s))
        changed = with_rate_of_one({"lr": 1.0, "momentum": momentum}, momentum, s)["lr"]
        assert isinstance(changed, float)
        lr = changed
    else:
        m, far, lr = compensated(momentum, implicit_momentum(s)), 0.0, 1.0

    def radius(rate: float) -> float:
        # p(t), ..., p(t - s), and v: v' = m v + rate p(t - s); p' = p - lr ((1 + far) v' - far v)
        step = np.zeros((s + 2, s + 2))
        step[s + 1, s], step[s + 1, s + 1] = rate, m
        step[0, 0] = 1
        step[0, s] -= lr * (1 + far) * rate
        step[0, s + 1] -= lr * ((1 + far) * m - far)
        for row in range(1, s + 1):
            step[row, row - 1] = 1
        return float(max(abs(np.linalg.eigvals(step))))

    rates = np.geomspace(0.01, 10, 200)
    return max((float(rate) for rate in rates if radius(rate) <= 1 + 1e-9), default=0.0)


@pytest.mark.parametrize("momentum", [0.6, 0.9, 0.95])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_far_larger_rates_are_stable(groups: int, momentum: float) -> None:
    """Up to 1.3 to 0.65 instead of 0.8 to 0.07; more than four times as much where it is 0.9."""
    before, after = largest_rate(momentum, groups, ahead=False), largest_rate(momentum, groups, ahead=True)
    assert after > 0.6
    assert after > 1.3 * before
    assert momentum < 0.9 or after > 4 * before
