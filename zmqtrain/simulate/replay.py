"""What a run without servers must end with: replayed in one process, from the ledger of what counted.

Workers state, for each exchange, over whose contributions it was. All must state the same. With small payloads the replay then
knows the run's model, whoever was lost or came back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from zmqtrain.exchange.averaging.methods import Average, Elastic, Method, Outer
from zmqtrain.merged_fc.profile_phases import worker_profile
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.memory import Numbers, gradient, gradient_factor, small_numel
from zmqtrain.wire.tensor import TensorPayload


class Ledger:
    """What workers state about exchanges and their results."""

    def __init__(self, topology: Topology, placement: Placement) -> None:
        self._topology, self._placement = topology, placement
        self._stated: dict[int, dict[PeerId, tuple[PeerId, ...]]] = {}
        self._counted: dict[int, tuple[PeerId, ...]] = {}
        self._begun: dict[int, set[PeerId]] = {}
        self._joined: dict[tuple[PeerId, int], PeerId] = {}  # a worker's first step -> whose state it began with
        self._models: dict[PeerId, tuple[Mapping[str, Numbers], Sequence[PeerId]]] = {}

    def counted(self, peer: PeerId, step: int, members: Sequence[PeerId]) -> None:
        """For ``peer``, the exchange of ``step`` was over ``members``."""
        self._stated.setdefault(step, {})[peer] = tuple(members)

    def began(self, peer: PeerId, step: int) -> None:
        """The worker has begun a step."""
        self._begun.setdefault(step, set()).add(peer)

    def joined(self, peer: PeerId, step: int, source: PeerId) -> None:
        """The worker begins with ``step``, and with the state of ``source``."""
        self._joined[peer, step] = source

    def ended(self, peer: PeerId, values: Mapping[str, Numbers], members: Sequence[PeerId]) -> None:
        """The run's model is that of these members, and has these parameters."""
        self._models[peer] = values, members

    def wrong(self, lost: Collection[PeerId]) -> Iterator[str]:
        """What is wrong with a run that has ended well. ``lost``: workers that were lost; the last one may have completed a step by
        itself that the others gave up."""
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
        if exchange.kind == "averaging" and at_once:
            yield from self._wrong_averages()
        elif exchange.kind == "allreduce":
            yield from self._wrong_sums(exchange.every_steps(self._topology.compute.groups))

    def _wrong_sums(self, every: int) -> Iterator[str]:
        run = _Averaged(self._topology, self._placement)
        first = {peer: [step for (joined, step) in self._joined if joined == peer] for peer in self._placement_peers()}
        model = run.zeros()
        for step, members in self._counted.items():
            shares = [
                (peer, each)
                for peer in members
                for each in range(step - every + 1, step + 1)
                if each >= max((joined for joined in first[peer] if joined <= step), default=0)
            ]
            model -= sum((run.gradients(peer, each) for peer, each in shares), run.zeros()) / len(shares)
        for peer, (values, _) in self._models.items():
            found = np.concatenate([values[name] for name in run.layers])
            if not np.array_equal(found, np.rint(model)):
                yield f"the run's model of {peer} is {found.tolist()}, but what counted gives {model.tolist()}"

    def _placement_peers(self) -> list[PeerId]:
        return [worker.peer for worker in self._placement.workers]

    def _wrong_averages(self) -> Iterator[str]:
        run, models = _Averaged(self._topology, self._placement), self._models
        for step in sorted(self._begun):
            for (peer, first), source in self._joined.items():
                if first == step:
                    run.begin_like(peer, source)
            run.train(step, sorted(self._begun[step]))
            if step in self._counted:
                run.combine(self._counted[step])
        for peer, (values, members) in models.items():
            expected = run.model(members)
            found = np.concatenate([values[name] for name in run.layers])
            if not np.allclose(found, expected, rtol=1e-9, atol=1e-6):
                yield f"the run's model of {peer} is {found.tolist()}, but what counted gives {expected.tolist()}"


class _Averaged:
    """All workers' models, in one process."""

    def __init__(self, topology: Topology, placement: Placement) -> None:
        averaging, groups = topology.exchange.averaging, topology.compute.groups
        layers = worker_profile(topology).layers
        self.layers = {layer.name: (index, small_numel(layer.numel)) for index, layer in enumerate(layers) if layer.numel}
        self._factor = gradient_factor(topology)
        self._ranks = {worker.peer: worker.index for worker in placement.workers}
        numel = sum(numel for _, numel in self.layers.values())
        self._models: dict[PeerId, Numbers] = {peer: np.zeros(numel) for peer in self._ranks}
        self._methods: dict[PeerId, Method] = {}
        for peer in self._ranks:
            method: Method = Average()
            if averaging.method == "elastic":
                method = Elastic(groups, averaging.alpha)
            elif averaging.method == "outer":
                method = Outer(averaging.outer_lr, averaging.outer_momentum)
            method.begin(0, self._part(peer))
            self._methods[peer] = method

    def train(self, step: int, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            self._models[peer] -= self.gradients(peer, step)

    def zeros(self) -> Numbers:
        """Initial parameters."""
        return np.zeros(sum(numel for _, numel in self.layers.values()))

    def gradients(self, peer: PeerId, step: int) -> Numbers:
        """What a worker computes at a step."""
        parts = [gradient(self._ranks[peer], step, index, numel) for index, numel in self.layers.values()]
        return self._factor * np.concatenate(parts)

    def combine(self, members: Sequence[PeerId]) -> None:
        own = {peer: self._methods[peer].travels(0, self._part(peer)) for peer in members}
        mean = sum(payload.numpy() for payload in own.values() if isinstance(payload, TensorPayload)) / len(members)
        for peer, payload in own.items():
            method = self._methods[peer]
            scaled = TensorPayload.of(np.array(mean) * method.factor(len(members)))
            method.apply(0, self._part(peer), payload, scaled, mix=0.0)

    def begin_like(self, peer: PeerId, source: PeerId) -> None:
        self._models[peer][:] = self._models[source]
        for name, payload in self._methods[source].state().items():
            self._methods[peer].state()[name].copy_(payload)

    def model(self, members: Sequence[PeerId]) -> Numbers:
        """The run's model at the end."""
        center = self._methods[members[0]].center(0)
        if isinstance(center, TensorPayload):
            return center.numpy()
        total: Numbers = sum((self._models[peer] for peer in members), np.zeros(1))
        return total / len(members)

    def _part(self, peer: PeerId) -> TensorPayload:
        return TensorPayload.of(self._models[peer])
