"""Gossip among groups of several workers goes on without those that are lost, and with those that come back: whole simulated
runs. The auditor compares the run's model with a replay in one process of what the workers say that their models were mixed with
(`zmqtrain.simulate.replay`), and the workers of a group with each other; with torch it is a replay in plain PyTorch, in double
precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.simulate.test_elastic_averages import BATCH, GROUPS, TORCH_STEPS, Recipe, equal
from tests.simulate.worlds import PEERS_STEPS as STEPS
from tests.simulate.worlds import peers_topology, run
from zmqtrain.run.faults import Fault, kill, pause, restart, slow
from zmqtrain.simulate.explore import explore
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import find_checkpoints
from zmqtrain.train.random_state import seed_everything

KINDS = ["", 'topology = "hypercube"', 'topology = "random"\nbalanced = false', 'exchange = "gradients"']


def topology(gossip: str = "", *, groups: int = 2, size: int = 2, job: str = "", shuffle: str = "global") -> Topology:
    exchange = f'kind = "gossip"\n[exchange.gossip]\n{gossip}'
    return peers_topology(exchange, groups=groups, size=size, job=job, shuffle=shuffle)


@pytest.mark.parametrize(("gossip", "size"), list(zip(KINDS, (2, 3, 3, 2), strict=True)))
def test_a_group_goes_on_with_fewer_and_trains_all_its_batches(gossip: str, size: int) -> None:
    steps, views, seconds = run(topology(gossip, size=size), kill("worker/1", step=7), kill(f"worker/{size}", step=13))
    gone = ("worker/1", f"worker/{size}")
    assert [len(members) for members in views] == [2 * size - 1, 2 * size - 2]
    assert all(steps[peer] == list(range(STEPS)) for peer in steps if peer not in gone)
    assert seconds < 1  # nobody waits for a time-out


@pytest.mark.parametrize("gossip", KINDS)
def test_one_that_comes_back_begins_with_the_model_of_its_group(gossip: str) -> None:
    steps, views, _ = run(topology(gossip, groups=4, job="restarts = 1"), restart("worker/0", at=0.004, after=0.002))
    assert len(views[-1]) == 8
    assert steps["worker/0"][-1] == STEPS - 1
    assert steps["worker/1"] == list(range(STEPS))


@pytest.mark.parametrize("shuffle", ["global", "ring"])
def test_a_group_that_has_lost_its_last_worker_drops_out_and_comes_back_as_a_copy_of_another(shuffle: str) -> None:
    faults = kill("worker/2", step=5), restart("worker/3", at=0.006, after=0.003)
    steps, views, _ = run(topology(shuffle=shuffle), *faults)
    assert ("worker/0", "worker/1") in views
    assert views[-1] == ("worker/0", "worker/1", "worker/3")
    assert steps["worker/3"][-1] == STEPS - 1
    both = kill("worker/2", at=0.005), kill("worker/3", at=0.005)
    run(topology(groups=4, job="restarts = 2", shuffle=shuffle), *both)


def test_at_the_beginning_in_the_last_step_and_to_the_last_worker() -> None:
    run(topology(), kill("worker/1", step=0))
    run(topology(), kill("worker/3", step=STEPS - 1))
    steps, _, _ = run(topology(), *(kill(f"worker/{rank}", step=4 * rank + 1) for rank in range(3)))
    assert steps["worker/3"] == list(range(STEPS))
    steps, _, _ = run(topology(groups=1, size=3), kill("worker/0", step=4), kill("worker/2", step=9))
    assert steps["worker/1"] == list(range(STEPS))


def test_one_that_stands_still_while_others_of_its_group_are_slow() -> None:
    run(topology(size=3, job="restarts = 1\neval_every = 5"), slow("worker/1", 20.0, at=0.003), pause("worker/2", 60.0, at=0.004))


@pytest.mark.parametrize(("seed", "gossip"), list(enumerate(KINDS)))
def test_random_faults_break_nothing(seed: int, gossip: str) -> None:
    shape = topology(gossip, groups=2 + 2 * (seed % 2), size=3 - seed % 2, job="restarts = 2\neval_every = 7")
    assert [each.broken for each in explore(shape, [2 * seed + 1], faults="random") if each.broken] == []


# With torch.

#: Whether the mixture of a step counts, for each worker.
Mixed = dict[tuple[int, str], bool]


def replayed(recipe: Recipe, mixed: Mapping[int, list[bool]], *, gradients: bool = False) -> list[nn.Module]:
    """The groups' models, computed by one process. ``mixed``: which groups take the mean with the other one at each step."""
    seed_everything(1)
    first = recipe.network()
    models = [recipe.network() for _ in range(GROUPS)]
    for model in models:
        model.load_state_dict(first.state_dict())
    optimizers = [recipe.optimizer(model.parameters()) for model in models]

    def mix(pairs: list[Any], counts: list[bool]) -> None:
        with torch.no_grad():
            for tensors in pairs:
                mean = sum(tensors) / GROUPS
                for tensor, counted in zip(tensors, counts, strict=True):
                    if counted:
                        tensor.copy_(mean)

    for step in range(TORCH_STEPS):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = slice((step * GROUPS + group) * BATCH, (step * GROUPS + group + 1) * BATCH)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(recipe.x[rows]), recipe.y[rows]).backward()
        pairs = list(zip(*(list(model.parameters()) for model in models), strict=True))
        if gradients:
            mix([[tensor.grad for tensor in pair] for pair in pairs], mixed[step])
        for optimizer in optimizers:
            optimizer.step()
        if not gradients:
            mix(pairs, mixed[step])
    return models


