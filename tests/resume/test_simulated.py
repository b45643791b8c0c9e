"""A run that is killed or preempted at any moment goes on from its newest checkpoint as if nothing had been.

Runs are drawn (`tests.resume.draws`): a few here, or as many as ``ZMQTRAIN_DRAWS`` says, from number ``ZMQTRAIN_FIRST_DRAW`` on
(0 where it is not set). The world is simulated, and torch computes. A failure names its draw, and
``pytest "tests/resume/test_simulated.py::test_...[17]"`` repeats it.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from tests.resume.draws import DONE, KILL, SAMPLES, Draw, Interruption, draw
from zmqtrain import Task
from zmqtrain.run.faults import kill, restart
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints

DRAWS = int(os.environ.get("ZMQTRAIN_DRAWS", "4"))
FIRST_DRAW = int(os.environ.get("ZMQTRAIN_FIRST_DRAW", "0"))
#: Those that have failed once: 227 and 250 resume a run where it had ended, after a loss.
FOUND = (227, 250)
FEATURES = 5
#: Parameters of each layer that has any.
LAYERS = {"1": (FEATURES + 1) * 7, "2": 7 * 2, "4": 8 * 4, "5": 5 * 3}


class Numbered(nn.Module):
    """Takes the samples' numbers off, and notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[tuple[int, ...]] = []
        """Of each forward in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.trained.append(tuple(int(number) for number in x[:, 0]))
        return x[:, 1:]


class Recipe:
    """A task whose models can be looked at afterwards."""

    def __init__(self, drawn: Draw, *, norms: bool = True) -> None:
        """``norms``: with a layer that sees a worker's whole batch."""
        self._drawn, self._norms = drawn, norms
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
        if not drawn.divided:
            self._x = torch.cat([torch.arange(SAMPLES, dtype=torch.float64)[:, None], self._x], 1)
        self._y = torch.randint(3, (SAMPLES,), generator=generator)
        self.models: list[nn.Module] = []
        self.began: list[dict[str, torch.Tensor]] = []
        """The parameters with which each of them trained first."""

    def task(self) -> Task:
        data = TensorDataset(self._x, self._y)
        return Task(model=self._model, loss=nn.functional.cross_entropy, optimizer=self._optimizer, train_data=data, eval_data=data)

    def _model(self) -> nn.Module:
        first: list[nn.Module] = [] if self._drawn.divided else [Numbered()]
        layers = [nn.Linear(FEATURES, 7), self._norm(), nn.Tanh()]
        self.models.append(nn.Sequential(*first, *layers, nn.Linear(7, 4), nn.Linear(4, 3)).double())
        if not self._drawn.divided and not self._drawn.exchange.get("merged_fc"):
            handle = self.models[-1].register_forward_pre_hook(lambda model, _: self._begin(model, handle))
        return self.models[-1]

    def _norm(self) -> nn.Module:
        if self._drawn.divided:
            return nn.Tanh()
        return nn.BatchNorm1d(7) if self._norms else nn.LayerNorm(7)

    def _begin(self, model: nn.Module, handle: Any) -> None:
        if model.training:
            self.began.append({name: each.detach().clone() for name, each in model.named_parameters()})
            handle.remove()

    def _optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self._drawn.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Ran:
    """One run of the draw, or a part of it."""

    def __init__(
        self, folder: Path, drawn: Draw, *, steps: int | None, resume: Path | None, norms: bool = True, **how: Any
    ) -> None:
        self.checkpoints = folder / "checkpoints"
        self.recipe = Recipe(drawn, norms=norms)
        self.first = 0 if resume is None else Checkpoint(resume).step
        self.events: list[Mapping[str, Any]] = []
        self.failed: list[str] = []
        options = Options(
            task=self.recipe.task(),
            checkpoints=self.checkpoints,
            resume=resume,
            on_report=self._hear,
            on_checkpoint=self._told,
            **how,
        )
        topology = topology_of(folder, drawn, steps)
        self.result: Result = simulate(topology, options=options)
        assert self.result.broken == [], self.result.broken

    def _hear(self, peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        self.events += [{**event, "peer": peer} for event in events]

    def _told(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind != "checkpoint complete":
            self.failed.append(str(values["reason"]))

    @property
    def newest(self) -> Path | None:
        return (find_checkpoints(self.checkpoints) or [None])[-1]

    def parameters(self, last: int = 0) -> list[torch.Tensor]:
        """Of each model that was built, or of the ``last`` ones: a divided model of a run that was lost cannot be read."""
        models = self.recipe.models[-last:]
        return [torch.cat([tensor.detach().reshape(-1) for tensor in model.state_dict().values()]) for model in models]

    def ledger(self, until: int) -> dict[int, list[tuple[int, ...]]]:
        """The samples of each worker's steps before ``until``, whichever worker it was."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for model in self.recipe.models:
            if not isinstance(model[0], Numbered):  # the FC server's
                continue
            parts = model[0].trained
            times = self._parts_a_step
            for step, start in enumerate(range(0, len(parts), times), self.first):
                if step < until:
                    found.setdefault(step, []).append(
                        tuple(sorted(number for part in parts[start : start + times] for number in part))
                    )
        return {step: sorted(samples) for step, samples in found.items()}

    @property
    def _parts_a_step(self) -> int:
        return int(self.recipe._drawn.sections["compute"]["accumulate"])


def topology_of(folder: Path, drawn: Draw, steps: int | None) -> Topology:
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "profile.json"
    layers = [{"name": name, "numel": numel, "forward_s": 0.002, "backward_s": 0.004} for name, numel in LAYERS.items()]
    profile.write_text(json.dumps({"layers": layers}))
    sections = drawn.sections
    length = {} if steps is None else {"steps": steps}
    document: dict[str, Any] = {
        **sections,
        "job": {"task": "given:task", "timeout": "20 s", "oversubscribe": True, **length, **sections["job"]},
        "hosts": [{"name": "h[1-4]", "slots": 2}],
        "compute": {"profile": str(profile), "device": "cpu" if drawn.divided else "modelled", **sections["compute"]},
        "network": {"bandwidth": "1 Gbit/s", "latency": "100 us"},
        "simulation": {"payload": "real"},
        "parallel": {"verify": False},  # in each part of each run it would take longer than the part
    }
    if drawn.divided:
        document["compute"].pop("profile")
    return Topology.from_dict(document)


def interrupted(folder: Path, drawn: Draw, what: Interruption, resume: Path | None, seconds: float) -> Ran:
    """The run until it is killed or preempted, or has done some of its steps."""
    first = 0 if resume is None else Checkpoint(resume).step
    steps = drawn.steps
    how: dict[str, Any] = {}
    if what.kind == DONE:
        steps = max(first + 1, min(drawn.steps - 1, round(what.when * drawn.steps)))
    elif what.kind == KILL:
        roles = place(topology_of(folder, drawn, steps)).roles
        how["faults"] = [kill(roles[int(what.target * len(roles))].peer, at=what.when * seconds)]
    else:
        how["preempt_at_s"] = what.when * seconds
    return Ran(folder, drawn, steps=steps, resume=resume, **how)


@pytest.mark.parametrize("seed", sorted({*FOUND, *range(FIRST_DRAW, FIRST_DRAW + DRAWS)}))
def test_a_run_goes_on_as_if_nothing_had_been(seed: int, tmp_path: Path) -> None:
    drawn = draw(seed)
    whole = Ran(tmp_path / "whole", drawn, steps=drawn.steps, resume=None)
    assert whole.result.ending.status == "done", whole.result.ending
    assert whole.failed == []
    ledger: dict[int, list[tuple[int, ...]]] = {}
    newest, lost = None, False
    for number, what in enumerate(drawn.interruptions):
        if newest is not None and Checkpoint(newest).step == drawn.steps:
            break
        part = interrupted(tmp_path / f"part{number}", drawn, what, newest, whole.result.seconds)
        lost = lost or (drawn.elastic and what.kind == KILL)
        if part.newest is not None:
            newest = part.newest
            ledger |= {step: part.ledger(drawn.steps).get(step, []) for step in range(part.first, Checkpoint(newest).step)}
        if part.result.ending.status == "preempted":
            stopped = next(event for event in part.events if event["kind"] == "stopped")
            assert stopped["values"]["kept"] == (stopped["step"] > part.first), part.failed
            assert newest is None or Checkpoint(newest).step == stopped["step"]
    rest = Ran(tmp_path / "rest", drawn, steps=drawn.steps, resume=newest)
    assert rest.result.ending.status == "done", rest.result.ending
    if rest.first == drawn.steps:
        return
    if drawn.exact:
        for mine, theirs in zip(rest.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    elif drawn.close:
        for mine, theirs in zip(rest.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    if not drawn.divided and not lost:
        assert ledger | rest.ledger(drawn.steps) == whole.ledger(drawn.steps)


@pytest.mark.parametrize("seed", range(FIRST_DRAW + 1000, FIRST_DRAW + 1000 + DRAWS))
def test_a_run_goes_on_with_other_servers(seed: int, tmp_path: Path) -> None:
    """Another number of model servers, and pieces of other sizes. An update changes each element by itself, so that the bits stay
    the same, but for the order of sums of a norm."""
    drawn = next(each for each in (draw(seed + 10_000 * turn) for turn in range(1000)) if suits(each))
    whole = Ran(tmp_path / "whole", drawn, steps=drawn.steps, resume=None)
    part = Ran(tmp_path / "part", drawn, steps=drawn.steps // 2, resume=None)
    assert part.newest is not None
    exchange = drawn.sections["exchange"]
    exchange |= {
        "shards": 1 + exchange["shards"] % 5 if seed % 3 else exchange["shards"],
        "split_size": ("64 B", "100 B")[seed % 2],
    }
    rest = Ran(tmp_path / "rest", drawn, steps=drawn.steps, resume=part.newest)
    assert rest.result.ending.status == "done", rest.result.ending
    assert rest.first == drawn.steps // 2
    if drawn.exact or drawn.close:
        for mine, theirs in zip(rest.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    if not drawn.divided:
        ledger = {step: part.ledger(drawn.steps)[step] for step in range(rest.first)}
        assert ledger | rest.ledger(drawn.steps) == whole.ledger(drawn.steps)


@pytest.mark.parametrize("seed", range(FIRST_DRAW + 2000, FIRST_DRAW + 2000 + DRAWS))
def test_a_run_goes_on_with_other_groups(seed: int, tmp_path: Path) -> None:
    """Groups, their size and, in every second draw, the samples of a step of all of them are others."""
    drawn = next(each for each in (draw(seed + 10_000 * turn) for turn in range(1000)) if regroups(each))
    chance = random.Random(f"groups {seed}")
    compute, exchange, job = (drawn.sections[name] for name in ("compute", "exchange", "job"))
    was = compute["groups"], compute["batch_size"]
    ring = drawn.sections["data"]["shuffle"] == "ring"
    every = exchange["every"] if exchange["kind"] == "allreduce" and not ring else 1
    if ring and exchange["kind"] == "allreduce":
        exchange["every"] = 1
    lap = -(-SAMPLES // was[0] // was[1]) if ring else 1
    half = max(lap, chance.randint(1, 5) // every * every or every)
    half = half // lap * lap
    job["checkpoint_every"] = half
    whole = Ran(tmp_path / "whole", drawn, steps=half + 6, resume=None, norms=False)
    part = Ran(tmp_path / "part", drawn, steps=half, resume=None, norms=False)
    assert part.result.ending.status == "done", part.result.ending
    assert part.newest is not None
    alone = exchange["kind"] == "model_server" or (exchange["kind"] == "allreduce" and not keeps_unsent(drawn))
    least = 1 if alone else 2
    same = seed % 2 == 0
    others = [groups for groups in range(least, 5) if groups != was[0] and not (same and was[0] * was[1] % groups)]
    compute["groups"] = chance.choice(others)
    compute["batch_size"] = was[0] * was[1] // compute["groups"] if same else chance.choice([4, 8, 4 if ring else 10])
    if not exchange.get("merged_fc") and not drawn.divided and not keeps_unsent(drawn):
        compute["group_size"] = chance.choice([1, 2]) if compute["groups"] < 4 else 1
    rest = Ran(tmp_path / "rest", drawn, steps=half + 6, resume=part.newest, norms=False)
    assert rest.result.ending.status == "done", rest.result.ending
    assert rest.first == half
    in_step = exchange["kind"] == "allreduce" or exchange.get("staleness") == "sync"
    if in_step and same and not ring and exchange.get("compression", "none") == "none":
        assert rest.newest is not None
        assert whole.newest is not None
        mine, theirs = (load_file(ran.newest / "model.safetensors") for ran in (rest, whole))
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-11)
    kept = load_file(part.newest / "model.safetensors")
    for began in rest.recipe.began:
        for name, tensor in began.items():
            torch.testing.assert_close(tensor, kept[name], rtol=1e-12, atol=1e-14)
    if not drawn.divided:
        assert_each_once({**part.ledger(half), **rest.ledger(half + 6)}, half, was, compute, ring=ring)


def assert_each_once(
    ledger: Mapping[int, list[tuple[int, ...]]], half: int, was: tuple[int, int], compute: Mapping[str, Any], *, ring: bool
) -> None:
    """No epoch has a sample twice, and as many as fill steps: of the old groups before ``half``, and of the others after it."""
    seen: set[int] = set()
    for step in range(len(ledger)):
        groups, batch = was if step < half else (compute["groups"], compute["batch_size"])
        mine = [number for samples in ledger[step] for number in samples]
        left = SAMPLES - len(seen)
        if left == 0 or (not ring and left < groups * batch):
            seen.clear()
        assert ring or len(mine) == groups * batch
        assert len(set(mine)) == len(mine)
        assert not seen & set(mine), step
        seen |= set(mine)


def regroups(drawn: Draw) -> bool:
    """Whether its checkpoints keep nothing of each group's own that others could not go on with."""
    averaging = drawn.exchange.get("averaging", {})
    return not (averaging.get("method") == "elastic" and averaging.get("overlap_steps"))


def keeps_unsent(drawn: Draw) -> bool:
    """Whether its checkpoints keep what each worker has still to send."""
    exchange = drawn.exchange
    rounded = exchange.get("averaging", {}).get("deltas", "float32") != "float32"
    return rounded or exchange.get("compression", "none") not in ("none", "fp16")


def suits(drawn: Draw) -> bool:
    """Whether servers have all that its checkpoints keep of gradients."""
    exchange = drawn.sections["exchange"]
    return exchange["kind"] == "model_server" and exchange["compression"] in ("none", "fp16")


@pytest.mark.parametrize("seed", range(FIRST_DRAW + 500, FIRST_DRAW + 500 + DRAWS))
def test_a_run_begins_again_by_itself(seed: int, tmp_path: Path) -> None:
    """With ``restarts``, a run that cannot go on without a role that was killed, whatever it is."""
    drawn = draw(seed)
    drawn.sections["job"] |= {"elastic": False, "restarts": 3}
    whole = Ran(tmp_path / "whole", drawn, steps=drawn.steps, resume=None)
    roles = place(topology_of(tmp_path / "whole", drawn, drawn.steps)).roles
    victims = [roles[int(what.target * len(roles))].peer for what in drawn.interruptions]
    faults = [
        kill(victim, at=(number + what.when) * whole.result.seconds)
        for number, (victim, what) in enumerate(zip(victims, drawn.interruptions, strict=True))
    ]
    restarts: list[tuple[int, int | None]] = []
    again = Ran(
        tmp_path / "again",
        drawn,
        steps=drawn.steps,
        resume=None,
        faults=faults,
        on_restart=lambda again, ending, step: restarts.append((again.number, step)),
    )
    assert again.result.ending.status == "done", again.result.ending
    assert again.result.attempts == 1 + len(restarts)
    assert [number for number, _ in restarts] == list(range(1, 1 + len(restarts)))
    trained = again.parameters(len(whole.recipe.models))
    if drawn.exact:
        for mine, theirs in zip(trained, whole.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    elif drawn.close:
        for mine, theirs in zip(trained, whole.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["allreduce", "model_server"])
def test_who_comes_back_after_other_groups_went_on_takes_its_part(kind: str, tmp_path: Path) -> None:
    """It has not read the checkpoint, but knows which samples a step takes."""
    exchange = {"kind": kind} if kind == "allreduce" else {"kind": kind, "staleness": "async", "merged_fc": False}
    sections: dict[str, dict[str, Any]] = {
        "job": {"seed": 1, "checkpoint_every": 2, "elastic": True, "restarts": 3},
        "compute": {"groups": 2, "group_size": 1, "batch_size": 16, "accumulate": 1, "bucket_size": "4 MiB"},
        "exchange": exchange,
        "data": {"shuffle": "global"},
    }
    drawn = Draw(0, sections, 2, "sgd", ())
    part = Ran(tmp_path / "part", drawn, steps=2, resume=None, norms=False)
    assert part.newest is not None
    sections["compute"] |= {"groups": 3, "batch_size": 8}  # one step more in the first epoch, then four in each
    sections["job"] |= {"epochs": 5}
    calm = Ran(tmp_path / "calm", drawn, steps=None, resume=part.newest, norms=False)
    faults = [restart("worker/1", at=0.2 * calm.result.seconds, after=0.01 * calm.result.seconds)]
    rest = Ran(tmp_path / "rest", drawn, steps=None, resume=part.newest, norms=False, faults=faults)
    assert rest.result.ending.status == "done", rest.result.ending
    assert len(rest.recipe.models) > len(calm.recipe.models)
    expected, found = (Counter(n for model in ran.recipe.models for part in model[0].trained for n in part) for ran in (calm, rest))
    assert expected.total() == 24 + 4 * 96
    assert not expected - found


def test_what_lost_workers_have_left_is_for_as_many_groups(tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "job": {"seed": 1, "checkpoint_every": 1, "elastic": True},
        "compute": {"groups": 3, "group_size": 1, "batch_size": 8, "accumulate": 1, "bucket_size": "4 MiB"},
        "exchange": {"kind": "allreduce"},
        "data": {"shuffle": "global"},
    }
    drawn = Draw(0, sections, 6, "sgd", ())
    part = Ran(tmp_path / "part", drawn, steps=6, resume=None, faults=[kill("worker/1", step=3)])
    assert part.newest is not None
    assert part.result.ending.status == "done", part.result.ending
    rest = Ran(tmp_path / "rest", drawn, steps=8, resume=part.newest)
    assert rest.result.ending.status == "done", rest.result.ending
    sections["compute"] |= {"groups": 2}
    other = Ran(tmp_path / "other", drawn, steps=8, resume=part.newest)
    assert other.result.ending.exit_code == 66
    assert "what these had left is counted in the batches of 3 groups with batch_size = 8" in str(other.result.ending.error)
