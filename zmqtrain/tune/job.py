"""Turns a trial into a job: the file's job with the trial's setting."""

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

#: The margin of a probe's length: a probe is stopped when all groups together have made its updates, and faster groups make more.
SPARE = 4
#: The number of checkpoints of a training: it can end early at each of them.
PARTS = 32
#: The default limit for search and training together, in seconds.
LIMIT_S = 3600.0


def job_of(topology: Topology, trial: Trial, weights: Path | None) -> Topology:
    """The topology of a trial's run. ``weights``: the checkpoint at which it begins.

    All trials that begin at the same checkpoint see the same data in the same order, which differs from that of earlier trials."""
    grouped = regrouped(topology, trial.setting.groups)
    steps = math.ceil(trial.updates / trial.setting.groups)
    every = 0
    if trial.kind == "train":  # checkpoints in between: training may end early
        every = math.ceil(steps / PARTS)
        steps = every * math.ceil(steps / every)
    elif trial.keeps:  # a checkpoint at its end
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
    """The space of a search, from ``[tune]`` and the predicted speeds. ``measured``: g* is not predicted, but measured first.

    Raises `UsageError` if there is nothing to choose from."""
    found = efficiencies(model)
    if not found:
        raise UsageError("the batch is smaller than any group: raise [compute] batch_size")
    update_s = {each.groups: each.seconds for each in found}
    if min(update_s.values()) <= 0:
        update_s = dict.fromkeys(update_s, 1.0)  # the speed is not known; it will be measured
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
    """The space of a search whose speeds have been measured, for a job that takes ``job_s`` seconds (none: as long as the space
    allows).

    The job is trained to its end, whatever the loss. The search may take ``share`` of search and training together, and
    ``spent_s`` of it has been used for measuring."""
    limit_s = space.limit_s if job_s is None else job_s / (1 - space.share)
    # The search uses only its share of the limit, so the limit must not be 0.
    saturation = fewest(update_s)
    return replace(
        space, update_s=dict(update_s), saturation=saturation, limit_s=max(limit_s - spent_s / space.share, 1e-9), target=None
    )
