"""Which model servers have each shard of the model: the coordinator's book about it. Pure.

A shard's *chain* begins with the server that serves it; the next one has an equal copy (chain replication: van Renesse and
Schneider 2004). A server comes into a chain only once it has all that anybody may have seen of the shard, and leaves it when it
is lost or not needed. The first one may hand the shard over to the next, once they have carried out the same. So the first server
of a chain may serve; and since all processes learn of chains from numbered views, no two ever do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value


class Chains:
    """The chains of a run, by shard. Without ``servers`` there are none: then no server may be lost."""

    def __init__(self, servers: Sequence[PeerId] = ()) -> None:
        """``servers``: those that begin with a shard each."""
        self._chains: list[tuple[PeerId, ...]] = [(server,) for server in servers]

    def __bool__(self) -> bool:
        return bool(self._chains)

    @property
    def value(self) -> tuple[tuple[PeerId, ...], ...]:
        """The servers of each shard, by its number: the head, then its backup if there is one."""
        return tuple(self._chains)

    def add(self, shard: int, head: PeerId, backup: PeerId) -> str | None:
        """``head``, which serves the shard, says that ``backup`` has an equal copy. Returns why that cannot be, if so."""
        if not self._serves(head, shard):
            return f"{head} does not serve shard {shard}"
        if backup == head:
            return f"{head} cannot be its own backup"
        self._chains[shard] = (head, backup)
        return None

    def hand_over(self, shard: int, head: PeerId, to: PeerId, *, copies: bool) -> str | None:
        """``head`` gives the shard to its backup ``to``, which has an equal copy. ``copies``: it keeps its own, as the backup.
        Returns why that cannot be, if so."""
        if not self._serves(head, shard) or self._chains[shard] != (head, to):
            return f"{head} does not serve shard {shard} with {to} as its backup"
        self._chains[shard] = (to, head) if copies else (to,)
        return None

    def do_without(self, shard: int, head: PeerId, backup: PeerId) -> str | None:
        """``head``, which serves the shard, needs this backup no more. Returns why that cannot be, if so."""
        if not self._serves(head, shard):
            return f"{head} does not serve shard {shard}"
        self._chains[shard] = tuple(other for other in self._chains[shard] if other != backup)
        return None

    def _serves(self, server: PeerId, shard: int) -> bool:
        return 0 <= shard < len(self._chains) and self._chains[shard][:1] == (server,)

    def remove(self, server: PeerId) -> list[int]:
        """The server is lost. Returns the shards of which it had a copy."""
        found = [shard for shard, chain in enumerate(self._chains) if server in chain]
        for shard in found:
            self._chains[shard] = tuple(other for other in self._chains[shard] if other != server)
        return found

    def spare(self, server: PeerId) -> bool:
        """Whether others have all shards that the server has."""
        return bool(self._chains) and not any(chain == (server,) for chain in self._chains)

    @property
    def lost(self) -> list[int]:
        """The shards that nobody has any more."""
        return [shard for shard, chain in enumerate(self._chains) if not chain]

    def to_value(self) -> Value:
        return [list(chain) for chain in self._chains]

    @classmethod
    def from_value(cls, value: Any) -> Chains:
        """Decode what `to_value` returned."""
        chains = cls()
        chains._chains = [tuple(chain) for chain in value]
        return chains
