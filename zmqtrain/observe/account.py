"""The account of a run's samples, from its events: how many were due, counted, trained again and lost, and why.

A sample *counts* if its gradient is part of the model. Where all workers stay, what they have trained counts. If workers may be
lost, what they report says too little: a report may be lost with its sender, or be about a step that was given up. Then it is
counted where it is decided. Model servers say how many batches count for all of the model. With all-reduce the sums of a step are
over the usual number of samples, unless workers say otherwise. With gossip and averaging groups train what lost ones have left, and
say at the end how many batches count. Otherwise (gossip of gradients, scripts) what a group trains counts as long as somebody of it
is there; of a group that is lost it counts up to the last exchange in which others have got it.

If a run begins again from a checkpoint, what that holds counts once, and what was trained after it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zmqtrain.data.division import in_proportion
from zmqtrain.observe.sums import SUMS, fields_of
from zmqtrain.topology.schema import Topology


class SampleAccount:
    """Feed it events (`add`)."""

    def __init__(self, begins: int | None = 0) -> None:
        """``begins``: the step with which the run begins; ``None``: that of a checkpoint, which its workers say."""
        self._begins = begins
        self._known = True  # whether each step of a group has the same number of samples
        self._earlier = 0  # the samples in the checkpoint from which the run has begun again, since its first step
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._first: int | None = None
        self._planned: int | None = None
        self._due: int | None = None  # samples until the end of a run whose workers divide what lost ones have left
        self._steps = 0
        self._trained = 0
        self._views: dict[int, tuple[int, tuple[str, ...]]] = {}  # version -> its first step, and the members
        self._counted: dict[int, int] = {}  # step of an exchange -> the number of samples that count in it, if it is not the usual
        self._served: dict[str, tuple[int, int]] = {}  # server -> the fewest and the most batches in one of its pieces
        self._shards: set[int] = set()  # those of which a server has said so
        self._batches: int | None = None  # those that count, if groups with models of their own take turns at them
        self._left_out: dict[int, set[str]] = {}  # step of an exchange -> the members of whom somebody got nothing in it
        self._late: dict[str, set[int]] = {}  # worker -> the first steps of its lives

    def add(self, peer: str, event: Mapping[str, Any]) -> None:
        """Take one event, as in ``events.jsonl``."""
        values, kind = event["values"], event["kind"]
        if kind == "step":
            self._trained += int(values.get("samples", 0))
            self._steps = max(self._steps, 1 + (event["step"] or 0))
        elif kind == SUMS and values["of"] == "step":
            fields = fields_of(values)
            self._trained += int(fields["samples"].total) if "samples" in fields else 0
            self._steps = max(self._steps, 1 + event["step"])
        elif kind == "start":
            self._begin(event["step"] or 0, values)
            self._late.setdefault(peer, set()).add(event["step"] or 0)
        elif kind == "view" and values.get("version") is not None:
            self._views[int(values["version"])] = int(event["step"]), tuple(values["members"])
        elif kind == "counted":
            self._counted[int(event["step"])] = int(values["samples"])
        elif kind == "left_out":
            self._left_out.setdefault(int(event["step"]), set()).update(values["workers"])
        elif kind in ("finish", "stopped") and values.get("batches") is not None:
            self._batches = max(self._batches or 0, int(values["batches"]))
        elif kind == "server":
            self._shards.update(values.get("shards") or ())
            if values.get("batches") is not None:
                self._served[peer] = int(values["batches"]), int(values["batches_most"])
        elif kind == "restart":
            self._earlier = int(values["samples"] or 0)
            self._begins = self._begins if event["step"] is None else int(event["step"])
            self._begin_attempt()

    def before(self, step: int, topology: Topology) -> int:
        """The samples that count in a checkpoint of this step. An elastic run does not say what was lost before: 0; but where those
        that are left form another grid nothing is."""
        if topology.elastic and not topology.forms_grids:
            return 0
        # Workers that end within a moment of their begin may have reported nothing, and yet have kept a checkpoint.
        since = self._begins if self._first is None else self._first
        if since is None:
            return self._earlier  # nothing is known to be trained since the checkpoint was read
        return self._earlier + max(0, step - since) * topology.compute.groups * topology.compute.batch_size

    def _begin(self, step: int, values: Mapping[str, Any]) -> None:
        if self._first is None or step < self._first:  # those that come later may have more steps, of what others have left
            self._first = step
            if isinstance(values.get("steps"), int):
                self._planned = int(values["steps"])
            if isinstance(values.get("due"), int):
                self._due = int(values["due"])
        if isinstance(data := values.get("data"), Mapping) and data.get("source") != "dataset":
            self._known = False

    def to_dict(self, topology: Topology, *, done: bool) -> dict[str, Any] | None:
        """The account for ``summary.json``; ``None`` if nothing was trained, or if it is not known how many samples are due
        (streams, the sample ring), or if a server was lost at the very end that had counted them. ``done``: whether the run has
        ended well."""
        compute = topology.compute
        ring = topology.data.shuffle == "ring"
        if self._first is None or not self._known or ring or topology.hosts_open:
            return None
        if topology.replicated and len(self._shards) < topology.servers and (done or self._shards):
            return None  # another server would have gone on with the shard
        batch, groups = compute.batch_size, compute.groups
        until = self._steps
        summed = topology.elastic and topology.exchange.kind == "allreduce"
        divided = bool(self._served) or summed or self._batches is not None  # others train what lost workers have left
        whole = topology.elastic and divided and topology.job.steps is None and topology.job.until is None
        if whole and done and self._planned is not None:
            until = self._planned  # in whole epochs; survivors need more steps of their own for these
        elif self._planned is not None:
            until = min(until, self._planned)
        due = max(0, until - self._first) * groups * batch
        counted = self._trained
        if topology.elastic and self._served:
            due = due if self._due is None else self._due
            counted = min(fewest for fewest, _ in self._served.values()) * batch
        elif summed:
            every = topology.exchange.every_steps(groups)
            exchanges = range(self._first // every * every + every - 1, self._steps, every)
            usual = {step: sum(self._usual(topology, each) for each in range(step - every + 1, step + 1)) for step in exchanges}
            # Steps after the last exchange are not applied.
            if whole or topology.job.on_resize == "keep":
                due = max(0, until - until % every - self._first) * groups * batch
                due = due if self._due is None else min(due, self._due)  # the last step may be a smaller one
            else:
                due = sum(usual.values())
            counted = min(due, sum(self._counted.get(step, size) for step, size in usual.items()))
        elif not topology.elastic and topology.exchange.kind == "allreduce":
            added_up = min(until % topology.exchange.every_steps(groups), until - self._first)
            counted -= max(0, added_up) * groups * batch
        elif self._batches is not None:
            due, counted = due if self._due is None else self._due, self._batches * batch
        elif topology.elastic:
            counted = batch * sum(self._counted_steps(group, topology, until) for group in range(groups))
        due, counted = due + self._earlier, counted + self._earlier
        lost, repeated = max(0, due - counted), max(0, counted - due)
        why = self._why(topology, lost, whole=whole, done=done) if lost else None
        return {"due": due, "counted": counted, "repeated": repeated, "lost": lost, "why": why}

    def _usual(self, topology: Topology, step: int) -> int:
        """The samples of a full step of all workers that divide it."""
        batch, workers = topology.compute.groups * topology.compute.batch_size, topology.compute.workers
        keeps = topology.job.on_resize == "keep"
        return batch if keeps else in_proportion(batch, self._members(step, workers), workers)

    def _members(self, step: int, workers: int) -> int:
        """How many workers train a step, if so many do unless some are lost or come."""
        there = self._there(step)
        return workers if there is None else len(there)

    def _counted_steps(self, group: int, topology: Topology, until: int) -> int:
        """How many steps of a group count with gossip and averaging, where nobody else trains its batches."""
        assert self._first is not None
        size, exchange = topology.compute.group_size, topology.exchange
        workers = {f"worker/{rank}" for rank in range(group * size, (group + 1) * size)}
        gossips = exchange.kind == "gossip"
        every, fragments = (1, 1) if gossips else (exchange.every_steps(topology.compute.groups), exchange.averaging.fragments)
        changes = self._changes(workers)
        # A worker that comes in another's place begins with a copy of somebody else, unless others of its group are there.
        copies = size == 1 or topology.whole_groups
        anew = {step for worker in workers for step in self._late.get(worker, ())} if copies else set()
        marks = sorted({self._first, *(step for step, _ in changes), *anew, until})
        counted, begun = 0, None
        for mark in (mark for mark in marks if self._first <= mark <= until):
            there = self._is_there(changes, mark)
            if begun is not None and (not there or (mark in anew and mark > begun)):
                ends = [mark - 1 - (mark + number * every // fragments) % every for number in range(fragments)]
                for number in range(fragments):
                    while ends[number] >= begun and not self._had_part(workers, ends[number], whole=topology.whole_groups):
                        ends[number] -= every
                counted, begun = counted + max(0, min(ends) + 1 - begun), None
            if there and begun is None:
                begun = mark
        return counted if begun is None else counted + until - begun

    def _changes(self, workers: set[str]) -> list[tuple[int, bool]]:
        """From which steps on somebody of these is a member, and from which nobody."""
        changes: list[tuple[int, bool]] = []
        for _, (since, members) in sorted(self._views.items()):
            changes = [*(change for change in changes if change[0] < since), (since, not workers.isdisjoint(members))]
        return changes

    @staticmethod
    def _is_there(changes: Sequence[tuple[int, bool]], step: int) -> bool:
        return next((there for since, there in reversed(changes) if since <= step), True)

    def _had_part(self, workers: set[str], step: int, *, whole: bool) -> bool:
        """Whether others have got the model of these in the exchange of a step. ``whole``: each has only a part of it."""
        there, left_out = self._there(step), self._left_out.get(step, set())
        here = workers if there is None else workers.intersection(there)
        return bool(here) and here.isdisjoint(left_out) if whole else bool(here - left_out)

    def _there(self, step: int) -> tuple[str, ...] | None:
        """The workers that train a step; ``None``: those with which the run began."""
        for _, (since, members) in sorted(self._views.items(), reverse=True):
            if since <= step:
                return members
        return None

    def _why(self, topology: Topology, lost: int, *, whole: bool, done: bool) -> str:
        if not done:
            return "the run ended before"
        every = topology.exchange.every_steps(topology.compute.groups) if topology.exchange.kind == "allreduce" else 1
        if not topology.elastic and self._steps % every:
            return f"they came after the last exchange of gradients, of which there is one every {every} steps ([exchange] every)"
        if not topology.elastic:
            return "workers did not report them"
        if topology.exchange.kind == "allreduce":
            return (
                "they were those of workers that were lost in the last steps"
                if whole
                else ("the run's length is a number of steps: those in which workers were lost have fewer samples")
            )
        if (self._served or self._batches is not None) and not whole:
            return "the run's length is a number of steps: fewer workers train fewer samples in as many steps"
        if self._served:
            return "model servers have not got them"
        if self._batches is not None:
            return "they were those of a group that was lost when all had trained, before the run's model was made"
        return "they belonged to workers that were lost or not back yet, and without model servers the others do not train them"


def account_lines(account: Mapping[str, Any] | None) -> Sequence[str]:
    """What is said about the account at the end of a run: nothing if all is well."""
    if account is None or not (account["lost"] or account["repeated"]):
        return []
    parts = [f"{account['counted']:,} of {account['due']:,} samples count in the model"]
    if account["repeated"]:
        parts.append(f"{account['repeated']:,} more than once")
    if account["why"]:
        parts.append(f"the rest do not: {account['why']}")
    return ["; ".join(parts)]
