"""The scale of losses in float16: as torch's GradScaler has it, and the same on all workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.train.world import Recipe, data_of, network_of, run, topology_of
from zmqtrain.errors import CheckpointError, TaskError
from zmqtrain.train.loss_scale import LEAST, LossScale


def test_it_is_halved_by_an_overflow_and_doubled_after_many_good_steps() -> None:
    scale = LossScale(1024.0, interval=3)
    values = []
    for finite in (True, True, False, True, True, True, True, True, True):
        scale.judged(finite)
        values.append(scale.value)
    assert values == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048]
    assert scale.passed_over == 1


def test_gradients_that_never_become_finite_are_an_error() -> None:
    scale = LossScale(2 * LEAST)
    scale.judged(False)
    with pytest.raises(TaskError, match="bfloat16"):
        scale.judged(False)


def test_it_comes_back_from_a_checkpoint() -> None:
    scale, again = LossScale(1024.0, interval=5), LossScale(interval=5)
    for finite in (False, True, True):
        scale.judged(finite)
    again.load(scale.state())
    assert again.state() == scale.state()
    for wrong in ("x", [], [float("nan"), 0.0, 0.0], [1e300, 0.0, 0.0], [1024.0, 7.0, 0.0]):
        with pytest.raises(CheckpointError):
            again.load(wrong)


def steep(output: Tensor, target: Tensor) -> Tensor:
    """Gradients that float16 holds only with a small scale."""
    return 500.0 * cross_entropy(output.float(), target)


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=2e-4, momentum=0.9)


EXCHANGES: list[dict[str, Any]] = [
    {"kind": "allreduce"},
    {"kind": "model_server", "staleness": "sync", "shards": 2},
    {"kind": "model_server", "staleness": "async", "compression": "fp16"},
    {"kind": "gossip"},
    {"kind": "averaging", "every": 2},
]


@pytest.mark.parametrize(
    ("exchange", "clip"),
    [*((each, 1000.0 * (number % 2)) for number, each in enumerate(EXCHANGES)), (EXCHANGES[0], 1000.0), (EXCHANGES[-1], 1000.0)],
    ids=str,
)
async def test_workers_pass_over_the_same_steps(exchange: dict[str, Any], clip: float) -> None:
    recipe = Recipe(torch.float32, loss=steep, optimizer=sgd)
    compute = {"groups": 2, "group_size": 2, "batch_size": 8, "precision": "float16"}
    if clip and exchange["kind"] == "gossip":
        exchange = exchange | {"gossip": {"granularity": "batch"}}
    result = await run(topology_of(compute=compute, exchange=exchange, optimizer={"clip_norm": clip}, job={"steps": 30}), recipe)
    assert not result.errors
    scales = [[(e["step"], e["scale"]) for e in result.recorders[f"worker/{rank}"].of("loss scale")] for rank in range(4)]
    assert scales[0], "nothing has overflowed, so this test shows nothing"
    assert scales[0] == scales[1]  # a group
    assert scales[2] == scales[3]
    if exchange["kind"] == "allreduce" or exchange.get("staleness") == "sync":
        assert scales[0] == scales[2]
    assert all(recipe.parameters(f"worker/{rank}").isfinite().all() for rank in range(4))
    losses = result.losses("worker/0")
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("servers", [False, True])
async def test_it_is_torchs_grad_scaler(servers: bool) -> None:
    """One worker, beside torch's own loop over the same batches."""
    batches: list[tuple[Tensor, Tensor]] = []

    def noting(output: Tensor, target: Tensor) -> Tensor:
        loss = steep(output, target)
        if loss.requires_grad:
            batches.append((seen[-1], target))
        return loss

    seen: list[Tensor] = []

    def model() -> torch.nn.Module:
        built = network_of(torch.float32)
        built.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        return built

    first = {}
    recipe = Recipe(torch.float32, loss=noting, optimizer=sgd, model=model, train_data=data_of(dtype=torch.float32))

    def task(peer: str) -> Any:
        made = recipe(peer)
        build = made.model

        def keeping() -> torch.nn.Module:
            built = build()
            first.update({name: value.clone() for name, value in built.state_dict().items()})
            return built

        object.__setattr__(made, "model", keeping)
        return made

    exchange = {"kind": "model_server"} if servers else {"kind": "allreduce"}
    compute = {"groups": 1, "group_size": 1, "batch_size": 16, "precision": "float16"}
    result = await run(topology_of(compute=compute, exchange=exchange, job={"steps": 25}), task)
    assert not result.errors
    plain = network_of(torch.float32)
    plain.load_state_dict(first)
    optimizer, scaler = sgd(plain.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scales = []
    for step, (inputs, target) in enumerate(batches):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = steep(plain(inputs), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() != before:
            scales.append((step, scaler.get_scale()))
    assert [(e["step"], e["scale"]) for e in result.recorders["worker/0"].of("loss scale")] == scales
    theirs = torch.cat([parameter.detach().reshape(-1).double() for parameter in plain.parameters()])
    torch.testing.assert_close(recipe.parameters("worker/0"), theirs, rtol=1e-3, atol=1e-4)
