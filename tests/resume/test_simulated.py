"""A run that is killed or preempted at any moment goes on from its newest checkpoint as if nothing had been.

Runs are drawn (`tests.resume.draws`): a few here, or as many as ``ZMQTRAIN_DRAWS`` says, from number ``ZMQTRAIN_FIRST_DRAW`` on
(0 where it is not set). The world is simulated, and torch computes. A failure names its draw, and
``pytest "tests/resume/test_simulated.py::test_...[17]"`` repeats it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.resume.draws import DONE, KILL, SAMPLES, Draw, Interruption, draw
from zmqtrain import Task
from zmqtrain.simulate.faults import kill
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints

DRAWS = int(os.environ.get("ZMQTRAIN_DRAWS", "4"))
FIRST_DRAW = int(os.environ.get("ZMQTRAIN_FIRST_DRAW", "0"))
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

    def __init__(self, drawn: Draw) -> None:
        self._drawn = drawn
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
        if not drawn.divided:
            self._x = torch.cat([torch.arange(SAMPLES, dtype=torch.float64)[:, None], self._x], 1)
        self._y = torch.randint(3, (SAMPLES,), generator=generator)
        self.models: list[nn.Module] = []

    def task(self) -> Task:
        data = TensorDataset(self._x, self._y)
        return Task(model=self._model, loss=nn.functional.cross_entropy, optimizer=self._optimizer, train_data=data, eval_data=data)

    def _model(self) -> nn.Module:
        first: list[nn.Module] = [] if self._drawn.divided else [Numbered()]
        layers = [nn.Linear(FEATURES, 7), nn.BatchNorm1d(7) if not self._drawn.divided else nn.Tanh(), nn.Tanh()]
        self.models.append(nn.Sequential(*first, *layers, nn.Linear(7, 4), nn.Linear(4, 3)).double())
        return self.models[-1]

    def _optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self._drawn.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Ran:
    """One run of the draw, or a part of it."""

    def __init__(self, folder: Path, drawn: Draw, *, steps: int, resume: Path | None, **how: Any) -> None:
        self.checkpoints = folder / "checkpoints"
        self.recipe = Recipe(drawn)
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

    def parameters(self) -> list[torch.Tensor]:
        """Of each model that was built."""
        return [torch.cat([tensor.detach().reshape(-1) for tensor in model.state_dict().values()]) for model in self.recipe.models]

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


def topology_of(folder: Path, drawn: Draw, steps: int) -> Topology:
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "profile.json"
    layers = [{"name": name, "numel": numel, "forward_s": 0.002, "backward_s": 0.004} for name, numel in LAYERS.items()]
    profile.write_text(json.dumps({"layers": layers}))
    sections = drawn.sections
    document: dict[str, Any] = {
        **sections,
        "job": {"task": "given:task", "steps": steps, "timeout": "20 s", "oversubscribe": True, **sections["job"]},
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


@pytest.mark.parametrize("seed", range(FIRST_DRAW, FIRST_DRAW + DRAWS))
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
    trained = again.parameters()[-len(whole.parameters()) :]
    if drawn.exact:
        for mine, theirs in zip(trained, whole.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    elif drawn.close:
        for mine, theirs in zip(trained, whole.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
