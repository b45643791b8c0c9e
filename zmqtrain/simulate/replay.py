"""What a run without servers must end with: replayed in one process, from the ledger of what counted.

Workers state, for each exchange, over whose contributions it was. All must state the same. With small payloads the replay then
knows the run's model, whoever was lost or came back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from zmqtrain.data.division import Span, length_of, merged
from zmqtrain.data.partition import Partition
from zmqtrain.merged_fc.profile_phases import worker_profile
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.memory import Numbers, gradient, gradient_factor, gradient_of_samples, small_numel
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.tensor import TensorPayload


class Ledger:
    """The statements of all workers about their exchanges and the results."""

    def __init__(self, topology: Topology, placement: Placement) -> None:
        self._topology, self._placement = topology, placement
        self._total: int | None = None
        self._stated: dict[int, dict[PeerId, tuple[PeerId, ...]]] = {}
        self._counted: dict[int, tuple[PeerId, ...]] = {}
        self._begun: dict[int, set[PeerId]] = {}
        self._summed: dict[tuple[int, int], dict[PeerId, tuple[PeerId, ...]]] = {}  # step, group -> what its workers say
        self._combined: dict[tuple[int, int], dict[tuple[PeerId, int], Numbers]] = {}  # step, group -> worker, bucket -> its own
        self._joined: dict[tuple[PeerId, int], PeerId] = {}  # a worker's first step -> whose state it began with
        self._takes: dict[tuple[PeerId, int], Sequence[Span]] = {}  # all-reduce: worker, step -> its samples
        self._turns: dict[tuple[PeerId, int], int] = {}  # groups that take turns: worker, step -> its batch (`zmqtrain.data.slots`)
        self._ended = False
        self._lost_at_the_end: set[PeerId] = set()  # after that
        self._mixed: dict[int, dict[PeerId, dict[int, tuple[PeerId, ...]]]] = {}  # gossip: step -> worker -> bucket -> sources
        self._models: dict[PeerId, tuple[Mapping[str, Numbers], Sequence[PeerId]]] = {}

    def mixed(self, peer: PeerId, step: int, bucket: int, sources: Sequence[PeerId]) -> None:
        """In gossip: the worker's bucket has become its mean with those of ``sources``, at this step."""
        self._mixed.setdefault(step, {}).setdefault(peer, {})[bucket] = tuple(sources)

    def takes(self, peer: PeerId, step: int, spans: Sequence[Span]) -> None:
        """The worker trains these samples at a step."""
        self._takes[peer, step] = spans

    def all_trained(self) -> None:
        """All have trained, and agreed on that."""
        self._ended = True

    def lost(self, peers: Collection[PeerId]) -> None:
        """These workers are lost."""
        if self._ended:
            self._lost_at_the_end.update(peers)

    def takes_turn(self, peer: PeerId, step: int, slot: int) -> None:
        """The worker trains this batch at a step, of all that there are."""
        self._turns[peer, step] = slot

    def counted(self, peer: PeerId, step: int, members: Sequence[PeerId]) -> None:
        """For ``peer``, the exchange of ``step`` was over ``members``."""
        self._stated.setdefault(step, {})[peer] = tuple(members)

    def summed(self, peer: PeerId, step: int, members: Sequence[PeerId]) -> None:
        """For ``peer``, its group's step is over the gradients of these of its workers."""
        group = self._placement.role(peer).group
        self._summed.setdefault((step, group), {})[peer] = tuple(members)

    def combines(self, peer: PeerId, step: int, bucket: int, own: Payload) -> None:
        """What the worker has of a bucket, of what is averaged after this step: all workers of a group have the same."""
        if isinstance(own, TensorPayload):
            self._combined.setdefault((step, self._placement.role(peer).group), {})[peer, bucket] = own.numpy().copy()

    def began(self, peer: PeerId, step: int) -> None:
        """The worker has begun a step."""
        self._begun.setdefault(step, set()).add(peer)

    def joined(self, peer: PeerId, step: int, source: PeerId) -> None:
        """The worker begins with ``step``, and with the state of ``source``."""
        self._joined[peer, step] = source
        # The process before it may have been ahead.
        self._turns = {key: slot for key, slot in self._turns.items() if key[0] != peer or key[1] < step}
        group, size = self._placement.role(peer).group, self._topology.compute.group_size
        if size > 1 and self._placement.role(source).group != group:  # the one that it had is lost, and was ahead
            for of_group in (self._summed, self._combined):
                for at in [at for at, number in of_group if number == group and at >= step]:
                    of_group.pop((at, group))
            for at, mixed in self._mixed.items():
                for other in self._placement.group_members(group) if at >= step else ():
                    mixed.pop(other, None)

    def ended(self, peer: PeerId, values: Mapping[str, Numbers], members: Sequence[PeerId]) -> None:
        """The run's model is that of these members, and has these parameters."""
        self._models[peer] = values, members

    def wrong(self, lost: Collection[PeerId], *, whole: bool = True) -> Iterator[str]:
        """What is wrong with a run that has ended well. ``lost``: workers that were lost; the last one may have completed a step by
        itself that the others gave up. Not ``whole``: it was stopped before its end."""
        self._total = self._samples_due() if whole else None
        for step, stated in sorted(self._stated.items()):
            stayed = {peer: members for peer, members in stated.items() if peer not in lost} or stated
            first = next(iter(stayed))
            self._counted[step] = stayed[first]
            for peer, members in stayed.items():
                if members != stayed[first]:
                    yield f"the exchange of step {step} is over {', '.join(members)} for {peer}, but {first} says another set"
        if not self._topology.elastic:
            return  # with fixed members nobody states what counts
        exchange = self._topology.exchange
        averaging = exchange.averaging
        at_once = averaging.deltas == "float32" and averaging.fragments == 1 and averaging.overlap_steps == 0
        if exchange.kind == "averaging" and self._topology.compute.group_size > 1:
            yield from self._wrong_averages_of_groups(at_once=at_once)
        elif exchange.kind == "averaging" and at_once:
            yield from self._wrong_averages()
        elif exchange.kind == "gossip" and exchange.gossip.exchange == "weights" and self._topology.compute.group_size > 1:
            yield from self._wrong_mixtures_of_groups()
        elif exchange.kind == "gossip" and exchange.gossip.exchange == "weights":
            yield from self._wrong_mixtures()
        elif exchange.kind == "allreduce":
            yield from self._wrong_sums(exchange.every_steps(self._topology.compute.groups))

    def _wrong_sums(self, every: int) -> Iterator[str]:
        run = _Averaged(self._topology, self._placement)
        missing = [step for step in range(max(self._counted, default=0)) if (step + 1) % every == 0 and step not in self._counted]
        if missing:
            yield f"no exchange of step {missing[0]} counts, but one of step {max(self._counted)}"
        first = {peer: [step for (joined, step) in self._joined if joined == peer] for peer in self._placement_peers()}
        model, all_spans, lack = run.zeros(), list[Span](), list[int]()
        whole = every * self._topology.compute.groups * self._topology.compute.batch_size
        for step, members in self._counted.items():
            spans = [
                span
                for peer in members
                for each in range(step - every + 1, step + 1)
                if each >= max((joined for joined in first[peer] if joined <= step), default=0)
                for span in self._takes.get((peer, each), ())
            ]
            all_spans += spans
            lack.append(max(0, whole - length_of(spans)))
            scale = self._topology.compute.batch_size / length_of(spans)
            model = np.rint(model - run.gradients_of(spans) * scale)
        for peer, (values, _) in self._models.items():
            found = np.concatenate([values[name] for name in run.layers])
            if not np.array_equal(found, model):
                yield f"the run's model of {peer} is {found.tolist()}, but what counted gives {model.tolist()}"
        yield from self._wrong_spans(all_spans, every, sum(lack[-2:]))

    def _wrong_spans(self, spans: Sequence[Span], every: int, lack: int) -> Iterator[str]:
        """Each sample counts once; but nobody trains what the last two exchanges ``lack``, which may be under way together: the
        batches of those who were lost in them, or what earlier ones had left for these."""
        spans = merged(spans)
        for (_, stop), (start, _) in pairwise(spans):
            if start < stop:
                yield f"the samples from {start} up to {stop} count twice"
        last = max(self._counted, default=0)
        batch = self._topology.compute.groups * self._topology.compute.batch_size
        sure = (last + 1) * batch - (every + 1) * batch  # from here on some may have been lost before they began
        late = merged({span for (_, step), own in self._takes.items() if step >= last - every for span in own})
        for (_, start), (stop, _) in pairwise(((0, 0), *spans)):
            known = sum(max(0, min(stop, last) - max(start, first)) for first, last in late)
            if start < min(stop, sure) and known < stop - start:
                lack -= stop - start - known
                if lack < 0:
                    yield f"the samples from {start} up to {stop} count nowhere"
        lacking = 0 if self._total is None else self._total - length_of(spans)
        if every == 1 and lacking >= len(self._placement.everyone):  # fewer are no step for all workers
            yield f"{lacking} of {self._total} samples count nowhere"

    def _samples_due(self) -> int | None:
        """The number of samples that are trained in all, if the number of epochs says so: however many workers divide a step."""
        job, compute = self._topology.job, self._topology.compute
        if job.steps is not None or job.until is not None:
            return None
        samples = worker_profile(self._topology).samples
        each = Partition(samples, self._placement.groups, self._placement.group_size, compute.batch_size, 0, "none")
        return (job.epochs or 1) * each.steps_per_epoch * each.step_samples

    def _placement_peers(self) -> list[PeerId]:
        return [worker.peer for worker in self._placement.everyone]

    def _wrong_averages(self) -> Iterator[str]:
        run = _Averaged(self._topology, self._placement, self._turns)
        for step in self._steps(run):
            if step in self._counted:
                run.combine(self._counted[step])
        yield from self._wrong_models(run)

    def _wrong_averages_of_groups(self, *, at_once: bool) -> Iterator[str]:
        """Each group has one model, whoever of it is there, and trains each of its batches as a whole."""
        for (at, number), own in sorted(self._combined.items()):
            counted = [peer for peer in self._counted.get(at, ()) if self._placement.role(peer).group == number]
            for (worker, bucket), mine in own.items():
                theirs = own.get((counted[0], bucket), mine) if worker in counted else mine
                if not np.array_equal(mine, theirs):
                    yield f"{worker} averages {mine.tolist()} of bucket {bucket} after step {at}, {counted[0]} {theirs.tolist()}"
        if not at_once:
            return
        run = _Averaged(self._topology, self._placement)
        yield from self._wrong_turns_of_groups()
        for step in self._steps_of_groups(run):
            if step in self._counted:
                run.combine(list(dict.fromkeys(map(self._first_of, self._counted[step]))))
        yield from self._wrong_models_of_groups(run)

    def _wrong_mixtures_of_groups(self) -> Iterator[str]:
        """Each group has one model, whoever of it is there, trains each of its batches as a whole, and mixes all of its workers'
        models with the same others or none."""
        for (at, _), own in sorted(self._combined.items()):
            firsts: dict[int, tuple[PeerId, Numbers]] = {}  # who has stated it first, of each bucket
            for (worker, bucket), mine in own.items():
                first, theirs = firsts.setdefault(bucket, (worker, mine))
                if not np.allclose(mine, theirs, rtol=1e-12, atol=0):
                    yield f"{worker} mixes {mine.tolist()} of bucket {bucket} at step {at}, {first} {theirs.tolist()}"
        newest: dict[tuple[PeerId, int], int] = {}  # process -> the last step of which it has said what it is mixed with

        def process(peer: PeerId, step: int) -> tuple[PeerId, int]:
            return peer, sum(joined <= step for other, joined in self._joined if other == peer)

        for step, mixed in sorted(self._mixed.items()):
            newest |= {process(peer, step): step for peer in mixed}
        yield from self._wrong_turns_of_groups()
        run, last = _Averaged(self._topology, self._placement), max(self._mixed, default=0)
        for step in self._steps_of_groups(run):
            mixtures: dict[PeerId, dict[int, tuple[PeerId, ...]]] = {}
            mixed = self._mixed.get(step, {})
            until = {peer: newest[process(peer, step)] for peer in mixed}
            stayed = {peer for peer in mixed if peer in self._models and process(peer, step) == process(peer, last)}
            # One that is lost may have mixed its model alone, if no other of its group goes on from there.
            for peer in sorted(mixed, key=lambda peer: (until[peer], peer in stayed), reverse=True):
                counts = mixtures.setdefault(self._first_of(peer), mixed[peer])
                if mixed[peer] != counts and until[peer] > step:
                    yield f"at step {step} {peer} is mixed with {mixed[peer]}, others of its group with {counts}"
            run.mix(mixtures)
        yield from self._wrong_models_of_groups(run)

    def _first_of(self, peer: PeerId) -> PeerId:
        """The worker that stands for the group of ``peer``, whose workers have one model."""
        return self._placement.group_members(self._placement.role(peer).group)[0]

    def _steps_of_groups(self, run: _Averaged) -> Iterator[int]:
        """Train all steps of groups of several workers, in order; each group's batch once and as a whole."""
        placement, of = self._placement, self._first_of
        last = max((*(step for step, _ in self._summed), *self._mixed, *self._counted), default=-1)
        batch = self._topology.compute.batch_size
        for step in range(last + 2):  # some may come when all is trained
            coming = {
                of(peer): of(source) for (peer, joined), source in self._joined.items() if joined == step and of(peer) != of(source)
            }
            while coming:
                for first in [each for each, source in coming.items() if source not in coming] or list(coming):
                    run.begin_like(first, coming.pop(first))
            for group in range(placement.groups):
                if (step, group) in self._summed:
                    first, turns = placement.group_members(group)[0], self._turns_of(step, group)
                    number = next(iter(turns.values()), step * placement.groups + group)
                    run.train_on(first, [(number * batch, number * batch + batch)])
                    if turns:
                        run.contains(first, number, step)
            yield step

    def _turns_of(self, step: int, group: int) -> dict[PeerId, int]:
        """The batch of a group that takes turns, as those of it say who have trained the step."""
        return {peer: self._turns[peer, step] for peer in self._summed[step, group] if (peer, step) in self._turns}

    def _wrong_turns_of_groups(self) -> Iterator[str]:
        for step, group in sorted(self._summed):
            turns = self._turns_of(step, group)
            if len(set(turns.values())) > 1:
                said = ", ".join(f"{number} for {peer}" for peer, number in sorted(turns.items()))
                yield f"at step {step} the batch of group {group} is {said}"

    def _wrong_models_of_groups(self, run: _Averaged) -> Iterator[str]:
        for peer, (values, members) in self._models.items():
            firsts = list(dict.fromkeys(map(self._first_of, members)))
            yield from self._wrong_model(run, peer, values, firsts)
            if self._turns:
                yield from self._wrong_batches(run, firsts)

    def _wrong_mixtures(self) -> Iterator[str]:
        run = _Averaged(self._topology, self._placement, self._turns)
        for step in self._steps(run):
            run.mix(self._mixed.get(step, {}))
        yield from self._wrong_models(run)

    def _steps(self, run: _Averaged) -> Iterator[int]:
        """Train all steps that were begun, in order."""
        for step in sorted({*self._begun, *self._mixed, *self._counted}):  # some exchange without having a batch
            self._begin_late(run, step)
            run.train(step, sorted(self._begun.get(step, ())))
            yield step
        self._begin_late(run, max(self._begun, default=-1) + 1)  # those that come when all is trained

    def _begin_late(self, run: _Averaged, step: int) -> None:
        """Those that begin with this step get the states of others, which may have got theirs at this step, too."""
        coming = {peer: source for (peer, first), source in self._joined.items() if first == step}
        while coming:
            able = [peer for peer, source in coming.items() if source not in coming] or list(coming)
            for peer in able:
                run.begin_like(peer, coming.pop(peer))

    def _wrong_models(self, run: _Averaged) -> Iterator[str]:
        for peer, (values, members) in self._models.items():
            yield from self._wrong_model(run, peer, values, members)
            if self._turns:
                yield from self._wrong_batches(run, members)

    def _wrong_batches(self, run: _Averaged, members: Sequence[PeerId]) -> Iterator[str]:
        """Each batch counts once; but who is lost when all have trained takes along what nobody else has."""
        times = Counter(slot for slot, _, _ in run.trained(members))
        if twice := sorted(slot for slot, count in times.items() if count > 1):
            yield f"batch {twice[0]} counts {times[twice[0]]} times, one of {len(twice)}"
        due = 0 if self._total is None else self._total // self._topology.compute.batch_size
        gone = {*map(self._first_of, self._lost_at_the_end)} - {*members}
        taken_along = {slot for (peer, _), slot in self._turns.items() if self._first_of(peer) in gone}
        if missing := sorted({*range(due)} - {*times} - taken_along):
            yield f"{len(missing)} of {due} batches count nowhere, the first of which is {missing[0]}"

    @staticmethod
    def _wrong_model(run: _Averaged, peer: PeerId, values: Mapping[str, Numbers], members: Sequence[PeerId]) -> Iterator[str]:
        expected = run.model(members)
        found = np.concatenate([values[name] for name in run.layers])
        if not np.allclose(found, expected, rtol=1e-9, atol=1e-6):
            yield f"the run's model of {peer} is {found.tolist()}, but what counted gives {expected.tolist()}"