def trained(
    recipe: Recipe, *faults: Fault, folder: Path | None = None, resume: Path | None = None, **job: Any
) -> tuple[Mixed, float]:
    """Which mixtures count, and how long the run takes."""
    exchange = job.pop("exchange", "weights")
    document: dict[str, Any] = {
        "job": {"task": "given:task", "steps": TORCH_STEPS, "timeout": "5 s", "elastic": True, **job},
        "hosts": [{"name": "h[1-4]", "slots": 1}],
        "compute": {"groups": GROUPS, "group_size": 2, "batch_size": BATCH, "bucket_size": "1 KiB"},
        "exchange": {"kind": "gossip", "gossip": {"exchange": exchange}},
        "network": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
        "data": {"shuffle": "none"},
        "simulation": {"payload": "real"},
    }
    recipe.models.clear()
    mixed: Mixed = {}

    def hear(peer: str, what: str, values: Mapping[str, Any]) -> None:
        if what == "mixed":
            mixed[values["step"], peer] = bool(values["sources"])

    options = Options(faults=faults, task=recipe.task(), checkpoints=folder, resume=resume, on_audit=hear)
    result = simulate(Topology.from_dict(document), options=options)
    assert (result.ending.status, result.broken) == ("done", []), result.ending.error
    return mixed, result.seconds


ALL = {step: [True, True] for step in range(TORCH_STEPS)}


@pytest.mark.parametrize("exchange", ["weights", "gradients"])
@pytest.mark.parametrize("restarts", [0, 2])
def test_each_group_ends_with_what_it_trained_and_was_mixed_with(exchange: str, restarts: int) -> None:
    """In the middle of steps, of exchanges, of evaluations and of checkpoints: each exchange at all eight moments."""
    recipe, gradients = Recipe(), exchange == "gradients"
    job = {"restarts": restarts, "eval_every": 4, "checkpoint_every": 4, "exchange": exchange}
    mixed, seconds = trained(recipe, **job)
    assert all(mixed.values())
    expected = replayed(recipe, ALL, gradients=gradients)
    for rank, model in enumerate(recipe.models):
        assert equal(model, expected[rank // 2])
    for part in range(2 + (gradients != bool(restarts)), 10, 2):
        faults = kill("worker/0", at=seconds * part / 10), kill("worker/3", at=seconds * (part + 0.3) / 10)
        mixed, _ = trained(recipe, *faults, **job)
        counts = {step: [mixed[step, "worker/1"], mixed[step, "worker/2"]] for step in range(TORCH_STEPS)}
        expected = replayed(recipe, counts, gradients=gradients)
        there = [sum(equal(model, its) for model in recipe.models) for its in expected]
        assert min(there) >= 1, part
        # Each loss leaves out what was under way: the exchanges of at most two steps, in each of both groups.
        assert sum(not each for pair in counts.values() for each in pair) <= 8, part


def test_a_checkpoint_is_gone_on_from_by_as_many_as_there_were(tmp_path: Path) -> None:
    recipe = Recipe()
    mixed, _ = trained(recipe, kill("worker/2", step=3), folder=tmp_path / "first", steps=5, checkpoint_every=5)
    (kept,) = find_checkpoints(tmp_path / "first")
    then, _ = trained(recipe, kill("worker/1", step=7), folder=tmp_path / "then", resume=kept, checkpoint_every=5)
    mixed |= then
    counts = {step: [mixed[step, "worker/0"], mixed[step, "worker/3"]] for step in range(TORCH_STEPS)}
    expected = replayed(recipe, counts)
    assert [sum(equal(model, its) for model in recipe.models) for its in expected] == [3, 3]  # in the last step both groups mix
