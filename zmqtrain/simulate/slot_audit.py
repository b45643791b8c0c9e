"""Properties of runs with model servers that go on without lost workers: checked against what workers and servers state.

- Every batch counts at most once for every piece of the model, whoever trains it.
- What a worker had an answer to counts, even if the server that answered was lost.
- In the end each batch counts for all pieces or for none; and if the run's length is given in epochs, all their batches count.
- The servers hold exactly what one process computes from the same gradients in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache
from typing import Any

import numpy as np

from zmqtrain.exchange.pieces import Piece
from zmqtrain.net.endpoint import PeerId
from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.schema import Topology
from zmqtrain.train.device.memory import Numbers, divided, gradient, gradient_factor, gradient_of_samples, numbers_of, small_numel
from zmqtrain.train.device.profile import Profile
from zmqtrain.wire.payload import Payload

#: A server, and one of its pieces.
Where = tuple[PeerId, int]

#: The number of the merged layers among the pieces of the model.
MERGED = -1


class SlotAudit:
    """Gets facts, and gives its `verdict` at the end."""

    def __init__(self, topology: Topology, placement: Placement) -> None:
        self._topology, self._placement = topology, placement
        self._taken: dict[tuple[int, int], int] = {}  # group, step -> slot
        self._counted: dict[Where, dict[int, int]] = {}  # slot -> times
        self._updates: dict[Where, list[tuple[int, ...]]] = {}  # the slots of each update
        self._applied: dict[Where, set[tuple[int, int]]] = {}  # groups and steps
        self._answered: dict[int, set[tuple[int, int]]] = {}  # piece -> groups and steps
        self._server: dict[int, PeerId] = {}  # piece -> who served it in the end
        self._held: dict[Where, tuple[Piece, Payload]] = {}
        self.total: int | None = None
        """The number of slots that must count in the end, if that is known."""

    def took(self, group: int, step: int) -> bool:
        """Whether the group's worker took a batch at this step."""
        return (group, step) in self._taken

    def hear(self, peer: PeerId, what: str, values: Mapping[str, Any]) -> None:
        """A role states a fact."""
        if what == "takes":
            self._taken[self._placement.role(peer).group, values["step"]] = values["slot"]
        elif what == "applied":
            where = peer, int(values["piece"])
            slots = tuple(self._taken[group, step] for group, step, _ in values["reads"] if group not in values["skipped"])
            counted = self._counted.setdefault(where, {})
            for slot in slots:
                counted[slot] = counted.get(slot, 0) + 1
            self._updates.setdefault(where, []).append(slots)
            self._applied.setdefault(where, set()).update((group, step) for group, step, _ in values["reads"])
        elif what == "fc applied":  # the merged layers are one more piece
            where = peer, MERGED
            counted = self._counted.setdefault(where, {})
            for group, step in values["reads"]:
                slot = self._taken[group, step]
                counted[slot] = counted.get(slot, 0) + 1
            self._updates.setdefault(where, []).append(tuple(self._taken[group, step] for group, step in values["reads"]))
            self._applied.setdefault(where, set()).update((group, step) for group, step in values["reads"])
        elif what == "fc served":
            self._server[MERGED] = peer
        elif what == "read":
            self._answered.setdefault(int(values["piece"]), set()).add((self._placement.role(peer).group, values["step"] - 1))
        elif what == "copied":
            other = f"{values['to']}/{values['shard']}"
            facts: dict[Where, Any]
            for facts in (self._counted, self._updates, self._applied):
                for where in [where for where in facts if where[0] == other]:
                    del facts[where]
                facts |= {(other, where[1]): copy(value) for where, value in facts.items() if where[0] == peer}
        elif what == "held":
            self._server.update(dict.fromkeys(values["pieces"], peer))
            if self._topology.simulation.payload == "small":
                self._held.update({(peer, index): held for index, held in values["pieces"].items()})

    def verdict(self, profile: Profile | None) -> list[str]:
        """The violations of a run that ended well, in words."""
        found = []
        # Of copies of a shard, the one counts that served it in the end.
        for where in [where for where in self._counted if self._server.get(where[1], where[0]) != where[0]]:
            del self._counted[where]
        for where in self._counted:
            for group, step in self._answered.get(where[1], ()):
                if (group, step) not in self._applied[where]:
                    found.append(
                        f"step {step} of group {group} was answered, but {where[0]} has not counted it in piece {where[1]}"
                    )
                    break
        sets = {}
        for where, counted in self._counted.items():
            twice = [slot for slot, times in counted.items() if times > 1]
            if twice:
                found.append(f"{where[0]} counts batch {twice[0]} more than once in piece {where[1]}")
            sets[where] = frozenset(counted)
        if len(set(sets.values())) > 1:
            (a, mine), (b, others) = next(
                (one, other) for one in sets.items() for other in sets.items() if one[1] - other[1]
            )  # fmt: skip
            found.append(f"batch {min(mine - others)} counts in piece {a[1]} of {a[0]}, but not in piece {b[1]} of {b[0]}")
        if self.total is not None and sets:
            missing = frozenset(range(self.total)) - next(iter(sets.values()))
            if missing:
                found.append(f"{len(missing)} of {self.total} batches do not count, the first of which is {min(missing)}")
        return found + (self._check_values(profile) if profile is not None else [])

    def _check_values(self, profile: Profile) -> list[str]:
        if self._topology.exchange.compression != "none" or self._topology.optimizer.clip_norm:
            return []
        replay = _Replay(profile, self._topology, self._placement.groups)
        for where, (piece, payload) in self._held.items():
            expected = replay.piece(piece, self._updates.get(where, []))
            if not np.array_equal(numbers_of(payload), expected):
                return [f"{where[0]} holds {numbers_of(payload).tolist()} as piece {where[1]} instead of {expected.tolist()}"]
        return []


class _Replay:
    """Computes in one process what servers compute."""

    def __init__(self, profile: Profile, topology: Topology, groups: int) -> None:
        self._factor, self._groups = gradient_factor(topology), groups
        buckets = profile.bucket_plans(BucketLimit.of(topology))
        layers = {layer.name: (index, small_numel(layer.numel)) for index, layer in enumerate(profile.layers)}
        batch = topology.compute.batch_size

        @cache
        def of_slot(bucket: int, slot: int) -> Numbers:
            step, rank = divmod(slot, groups)
            if divided(topology):
                spans = [(slot * batch, (slot + 1) * batch)]
                return np.concatenate([self._factor * gradient_of_samples(spans, *layers[name]) for name in buckets[bucket].names])
            return np.concatenate([self._factor * gradient(rank, step, *layers[name]) for name in buckets[bucket].names])

        self._of_slot = of_slot

    def piece(self, piece: Piece, updates: Sequence[tuple[int, ...]]) -> Numbers:
        values = np.zeros(piece.numel)
        for slots in updates:
            if slots:
                total = sum((self._of_slot(piece.bucket, slot) for slot in slots[1:]), self._of_slot(piece.bucket, slots[0]))
                values -= (total / len(slots) if len(slots) > 1 else total)[piece.start : piece.stop]
        return values
