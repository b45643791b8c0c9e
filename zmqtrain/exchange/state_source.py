"""How a worker that joins late takes over the state of a neighbour: parameters, what the exchange keeps beside them, the
optimizer's state and the model's buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from zmqtrain.data.slots import Life
from zmqtrain.errors import PeerLostError, ProtocolError, TooLateError
from zmqtrain.exchange.base import Replica
from zmqtrain.exchange.checkpoint_part import copy_of_received, pack_manifest, unpack_manifest
from zmqtrain.exchange.members import Members
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.waiting import in_time
from zmqtrain.wire.payload import Payload, Value

_METHOD = "exchange.state"
_STEP, _TO, _PARAMETERS, _EXCHANGE, _BESIDE, _LEFT = "step", "to", "parameters", "exchange", "beside", "left"


class StateSource:
    """Collects requests for this worker's state. They are answered before the first step of the worker that has asked, so that it
    begins with what the others begin with."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._has_state = asyncio.Event()
        self._ended = self._failed = False
        self._process = 0
        self._members: Members | None = None
        self.wanted: dict[PeerId, int] = {}  # who asked -> which of its processes
        self._noted: set[Life] = set()  # those to whom this worker gives its state unasked

    def serve(self, members: Members) -> None:
        """Answer requests from now on. A late worker accepts them once it has a state itself (`begin`)."""
        self._process, self._members = members.own_incarnation, members
        self._endpoint.serve(_METHOD, self._note)
        if not members.late:
            self.begin()

    def serve_groups(self, members: Members) -> None:
        """As `serve`, if groups have several workers and models of their own: those that come to one do not ask
        (`NeighboursState.join_group`)."""
        self.serve(members)
        members.on_change(self._note_newcomers)

    def _note_newcomers(self, step: int, living: tuple[PeerId, ...]) -> None:
        """All know from which step on others take part, and with whose state they begin."""
        members = self._members
        assert members is not None, "on_change follows serve"
        me = (self._endpoint.peer, members.own_incarnation)
        for peer in living:
            life = (peer, members.incarnation(peer, step) or 0)
            if members.source(life) == me and life not in self._noted:
                self._noted.add(life)
                self.wanted[peer] = life[1]

    def begin(self) -> None:
        """This worker has a state, and trains: accept requests."""
        self._has_state.set()

    def due(self, step: int, members: Members) -> dict[PeerId, int]:
        """Those who asked, and train ``step``, of which it is known who trains it; and which of their processes did. None of them
        has been given anything."""
        return {peer: process for peer, process in self.wanted.items() if members.incarnation(peer, step) == process}

    async def answer(
        self,
        step: int,
        members: Members,
        replica: Replica,
        settle: Callable[[], Awaitable[None]],
        own: Callable[[], Mapping[str, Payload]] = dict,
    ) -> None:
        """Give the state with which ``step`` begins to those who have asked for it, and begin with that step. Before that,
        ``settle()`` waits until nothing is under way; ``own()``: what the exchange keeps, by name."""
        if self.wanted and (due := self.due(step, members)):
            await settle()
            await self.give(due, step, replica, own())

    async def answer_in_group(
        self,
        step: int,
        members: Members,
        group: Sequence[PeerId],
        replica: Replica,
        settle: Callable[[], Awaitable[None]],
        own: Callable[[], Mapping[str, Payload]] = dict,
    ) -> None:
        """As `answer`, in one of several ``group``s that have models of their own; all of it call this before each step."""
        if members.joins(step, among=group):
            # A newcomer goes on from the last step. If only some had completed that, and were lost, the others would train it anew.
            await members.together(f"given/{group[0]}/{step}", step, lambda _: settle(), among=group)
        await self.answer(step, members, replica, settle, own)

    async def give(self, peers: Mapping[PeerId, int], step: int, replica: Replica, own: Mapping[str, Payload]) -> None:
        """Send the state with which ``step`` begins to these processes, which have asked for it. Nothing changes it in the
        meantime."""
        tensors, values = await replica.beside()
        for peer, process in peers.items():
            if self.wanted.get(peer) != process:  # another process of that name has asked meanwhile, and begins later
                continue
            del self.wanted[peer]
            with suppress(PeerLostError):
                await self._give(peer, process, step, replica, own, tensors, values)

    def close(self, *, failed: bool = False) -> None:
        """Training has ended: refuse later requests. ``failed``: by an error, so that others may still train."""
        self._ended, self._failed = not failed, failed
        self._has_state.set()  # ends the waits for it
        self.wanted.clear()

    async def _note(self, caller: PeerId, incarnation: Value, wait: Value) -> Value:
        """The answer: which process of this worker will give its state; ``False``: training has ended; ``None``: it will never
        have one, or has none yet, and was not to ``wait`` for it."""
        if not isinstance(incarnation, int):
            raise ProtocolError(f"{caller} asked for the state as process {incarnation!r:.60}, which must be a whole number")
        if wait is True:
            await self._has_state.wait()  # whoever asks has a time-out
        if self._failed or not self._has_state.is_set():
            return None
        if self._ended:
            return False
        self.wanted[caller] = incarnation
        return self._process

    async def _give(
        self,
        peer: PeerId,
        process: int,
        step: int,
        replica: Replica,
        own: Mapping[str, Payload],
        tensors: Mapping[str, Payload],
        values: Mapping[str, Value],
    ) -> None:
        send = self._endpoint.send
        about: dict[str, Value] = {_STEP: step, _TO: process, _EXCHANGE: list(own), _BESIDE: dict(values)}
        if self._members is not None:
            about[_LEFT] = self._members.work_from(step)
        async with in_time(peer, "it to take the state that it has asked for", self._timeout_s):
            await send(peer, (_METHOD,), pack_manifest(tensors, about))
            for bucket in replica.buckets:
                # The next step updates the parameters while they are still being sent.
                await send(peer, (_METHOD, _PARAMETERS, bucket.index), _copied(bucket.parameters))
            for name, payload in own.items():
                await send(peer, (_METHOD, _EXCHANGE, name), _copied(payload))
            for name, payload in tensors.items():
                await send(peer, (_METHOD, _BESIDE, name), payload)


