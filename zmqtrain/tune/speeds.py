"""Measures hardware efficiency, and from it how long a job takes, and whether a search is worthwhile."""

from __future__ import annotations

from collections.abc import Mapping

from zmqtrain.plan.efficiency import fewest
from zmqtrain.topology.rounded import rounded_duration
from zmqtrain.tune.machine import Life, Machine
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Done


class Speeds(Machine):
    """A few steps with each number of groups, fewest first, as long as there is time for a search after them."""

    def __init__(self, space: Space, updates: int | None = None) -> None:
        """``updates``: the job's updates, by all groups together. None: search and training are as long as the space allows."""
        self._updates = updates
        self.too_short: str | None = None
        """The reason not to search; empty if there is a search."""
        super().__init__(space)

    def _life(self) -> Life:
        for groups in self._space.groups:
            yield self._speed(groups)
            self.too_short = self._too_short()
            if self.too_short is not None:
                return Done(None, self.too_short)
        return Done(None, "the time of an update is known for each number of groups")

    @property
    def measured(self) -> dict[int, float]:
        """The measured seconds per update, by number of groups."""
        return {trial.setting.groups: outcome.update_s for trial, outcome in self.trials if outcome.updates}

    @property
    def known(self) -> Mapping[int, float]:
        """The seconds per update for all numbers of groups: those not measured are predicted, relative to those that were."""
        measured, predicted = self.measured, self._space.update_s
        scale = max((measured[groups] / predicted[groups] for groups in measured), default=1.0)
        return {groups: measured.get(groups, scale * predicted[groups]) for groups in self._space.groups}

    def job_s(self) -> float | None:
        """The seconds that the job takes with the best number of groups; ``None`` if that is not known."""
        return None if self._updates is None else self._updates * self.known[fewest(self.known)]

    def _too_short(self) -> str | None:
        """Whether the time is too short for the smallest search: the other speeds, each learning rate, and one setting of several
        groups."""
        space, job_s = self._space, self.job_s()
        if job_s is None:
            job_s = (1 - space.share) * space.limit_s
        run_s = self.search_s / len(self.trials)
        runs = len(space.groups) - len(self.trials) + len(space.rates) + 1
        may_s = job_s * space.share / (1 - space.share)
        if self.search_s + runs * run_s <= may_s:
            return None
        return (
            f"the job takes about {rounded_duration(job_s)}, so the search may take {rounded_duration(may_s)} ([tune] share), but "
            f"it needs {runs} more runs of {rounded_duration(run_s)} each: no search"
        )
