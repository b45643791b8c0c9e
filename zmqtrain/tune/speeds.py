"""Hardware efficiency as it is, and what follows from it: how long a job takes, and whether it is worth a search."""

from __future__ import annotations

from collections.abc import Mapping

from zmqtrain.plan.efficiency import fewest
from zmqtrain.tune.machine import Life, Machine
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done


class Speeds(Machine):
    """A few steps with each number of groups, fewest first, as long as there is time for a search after them."""

    def __init__(self, space: Space, updates: int | None = None) -> None:
        """``updates``: the job's, by all groups together. None: search and training are as long as the space allows."""
        self._updates = updates
        self.too_short: str | None = None
        """Why there is to be no search, if so."""
        super().__init__(space)

    def _life(self) -> Life:
        for groups in self._space.groups:
            yield self._speed(groups)
            self.too_short = self._too_short()
            if self.too_short is not None:
                return Done(None, self.too_short)
        return Done(None, "it is known how long an update takes with each number of groups")

    @property
    def measured(self) -> dict[int, float]:
        """Seconds of an update, by groups, of those that were measured."""
        return {trial.setting.groups: outcome.update_s for trial, outcome in self.trials if outcome.updates}

    @property
    def known(self) -> Mapping[int, float]:
        """The same for all numbers of groups: those that were not measured are as predicted, beside those that were."""
        measured, predicted = self.measured, self._space.update_s
        scale = max((measured[groups] / predicted[groups] for groups in measured), default=1.0)
        return {groups: measured.get(groups, scale * predicted[groups]) for groups in self._space.groups}

    def job_s(self) -> float | None:
        """How long the job takes, with as many groups as are of use; none where nobody knows."""
        return None if self._updates is None else self._updates * self.known[fewest(self.known)]

    def _too_short(self) -> str | None:
        """The least that is still to be searched: the other speeds, each learning rate, and one setting of several groups."""
        space, job_s = self._space, self.job_s()
        if job_s is None:
            job_s = (1 - space.share) * space.limit_s
        run_s = self.search_s / len(self.trials)
        runs = len(space.groups) - len(self.trials) + len(space.rates) + 1
        may_s = job_s * space.share / (1 - space.share)
        if self.search_s + runs * run_s <= may_s:
            return None
        return (
            f"the job takes about {job_s:.3g} s, so {may_s:.3g} s may be searched ([tune] share), but that needs {runs} more runs, "
            f"of {run_s:.3g} s each: no search"
        )