class NeighboursState:
    """Another worker's state, for one that joins late."""

    def __init__(self, endpoint: Endpoint, members: Members, *, timeout_s: float) -> None:
        self._endpoint, self._members, self._timeout_s = endpoint, members, timeout_s
        self._process: int | None = None
        self._first = 0
        self._all_trained = False  # as one of those asked has said
        self.source: PeerId = ""
        """The worker whose state it is, once it has been found."""

    async def join(self) -> int:
        """Ask for the state with which this worker's first step begins, and take part from that step on. Returns it; call `take`
        next.

        Those before this worker are asked first. One that is late itself is asked to wait for its own state only if none of the
        others trains. Raises `TooLateError` if all has been trained, and `PeerLostError` if nobody can give one."""
        # Asked before the others know of this worker: later the source might be past this worker's first step when it hears of it.
        # So those asked do not wait for this worker, whatever they wait for.
        await self._find(wait=False)
        if not self.source:
            await self._find(wait=True)
        if not self.source and self._all_trained:
            raise TooLateError(self._endpoint.peer, "the others have trained all there was")
        if not self.source:
            raise PeerLostError("the other workers", "there is none that trains", waiting_for="the state of one of them")
        self._first = await self._members.join()
        return self._first

    async def join_group(self) -> int:
        """As `join`, in one of several groups that have models of their own: all agree on whose state it is (`Members.source`), and
        that one gives it without being asked. Raises `PeerLostError` if nobody can give one."""
        self._first = await self._members.join()
        source = self._members.source((self._endpoint.peer, self._members.own_incarnation))
        if source is None:
            raise PeerLostError("the other workers", "there is none that trains", waiting_for="the state of one of them")
        self.source, self._process = source
        return self._first

    async def _find(self, *, wait: bool) -> None:
        """Set `source` to the first one that will give its state, if there is one."""
        own = self._members.own_incarnation
        for peer in self._members.neighbours():
            if peer not in self._members.neighbours():  # gone meanwhile: it may have left, and then no link to it is lost
                continue
            with suppress(PeerLostError):  # then another one
                answer = (await self._endpoint.request(peer, _METHOD, own, wait, timeout=self._timeout_s)).meta
                if answer is False:
                    self._all_trained = True
                elif isinstance(answer, int) and not isinstance(answer, bool):
                    self.source, self._process = peer, answer
                    return

    async def take(self, replica: Replica, own: Callable[[str], Payload | None] = lambda name: None) -> None:
        """Wait for the state, and write it to ``replica``. ``own(name)``: where something that the exchange keeps belongs. Raises
        `TooLateError` if the source has ended its training without another step, `PeerLostError`, `PeerTimeoutError`, and
        `ProtocolError` if the source has something else."""
        while True:
            try:
                received = await self._receive((_METHOD,), None)
            except PeerLostError as error:
                if error.finished:
                    raise TooLateError(self._endpoint.peer, f"{self.source} has trained all there was") from None
                raise
            listed, about = unpack_manifest(received)
            # Another process that had this worker's name may have asked before it was lost; what it was given comes first.
            mine = about[_TO] == self._members.own_incarnation
            if mine and about[_STEP] != self._first:
                raise ProtocolError(
                    f"{self.source} gives the state of step {about[_STEP]}, but this worker begins with {self._first}"
                )
            if mine and about.get(_LEFT) is not None:
                self._members.take_work(self._first, about[_LEFT])
            for bucket in replica.buckets:
                await self._receive((_METHOD, _PARAMETERS, bucket.index), bucket.parameters)
            for name in about[_EXCHANGE]:
                into = own(str(name))
                if into is None:
                    raise ProtocolError(f"{self.source} keeps {name!r:.60} beside its parameters, but this worker does not")
                await self._receive((_METHOD, _EXCHANGE, str(name)), into)
            # Copied, since the transport may own what it has received.
            tensors = {
                name: copy_of_received(await self._receive((_METHOD, _BESIDE, name), None), shape) for name, _, shape in listed
            }
            if mine:
                break
        await replica.take_beside(tensors, about[_BESIDE])
        for bucket in replica.buckets:
            replica.parameters_ready(bucket)

    async def _receive(self, tag: tuple[str | int, ...], into: Payload | None) -> Payload:
        what = f"its {'/'.join(map(str, tag))}"
        members = self._members
        # Another process that has its name by now would never send it.
        if members.incarnation(self.source, self._first) != self._process or not members.there(self.source, self._first):
            raise PeerLostError(self.source, "it was lost while this worker joined", waiting_for=what)
        async with in_time(self.source, what, self._timeout_s):
            return await self._endpoint.receive(self.source, tag, into=into)


def _copied(payload: Payload) -> Payload:
    copied = payload.empty_like()
    copied.copy_(payload)
    return copied
