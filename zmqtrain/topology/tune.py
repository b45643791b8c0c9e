"""``[tune]``: what `zmqtrain tune` chooses from, and how much time it may spend."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from zmqtrain.topology.section import MOST, Section, _tuple
from zmqtrain.topology.simulation import VirtualTime

Momentum = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, lt=1e30)]


class Tune(Section):
    """The search for the number of groups, momentum and learning rate."""

    target_loss: float | None = Field(
        default=None, ge=-1e30, lt=1e30, description="Done when the training loss, smoothed over `smooth` updates, is at most this."
    )
    smooth: int = Field(default=20, ge=1, le=MOST, description="Updates over which the loss is smoothed before it is compared.")
    time_limit: VirtualTime | None = Field(
        default=None,
        description="Search and training together, in the time of the run's world. Default: an hour; in a launch with "
        '`groups = "auto"`, as long as the job takes at the speeds that are measured first.',
    )
    momenta: Annotated[tuple[Momentum, ...], BeforeValidator(_tuple)] = Field(
        default=(0.0, 0.3, 0.6, 0.9), min_length=1, description="The optimizer's own momenta to choose from."
    )
    learning_rates: Annotated[tuple[Rate, ...], BeforeValidator(_tuple)] = Field(
        default=(1e-4, 1e-3, 1e-2, 1e-1),
        min_length=1,
        description="Learning rates of the first sweep; later sweeps try the best rate and one tenth of that rate.",
    )
    probe: int = Field(
        default=60,
        ge=1,
        le=MOST,
        description="Updates of a trial with the most groups; trials with fewer groups get the same time.",
    )
    period: int = Field(default=2000, ge=1, le=MOST, description="Updates of training between two searches, at least.")
    cold: int = Field(
        default=200, ge=0, le=MOST, description="Updates of training after the first, rough search, if there is no target_loss."
    )
    share: float = Field(default=0.1, gt=0, lt=1, description="The largest share of all time that may be spent on searching.")
    beyond: float = Field(
        default=4.0,
        ge=1,
        le=1e6,
        description="--curves: a run is stopped once it has taken this many times as long as the best run so far.",
    )
    bayesian_trials: int = Field(
        default=24, ge=1, le=10_000, description="Trials of the Bayesian baseline, however long they take."
    )
