"""As `tests.resume.test_simulated`, with real processes: two of the draws, and as many as ``ZMQTRAIN_PROCESS_DRAWS`` says."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.launcher.launched import Launched
from tests.resume.draws import DONE, KILL, PREEMPT, Draw, Interruption, draw
from zmqtrain.run.preemption import PREEMPTED
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import Checkpoint, find_checkpoints

#: More of them would only wait for each other.
MOST_ROLES = 4
#: The drawn ones have this number and the following.
FIRST_DRAW = int(os.environ.get("ZMQTRAIN_FIRST_DRAW", "5000"))
#: Steps of a run in processes, for each of a draw's: long enough to be interrupted.
LONGER = 4
TASK = """
import os, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

class Numbered(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder
    def forward(self, x):
        if self.training:
            with open(f"{self.folder}/{os.getpid()}", "a") as file:
                print(*(int(number) for number in x[:, 0]), file=file)
        return x[:, 1:]

def loss(output, target):
    time.sleep(0.06)
    return nn.functional.cross_entropy(output, target)

def task(folder, optimizer, divided):
    print("ready")
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(96, 5, generator=generator, dtype=torch.float64), torch.randint(3, (96,), generator=generator)
    first = [] if divided else [Numbered(folder)]
    if not divided:
        x = torch.cat([torch.arange(96, dtype=torch.float64)[:, None], x], 1)
    def model():
        between = [nn.Tanh(), nn.Tanh()] if divided else [nn.BatchNorm1d(7), nn.Dropout(0.2)]
        return nn.Sequential(*first, nn.Linear(5, 7), *between, nn.Linear(7, 4), nn.Linear(4, 3)).double()
    def make(parameters):
        if optimizer == "adam":
            return torch.optim.Adam(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    data = TensorDataset(x, y)
    return Task(model=model, loss=loss, optimizer=make, train_data=data, eval_data=data)
"""


#: Draws that the suite runs: all-reduce with gradients that wait for their exchange, and synchronous servers.
SHOWN: tuple[int, ...] = (5010, 5007)


def _drawn() -> list[Draw]:
    """Those of few processes."""
    wanted = int(os.environ.get("ZMQTRAIN_PROCESS_DRAWS", "0"))
    if not wanted:
        return [draw(seed) for seed in SHOWN]
    return list(islice((each for each in map(draw, count(FIRST_DRAW)) if _roles(each) <= MOST_ROLES), wanted))


def _roles(drawn: Draw) -> int:
    return len(place(_topology(drawn, drawn.steps, "")).roles)


def _topology(drawn: Draw, steps: int, ledger: str) -> Topology:
    sections = drawn.sections
    args = {"folder": ledger, "optimizer": drawn.optimizer, "divided": drawn.divided}
    job = {"task": "task.py", "args": args, "steps": steps, "timeout": "30 s", "oversubscribe": True, **sections["job"]}
    job["checkpoint_every"] = LONGER * job["checkpoint_every"] - 1
    document: dict[str, Any] = {**sections, "job": job, "compute": {"device": "cpu", "threads": 1, **sections["compute"]}}
    return Topology.from_dict(document)


class Ran:
    """One launch of the draw, or a part of it."""

    def __init__(self, folder: Path, drawn: Draw, steps: int, resume: Path | None, what: Interruption | None = None) -> None:
        folder.mkdir()
        self._ledger = folder / "ledger"
        self._ledger.mkdir()
        self._times = int(drawn.sections["compute"]["accumulate"])
        self.first = 0 if resume is None else Checkpoint(resume).step
        (folder / "task.py").write_text(TASK)
        (folder / "trial.toml").write_text(_topology(drawn, steps, str(self._ledger)).to_toml())
        with Launched(folder, "trial.toml", *(() if resume is None else ("--resume", str(resume)))) as run:
            self.run = run.run
            if what is not None and what.kind != DONE:
                run.wait_for("^step ")
                time.sleep(what.when)  # any moment
                self._interrupt(run, what)
            self.code = run.end()
            self.said = repr(run)
        self.newest = (find_checkpoints(self.run / "checkpoints") or [resume])[-1]
        self.summary = run.json("summary.json")

    @staticmethod
    def _interrupt(run: Launched, what: Interruption) -> None:
        if what.kind == PREEMPT:
            with suppress(ProcessLookupError):
                os.kill(run.pid, signal.SIGUSR1)
            return
        with suppress(psutil.Error):  # it may be over
            below = psutil.Process(run.pid).children(recursive=True)
            roles = [each for each in below if not each.children() and "agent" not in each.cmdline()]
            if roles:
                sorted(roles, key=lambda each: each.pid)[int(what.target * len(roles))].kill()

    def ledger(self, until: int) -> dict[int, list[tuple[int, ...]]]:
        """The samples of each worker's steps before ``until``, whichever worker it was."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for file in self._ledger.iterdir():
            parts = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
            for step, start in enumerate(range(0, len(parts), self._times), self.first):
                if step < until:
                    one = sorted(number for part in parts[start : start + self._times] for number in part)
                    found.setdefault(step, []).append(tuple(one))
        return {step: sorted(samples) for step, samples in found.items()}


@pytest.mark.parametrize("drawn", _drawn(), ids=lambda drawn: str(drawn.seed))
def test_a_run_goes_on_as_if_nothing_had_been(drawn: Draw, tmp_path: Path) -> None:
    steps = LONGER * drawn.steps
    whole = Ran(tmp_path / "whole", drawn, steps, None)
    assert whole.code == 0, whole.said
    ledger: dict[int, list[tuple[int, ...]]] = {}
    newest, lost = None, False
    for number, what in enumerate(drawn.interruptions):
        first = 0 if newest is None else Checkpoint(newest).step
        if first == steps:
            break
        until = max(first + 1, min(steps - 1, round(what.when * steps))) if what.kind == DONE else steps
        part = Ran(tmp_path / f"part{number}", drawn, until, newest, what)
        lost = lost or (drawn.elastic and what.kind == KILL)
        if part.newest is not None and part.newest != newest:
            newest = part.newest
            ledger |= {step: part.ledger(steps).get(step, []) for step in range(part.first, Checkpoint(newest).step)}
        if part.code == PREEMPTED:
            assert part.summary["checkpoints"]["failed"] == [], part.said
            assert newest is not None
            assert re.search(rf"preempted after step {Checkpoint(newest).step} \(.*\): --resume", part.said)
    rest = Ran(tmp_path / "rest", drawn, steps, newest)
    assert rest.code == 0, rest.said
    if rest.first == steps:
        return
    mine, theirs = (load_file(each.run / "model.safetensors") for each in (rest, whole))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        if drawn.exact:
            assert torch.equal(tensor, theirs[name]), name
        elif drawn.close:
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-11)
    if not drawn.divided and not lost:
        assert ledger | rest.ledger(steps) == whole.ledger(steps)
