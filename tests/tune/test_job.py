"""A trial as a job, and the space that a file describes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from zmqtrain.errors import TopologyError, UsageError
from zmqtrain.plan.efficiency import MeasuredModel, PaperModel
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.schema import Topology
from zmqtrain.tune.job import LIMIT_S, PARTS, SPARE, job_of, space_for, space_of
from zmqtrain.tune.trial import Setting, Trial


def topology_of(**sections: Any) -> Topology:
    document: dict[str, Any] = {
        "job": {"task": "given:task", "until": {"metric": "eval_accuracy", "reaches": 0.9}, "eval_every": 5, "seed": 7},
        "hosts": [{"name": "h[1-4]", "slots": 1}],
        "compute": {"group_size": 4, "batch_size": 32},
        "optimizer": {"scale_lr": "linear", "clip_norm": 2.0},
    }
    return Topology.from_dict(document | sections)


def trial(kind: Any, updates: int = 30, start: int | None = None) -> Trial:
    return Trial(9, Setting(2, 0.3, 0.05), updates, kind, "grid", "because", start)


def test_a_probe_keeps_nothing_and_may_be_stopped() -> None:
    job = job_of(topology_of(), trial("probe"), None)
    assert (job.compute.groups, job.compute.group_size, job.exchange.kind, job.exchange.staleness) == (
        2,
        2,
        "model_server",
        "async",
    )
    assert (job.job.steps, job.job.until, job.job.eval_every, job.job.checkpoint_every) == (15 * SPARE, None, 0, 0)
    assert (job.optimizer.lr, job.optimizer.momentum, job.optimizer.scale_lr, job.optimizer.clip_norm) == (0.05, 0.3, "none", 2.0)
    assert job.job.seed == 7
    assert Topology.from_dict(job.to_dict()) == job  # it can be written down and launched


def test_training_keeps_its_end_and_some_before(tmp_path: Path) -> None:
    job = job_of(topology_of(), trial("train", updates=32, start=3), tmp_path)
    assert job.job.steps == 16
    assert job.job.checkpoint_every == math.ceil(16 / PARTS)
    assert job.job.weights == str(tmp_path)
    assert job.job.seed == 7 + 4  # other data than those before, the same as all that begin there
    odd = job_of(topology_of(), trial("train", updates=26), None)
    assert odd.job.steps is not None
    assert odd.job.steps % odd.job.checkpoint_every == 0
    assert odd.job.steps >= 13
    assert job_of(topology_of(), trial("train", updates=1), None).job.steps == 1


def test_the_space_of_a_file() -> None:
    tune = {"momenta": [0.0, 0.5], "learning_rates": [0.1], "probe": 9, "period": 99, "cold": 0, "share": 0.2, "time_limit": "2 h"}
    space = space_of(topology_of(tune=tune), PaperModel(4, 8.0, 0.1, 1.0))
    assert space.groups == (1, 2, 4)
    assert space.saturation is None
    assert (space.momenta, space.rates, space.probe, space.period, space.cold) == ((0.0, 0.5), (0.1,), 9, 99, 0)
    assert (space.share, space.limit_s) == (0.2, 7200.0)
    assert space_of(topology_of(), PaperModel(4, 8.0, 0.1, 1.0), measured=False).saturation == 4
    unknown = space_of(topology_of(), MeasuredModel(4, lambda size: 0.0, 0.0))
    assert set(unknown.update_s.values()) == {1.0}


def test_the_space_of_a_job() -> None:
    """A search may take a tenth of search and training together; measuring has taken a part of that."""
    space = space_of(topology_of(tune={"share": 0.1}), PaperModel(4, 8.0, 0.1, 1.0))
    assert space.limit_s == LIMIT_S
    measured = {1: 4.0, 2: 2.0, 4: 2.0}
    found = space_for(space, measured, job_s=900.0, spent_s=20.0)
    assert (found.update_s, found.saturation) == (measured, 2)
    assert found.share * found.limit_s == pytest.approx(100.0 - 20.0)
    assert found.rates == space.rates
    assert space_for(space, measured, job_s=None).limit_s == LIMIT_S
    assert 0 < space_for(space, measured, job_s=9.0, spent_s=20.0).limit_s < 1e-6


def test_no_space() -> None:
    class Nothing:
        choices: tuple[int, ...] = ()

        def step(self, groups: int) -> Any:
            raise AssertionError

    with pytest.raises(UsageError, match="smaller than any group"):
        space_of(topology_of(), Nothing())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("momenta = []", "at least 1 item"),
        ("momenta = [1.0]", "less than 1"),
        ("learning_rates = [0.0]", "greater than 0"),
        ("share = 1.0", "less than 1"),
        ("prob = 3", "did you mean"),
    ],
)
def test_bad_sections(line: str, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        parse_topology(f"[job]\n[tune]\n{line}\n", file="job.toml", name="job")
