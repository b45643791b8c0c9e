"""The ranks that take part in collectives, and how a payload is divided among them."""

from __future__ import annotations

import asyncio
import itertools

from zmqtrain.errors import PeerLostError
from zmqtrain.net.endpoint import Endpoint, PeerId, Tag

#: A message of at most the endpoint's chunk is one frame and is received without a copy, so pieces are never larger.
CHUNK_BYTES = 1 << 20
#: Once a member is lost, collectives that do not wait for it have this many seconds to finish with what is already on its way.
LOSS_GRACE_S = 1.0


def bounds(numel: int, size: int) -> tuple[tuple[int, int], ...]:
    """The even split of ``numel`` elements into ``size`` parts, as (start, stop); the first parts are one element larger."""
    each, more = divmod(numel, size)
    starts = [part * each + min(part, more) for part in range(size + 1)]
    return tuple(itertools.pairwise(starts))


class Group:
    """Some peers in a fixed order, and this process's place among them. Long-lived: make one for each set of peers, and `close` it
    if the endpoint lives longer.

    All members must pass the same ``members``, ``name`` and ``chunk_bytes``. ``name`` begins the tag of every message, so it must
    be unique among the groups of an endpoint. Once a member is lost, every collective of the group raises `PeerLostError` that
    names it, also on ranks that never exchange messages with it; a group with a restarted member is a new group. A member that has
    finished and closed (`Endpoint.finish`) is not lost: only a wait for its part, which it would have had to send before, raises an
    error.

    ``timeout_s`` limits how long a collective may wait without any progress (``None``: until a peer is lost).
    """

    __slots__ = (
        "_forget",
        "_parts",
        "_running",
        "chunk_bytes",
        "endpoint",
        "loss_grace_s",
        "lost",
        "members",
        "name",
        "rank",
        "timeout_s",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        members: tuple[PeerId, ...],
        rank: int,
        name: str,
        *,
        timeout_s: float | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        loss_grace_s: float = LOSS_GRACE_S,
    ) -> None:
        if members[rank] != endpoint.peer:
            raise ValueError(f"rank {rank} of group {name} is {members[rank]}, but this endpoint is {endpoint.peer}")
        if len(set(members)) != len(members):
            raise ValueError(f"group {name} has a member twice: {members}")
        self.endpoint = endpoint
        self.members = members
        self.rank = rank
        self.name = name
        self.timeout_s = timeout_s
        self.chunk_bytes = chunk_bytes
        self.loss_grace_s = loss_grace_s
        self.lost: PeerLostError | None = None
        self._running: set[asyncio.Timeout] = set()
        self._parts: dict[tuple[int, ...], Group] = {}
        self._forget = endpoint.on_lost(self._on_lost)

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    def __repr__(self) -> str:
        return f"<Group {self.name} rank {self.rank} of {self.size}>"

    def part(self, ranks: tuple[int, ...]) -> Group:
        """The group of some of its members, this process among them; the same object for the same ranks."""
        if len(ranks) == self.size:
            return self
        if ranks not in self._parts:
            self._parts[ranks] = Group(
                self.endpoint,
                tuple(self.members[rank] for rank in ranks),
                ranks.index(self.rank),
                f"{self.name}/{','.join(map(str, ranks))}",
                timeout_s=self.timeout_s,
                chunk_bytes=self.chunk_bytes,
                loss_grace_s=self.loss_grace_s,
            )
        return self._parts[ranks]

    @property
    def busy(self) -> bool:
        """Whether a collective of it, or of a part of it, is running."""
        return bool(self._running) or any(part.busy for part in self._parts.values())

    def close(self) -> None:
        """Let the endpoint forget this group and its parts: it is not used any more."""
        self._forget()
        for part in self._parts.values():
            part.close()

    def tag(self, tag: Tag) -> Tag:
        """The tag in messages of a collective of this group."""
        return (self.name, *tag)

    def enter(self, limit: asyncio.Timeout) -> None:
        """A collective begins: its ``limit`` expires soon after a member is lost."""
        self._running.add(limit)

    def leave(self, limit: asyncio.Timeout) -> None:
        """A collective has ended."""
        self._running.discard(limit)

    def _on_lost(self, peer: PeerId, reason: str) -> None:
        if self.lost is not None or peer not in self.members:
            return
        # The first loss is the one to name: later ones are mostly peers that gave up because of it.
        self.lost = PeerLostError(peer, reason, waiting_for=f"a collective of {self.name}")
        deadline = asyncio.get_running_loop().time() + self.loss_grace_s
        for limit in self._running:
            if not limit.expired():  # otherwise its collective is about to raise
                limit.reschedule(deadline)
