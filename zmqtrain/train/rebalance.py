"""The coroutine around `zmqtrain.train.balance`: workers exchange their measured speeds, and all make the same decision."""

from __future__ import annotations

import statistics

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.events import Recorder
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.balance import decide, due
from zmqtrain.train.shares import Shares
from zmqtrain.wire.tensor import TensorPayload

#: Steps from a decision to the first step with the new parts: the next step's batch is already being fetched.
AHEAD = 2


def announce(context: RoleContext, shares: Shares, step: int) -> None:
    """Record the parts with which the run begins, if they are not simply even."""
    parts = context.topology.compute.parts
    if parts == "even" or context.role.peer != shares.scope.members[0]:
        return
    reason = "even until the workers' speeds are measured" if parts == "measured" else "the weights in the topology file"
    context.recorder.event("parts", step=step, parts=list(shares.at(step)), reason=reason)


class Rebalance:
    """Changes a worker's `Shares`, at the same steps as on all workers with which it divides samples."""

    def __init__(self, group: Group, shares: Shares, *, every: int, least: int, recorder: Recorder) -> None:
        """``group``: the scope of the shares. ``every``: steps between decisions. ``least``: the fewest samples of a worker."""
        self._group, self._shares, self._every, self._least, self._recorder = group, shares, every, least, recorder
        self._steps = 0
        self._sample_s: list[float] = []  # measured with the current parts
        self._since = 0

    @classmethod
    def of(cls, context: RoleContext, shares: Shares) -> Rebalance | None:
        """As the topology asks for it; ``None`` if parts stay as they are, or this worker divides samples with no other."""
        compute, members = context.topology.compute, shares.scope.members
        if compute.parts != "measured" or len(members) == 1:
            return None
        # The others may evaluate or write a checkpoint while this worker waits for them.
        timeout_s = context.timeouts.barrier_s
        group = Group(context.endpoint, members, members.index(context.role.peer), f"parts/{members[0]}", timeout_s=timeout_s)
        return cls(group, shares, every=compute.rebalance_every, least=compute.accumulate, recorder=context.recorder)

    async def after(self, step: int, samples: int, seconds: float) -> None:
        """Called after ``step`` was trained: ``samples`` samples took ``seconds`` to compute. All of the scope call it for the same
        steps."""
        self._steps += 1
        if step >= self._since and samples:
            self._sample_s.append(seconds / samples)
        if not due(self._steps, self._every):
            return
        told = TensorPayload.empty(self._group.size, "float64")
        told.numpy()[:] = 0.0
        told.numpy()[self._group.rank] = statistics.median(self._sample_s) if self._sample_s else 0.0
        await all_reduce(self._group, told, ("parts", step))
        self._sample_s.clear()
        sample_s = [float(seconds) for seconds in told.numpy()]
        before = self._shares.at(step + AHEAD)
        decision = decide(before, sample_s, least=self._least)
        if decision.changed:
            self._since = step + AHEAD
            self._shares.change(self._since, decision.parts)
        if self._group.rank == 0:
            self._recorder.event(
                "parts",
                step=step + AHEAD,
                parts=list(decision.parts),
                before=list(before),
                changed=decision.changed,
                sample_s=list(sample_s),
                gain=decision.gain,
                reason=decision.reason,
            )