class _Averaged:
    """All workers' models, in one process: arithmetic of its own, which shares nothing with that of the exchanges."""

    def __init__(self, topology: Topology, placement: Placement, turns: Mapping[tuple[PeerId, int], int] | None = None) -> None:
        """``turns``: the batch that a worker has trained at a step, if it is not its group's own one."""
        self._averaging, self._groups, self._turns = topology.exchange.averaging, topology.compute.groups, turns or {}
        # What is in each model: batches, by whom they were trained, and at which step.
        self._batches: dict[PeerId, frozenset[tuple[int, PeerId, int]]] = defaultdict(frozenset)
        self.layers = {
            layer.name: (index, small_numel(layer.numel))
            for index, layer in enumerate(worker_profile(topology).layers)
            if layer.numel
        }
        self._factor = gradient_factor(topology)
        parts, start = {}, 0
        for name, (_, numel) in self.layers.items():
            parts[name] = slice(start, start + numel)
            start += numel
        plans = worker_profile(topology).bucket_plans(BucketLimit.of(topology))
        self._parts = [[parts[name] for name in plan.names if name in parts] for plan in plans]
        self._ranks = {worker.peer: worker.index for worker in placement.workers}
        self._models: dict[PeerId, Numbers] = {peer: self.zeros() for peer in self._ranks}
        # Averaging: each worker's copy of the center, or of the last common model and the outer momentum.
        self._centers: dict[PeerId, Numbers] = {peer: self.zeros() for peer in self._ranks}
        self._momenta: dict[PeerId, Numbers] = {peer: self.zeros() for peer in self._ranks}

    def train(self, step: int, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            if self._turns and (peer, step) not in self._turns:  # it has none, while others have
                continue
            self._models[peer] = self._models[peer] - self.gradients(peer, step)
            if self._turns:
                self.contains(peer, self._turns[peer, step], step)

    def trained(self, members: Sequence[PeerId]) -> frozenset[tuple[int, PeerId, int]]:
        """The batches that are in the models of these, and by whom they were trained, and when."""
        return frozenset[tuple[int, PeerId, int]]().union(*(self._batches[peer] for peer in members))

    def train_on(self, peer: PeerId, spans: Sequence[Span]) -> None:
        self._models[peer] = self._models[peer] - self.gradients_of(spans)

    def contains(self, peer: PeerId, slot: int, step: int) -> None:
        """The model has been trained on this batch."""
        self._batches[peer] |= {(slot, peer, step)}

    def zeros(self) -> Numbers:
        """Initial parameters: zeros."""
        return np.zeros(sum(numel for _, numel in self.layers.values()))

    def gradients(self, peer: PeerId, step: int) -> Numbers:
        """The gradients that a worker computes at a step."""
        at, rank = divmod(self._turns[peer, step], self._groups) if self._turns else (step, self._ranks[peer])
        parts = [gradient(rank, at, index, numel) for index, numel in self.layers.values()]
        return self._factor * np.concatenate(parts)

    def gradients_of(self, spans: Sequence[Span]) -> Numbers:
        """The sum of the gradients of these samples."""
        parts = [gradient_of_samples(spans, index, numel) for index, numel in self.layers.values()]
        return self._factor * np.concatenate(parts)

    def combine(self, members: Sequence[PeerId]) -> None:
        averaging, models, centers = self._averaging, self._models, self._centers
        self._batches.update(dict.fromkeys(members, self.trained(members)))
        if averaging.method == "elastic":
            alpha = 0.9 / self._groups if averaging.alpha is None else averaging.alpha
            pulls = {peer: alpha * (models[peer] - centers[peer]) for peer in members}
            together = sum(pulls.values(), self.zeros())
            for peer, pull in pulls.items():
                models[peer] = models[peer] - pull
                centers[peer] = centers[peer] + together
            return
        mean = sum((models[peer] for peer in members), self.zeros()) / len(members)
        changes = {peer: centers[peer] - models[peer] for peer in members}
        change = sum(changes.values(), self.zeros()) / len(members)
        for peer in members:
            models[peer] = mean
            if averaging.method == "outer":
                self._momenta[peer] = averaging.outer_momentum * self._momenta[peer] + change
                step = change + averaging.outer_momentum * self._momenta[peer]
                models[peer] = centers[peer] = centers[peer] - averaging.outer_lr * step

    def mix(self, mixed: Mapping[PeerId, Mapping[int, Sequence[PeerId]]]) -> None:
        """Each of these workers takes the mean with others, bucket by bucket."""
        before = {peer: model.copy() for peer, model in self._models.items()}
        had = dict(self._batches)
        for peer, buckets in mixed.items():
            of_all = [source for source in next(iter(buckets.values()), ()) if all(source in each for each in buckets.values())]
            if len(buckets) == len(self._parts):
                self._batches[peer] = self._batches[peer].union(*(had.get(source, frozenset()) for source in of_all))
            for bucket, sources in buckets.items():
                for part in self._parts[bucket]:
                    whole = sum((before[source][part] for source in sources), before[peer][part])
                    self._models[peer][part] = whole / (1 + len(sources))

    def begin_like(self, peer: PeerId, source: PeerId) -> None:
        for kept in (self._models, self._centers, self._momenta):
            kept[peer] = kept[source].copy()
        self._batches[peer] = self._batches[source]

    def model(self, members: Sequence[PeerId]) -> Numbers:
        """The run's model at the end."""
        if self._averaging.method == "elastic":
            return self._centers[members[0]]
        return sum((self._models[peer] for peer in members), self.zeros()) / len(members)
