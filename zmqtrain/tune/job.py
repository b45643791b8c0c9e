"""A trial as a job: the file's, with the trial's setting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zmqtrain.errors import UsageError
from zmqtrain.plan.efficiency import Model, efficiencies, fewest
from zmqtrain.plan.regroup import regrouped
from zmqtrain.topology.schema import Topology
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Trial

#: A probe of several groups is stopped when it has made its updates; groups that are faster than others make more of them.
SPARE = 4
#: Checkpoints of a training: it can end before its time at each.
PARTS = 32
#: Seconds of search and training together, where neither the file nor the job says more.
LIMIT_S = 3600.0


def job_of(topology: Topology, trial: Trial, weights: Path | None) -> Topology:
    """The topology of a trial's run. ``weights``: the checkpoint at which it begins.

    All that begin at one checkpoint see the same data in the same order, another than those before."""
    grouped = regrouped(topology, trial.setting.groups)
    steps = math.ceil(trial.updates / trial.setting.groups)
    every = 0
    if trial.kind == "train":  # checkpoints on the way: training may end before its time
        every = math.ceil(steps / PARTS)
        steps = every * math.ceil(steps / every)
    elif trial.keeps:  # one at its end
        every = steps
    elif trial.setting.groups > 1:
        steps *= SPARE
    job: dict[str, Any] = {
        "steps": steps,
        "epochs": None,
        "until": None,
        "eval_every": 0,
        "checkpoint_every": every,
        "keep_checkpoints": 1,
        "weights": None if weights is None else str(weights),
        "seed": topology.job.seed + (0 if trial.start is None else trial.start + 1),
        "on_nan": "stop",
    }
    optimizer = {"lr": trial.setting.lr, "momentum": trial.setting.momentum, "scale_lr": "none"}
    return grouped.model_copy(
        update={
            "job": grouped.job.model_copy(update=job),
            "optimizer": grouped.optimizer.model_copy(update=optimizer),
            "exchange": grouped.exchange.model_copy(update={"staleness": "async"}),
        }
    )


def space_of(topology: Topology, model: Model, *, measured: bool = True) -> Space:
    """What is searched, by ``[tune]`` and the predicted speeds. ``measured``: g* is not predicted, but measured first.

    Raises `UsageError` where there is nothing to choose from."""
    found = efficiencies(model)
    if not found:
        raise UsageError("the batch is smaller than any group: raise [compute] batch_size")
    update_s = {each.groups: each.seconds for each in found}
    if min(update_s.values()) <= 0:
        update_s = dict.fromkeys(update_s, 1.0)  # nothing is known of the speed; it will be measured
    tune = topology.tune
    return Space(
        update_s,
        None if measured else fewest(update_s),
        momenta=tune.momenta,
        rates=tune.learning_rates,
        probe=tune.probe,
        period=tune.period,
        cold=tune.cold,
        share=tune.share,
        limit_s=LIMIT_S if tune.time_limit is None else tune.time_limit,
        smooth=tune.smooth,
        target=tune.target_loss,
    )


def space_for(space: Space, update_s: Mapping[int, float], *, job_s: float | None, spent_s: float = 0.0) -> Space:
    """The space of a search whose speeds have been measured, for a job that takes so long (none: as long as the space allows).

    The job is trained to its end, whatever the loss. Searching may take ``share`` of search and training together. ``spent_s`` of
    that has gone into measuring."""
    limit_s = space.limit_s if job_s is None else job_s / (1 - space.share)
    # A search looks at its share alone to see what it may take. Nothing would be left of a limit of 0.
    saturation = fewest(update_s)
    return replace(
        space, update_s=dict(update_s), saturation=saturation, limit_s=max(limit_s - spent_s / space.share, 1e-9), target=None
    )
