"""Where the shards of the model are to be: the coordinator's decisions, each with its reason. Sans-IO.

A shard whose servers are to leave goes to others. The present backup serves it next, if that one stays, since it has a copy
already; otherwise the server that serves the fewest shards. What was decided stays so until it is reached, or until one of those
that it names is gone: then it is decided anew. `zmqtrain.server.chain_step` says how a shard gets there.

When nothing else is to move, load is spread: if the servers of one host serve at least two shards more than those of another one,
because servers were lost, have left or have come back, one shard moves there, and then perhaps the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value

#: The servers that are to have a shard: the one that serves it, and its backup if it is to have one.
Chain = tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A decision."""

    shard: int
    goal: Chain
    reason: str


class Moves:
    """What was decided, and is not reached yet."""

    def __init__(self, *, copies: bool) -> None:
        """``copies``: whether each shard is to have a backup."""
        self._copies = copies
        self._leaving: dict[PeerId, None] = {}
        self.goals: dict[int, Chain] = {}
        """The chains that shards are to become."""

    @property
    def leaving(self) -> Chain:
        """The servers that are to have no shard any more."""
        return tuple(self._leaving)

    def leave(self, servers: Iterable[PeerId]) -> None:
        """These are to have no shard any more. Then `decide`."""
        self._leaving |= dict.fromkeys(servers)

    def decide(self, chains: Sequence[Chain], hosts: Mapping[PeerId, str]) -> list[Move]:
        """Something has changed: decide what is to be moved now, beside what is under way.

        Args:
            chains: of all shards, as they are.
            hosts: the servers that are there, by number, each with its host.
        """
        stay = [peer for peer in hosts if peer not in self._leaving]
        for shard, goal in list(self.goals.items()):
            if chains[shard] == goal or not chains[shard] or not set(goal) <= set(stay):
                del self.goals[shard]
        moves = []
        for shard, chain in enumerate(chains):
            gone = [peer for peer in chain if peer in self._leaving]
            if not gone or shard in self.goals or not stay:
                continue
            head = next((peer for peer in chain if peer in stay), None) or self._least(stay, chains)
            backup = self._backup(head, stay, hosts, chains) if self._copies else None
            self.goals[shard] = (head,) if backup is None else (head, backup)
            if self.goals[shard] == chain:
                del self.goals[shard]
                continue
            moves.append(Move(shard, self.goals[shard], f"{' and '.join(gone)} {'leaves' if len(gone) == 1 else 'leave'}"))
        if not self.goals:
            moves += self._spread(chains, stay, hosts)
        return moves

    def _spread(self, chains: Sequence[Chain], stay: Sequence[PeerId], hosts: Mapping[PeerId, str]) -> list[Move]:
        """One shard moves from the host that serves the most to the one that serves the fewest, if that makes them more even."""
        served = Counter(dict.fromkeys(stay, 0))
        served.update(chain[0] for chain in chains if chain and chain[0] in stay)
        load = Counter({hosts[peer]: 0 for peer in stay})
        for peer, count in served.items():
            load[hosts[peer]] += count
        if not load:
            return []
        most, least = max(load, key=load.__getitem__), min(load, key=load.__getitem__)
        if load[most] - load[least] < 2:
            return []
        to = min((peer for peer in stay if hosts[peer] == least), key=served.__getitem__)
        head = max((peer for peer in stay if hosts[peer] == most), key=served.__getitem__)
        shards = [shard for shard, chain in enumerate(chains) if chain[:1] == (head,)]
        shard = next((shard for shard in shards if to in chains[shard]), shards[-1])  # one that has a copy there need not travel
        self.goals[shard] = (to, head) if self._copies else (to,)
        return [Move(shard, self.goals[shard], f"{most} serves {load[most]} shards, and {least} {load[least] or 'none'}")]

    def _after(self, chains: Sequence[Chain]) -> list[Chain]:
        """The chains as they will be."""
        return [self.goals.get(shard, chain) for shard, chain in enumerate(chains)]

    def _least(self, stay: Sequence[PeerId], chains: Sequence[Chain]) -> PeerId:
        heads = [chain[0] for chain in self._after(chains) if chain]
        return min(stay, key=heads.count)

    def _backup(self, head: PeerId, stay: Sequence[PeerId], hosts: Mapping[PeerId, str], chains: Sequence[Chain]) -> PeerId | None:
        """On another host, if there is one; and there the server that has the fewest copies."""
        backups = [chain[1] for chain in self._after(chains) if len(chain) > 1]
        others = [peer for peer in stay if peer != head]
        return min(others, key=lambda peer: (hosts[peer] == hosts[head], backups.count(peer)), default=None)

    def to_value(self) -> Value:
        """Plain values for the journal."""
        goals: list[Value] = [[shard, *goal] for shard, goal in self.goals.items()]
        return [[*self._leaving], goals]

    def restore(self, value: Any) -> None:
        """Become what `to_value` has told of."""
        leaving, goals = value
        self._leaving = dict.fromkeys(leaving)
        self.goals = {shard: tuple(goal) for shard, *goal in goals}
