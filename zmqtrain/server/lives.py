"""Which processes train, at a server whose workers may be lost, and what follows for its shard when that changes.

Nothing here sends a message or waits for one, but for what `Serving` does under its lock, which every caller of a method that is a
coroutine holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from zmqtrain.errors import ProtocolError
from zmqtrain.exchange.server_changes import plan_of
from zmqtrain.membership.view import View
from zmqtrain.net.endpoint import PeerId
from zmqtrain.server.serving import Serving
from zmqtrain.wire.payload import Value


class Lives:
    """The processes (a worker's name and its incarnation) that train with one shard."""

    def __init__(self, serving: Serving, workers: Sequence[PeerId], base: Value) -> None:
        """``workers``: all that the run can have, by rank. ``base``: what the run begins with
        (`zmqtrain.exchange.server_changes.base_value`)."""
        self._serving, self._workers, self._base = serving, workers, base
        era = plan_of([base, []], {}).eras[0]
        self.training: dict[PeerId, int] = dict(era.members)
        self.finished: set[PeerId] = set()
        """Those that need no server any more."""
        self._first = era.since
        self._changes: list[tuple[int, tuple[tuple[PeerId, int], ...]]] = []  # steps, and who trains from there on
        self._dropped: dict[PeerId, dict[int, int]] = {}  # lives that are lost, each with the step at which it began
        serving.lives = {self.group_of(peer): life for peer, life in self.training.items()}

    @property
    def since(self) -> int:
        """The first step of those that train now."""
        return self._changes[-1][0] if self._changes else self._first

    @property
    def ended(self) -> bool:
        """Whether all that train have finished, and somebody has."""
        return bool(self.finished) and self.finished >= self.training.keys()

    @property
    def all_gone(self) -> bool:
        """Whether nobody trains who has not finished."""
        return self.finished >= self.training.keys()

    def group_of(self, peer: PeerId) -> int:
        """The group that the worker is."""
        return self._workers.index(peer)

    async def drop(self, peer: PeerId, life: int) -> None:
        """Go on without this process, if it trains."""
        if self.training.get(peer) == life:
            del self.training[peer]
            self._dropped.setdefault(peer, {})[life] = self.since
            await self._serving.drop(self.group_of(peer))

    def others(self, lives: Mapping[PeerId, int]) -> list[tuple[PeerId, int]]:
        """The processes that train, but are not among ``lives``."""
        return [(peer, life) for peer, life in self.training.items() if lives.get(peer) != life]

    def progress(self) -> Value:
        """How far those have got that were lost, and the step before which no change may take effect."""
        lost = [(peer, life) for peer, dropped in self._dropped.items() for life in dropped]
        found = [(peer, life, self._serving.aggregator.progress(life)) for peer, life in lost]
        rows = [(peer, life, *progress) for peer, life, progress in found if progress is not None]
        told: list[Value] = [[*row] for row in rows]
        return [max([self.since, *(most for *_, most in rows)]), told]

    async def change(self, since: int, lives: Mapping[PeerId, int]) -> None:
        """From this step on these train. It is said by all of them, and counts once."""
        change = (since, tuple(lives.items()))
        if change in self._changes or since < self.since:
            return
        self._changes.append(change)
        self.training = {peer: life for peer, life in lives.items() if life not in self._dropped.get(peer, ())}
        self.finished -= self.training.keys()
        await self._serving.enter(since, {self.group_of(peer): life for peer, life in self.training.items()})

    async def rest(self, peer: PeerId, since: int) -> None:
        """The worker has trained all that there was for it when those began who train ``since`` then."""
        if since == self.since:  # otherwise it has more to train by now
            await self._serving.rest(self.group_of(peer))

    def finish(self, peer: PeerId, life: int | None) -> None:
        """The process needs this server no more."""
        if self.training.get(peer) == life:
            self.finished.add(peer)

    def history(self) -> Value:
        """The beginning, and all changes since."""
        changes: list[Value] = [[since, [[peer, life] for peer, life in lives]] for since, lives in self._changes]
        return [self._base, changes]

    # A copy on another server.

    def state(self) -> Value:
        """For `load`, on another server."""
        training: list[Value] = [[peer, life] for peer, life in self.training.items()]
        dropped: list[Value] = [[peer, life, since] for peer, lives in self._dropped.items() for life, since in lives.items()]
        return [self.history(), training, dropped, sorted(self.finished)]

    def load(self, state: Value) -> None:
        """Become what `state` has told of, which had the same ``base``."""
        (_, changes), training, dropped, finished = cast(Any, state)
        self._changes = [(since, tuple((peer, life) for peer, life in lives)) for since, lives in changes]
        self.training = dict(training)
        self._dropped = {}
        for peer, life, since in dropped:
            self._dropped.setdefault(peer, {})[life] = since
        self.finished.clear()
        self.finished.update(finished)
        self._serving.lives = {self.group_of(peer): life for peer, life in self.training.items()}


class Seen:
    """The processes of workers that views of the members have shown to this server."""

    def __init__(self, workers: Sequence[PeerId]) -> None:
        self._workers = workers
        self._seen: set[tuple[PeerId, int]] = set()

    def add(self, lives: Mapping[PeerId, int]) -> None:
        """These processes were there when the run began."""
        self._seen.update(lives.items())

    def note(self, view: View) -> None:
        """There is a new view."""
        for peer in self._workers:
            member = view.members.get(peer)
            if member is not None:
                self._seen.add((peer, member.incarnation))

    def gone(self, view: View, training: Mapping[PeerId, int]) -> list[tuple[PeerId, int]]:
        """Those of ``training`` that are lost. (A process that no view has shown yet is one that has come since.)"""
        found = []
        for peer, life in training.items():
            member = view.members.get(peer)
            gone = peer in view.lost if member is None else member.incarnation != life
            if gone and (peer, life) in self._seen:
                found.append((peer, life))
        return found


def lives_of(told: Value) -> dict[PeerId, int]:
    """The processes that a worker's request names. Raises `ProtocolError`."""
    match told:
        case [*rows]:
            found = {str(row[0]): row[1] for row in rows if isinstance(row, list) and len(row) == 2 and isinstance(row[1], int)}
            if len(found) == len(rows):
                return {peer: life for peer, life in found.items() if isinstance(life, int)}
    raise ProtocolError(f"the members of a step are {told!r:.60}; each must be a name and an incarnation")
