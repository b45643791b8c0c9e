"""Requests and answers: ordinary messages under reserved topics, which need no credit.

They need none because each of them is awaited: a caller has at most a window of unanswered requests at one peer, and every answer
was asked for. Requests for a method that is not served yet wait until it is: roles may start in any order.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from inspect import CO_VARARGS, Parameter, signature
from types import FunctionType
from typing import Any, Protocol, cast

import zmqtrain.errors
from zmqtrain.errors import PeerTimeoutError, ProtocolError, ZmqTrainError
from zmqtrain.net.endpoint import EndingError, Handler, PeerId, Tag
from zmqtrain.net.flags import ANSWER, ERROR, REQUEST
from zmqtrain.net.incoming import Incoming
from zmqtrain.net.mailbox import Mailbox
from zmqtrain.waiting import abandoned, in_time
from zmqtrain.wire.message import pack_value, packed_value
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.value import ValuePayload
from zmqtrain.world import random_bits

#: After a handler's failure has been reported, others of the same method are only counted for so long: a peer that keeps sending
#: arguments of a wrong type must not fill a log.
REPORT_EVERY_S = 60.0


class Withdrawable(Protocol):
    def withdraw(self) -> None:
        """Take the message back, if nothing of it has been sent."""


#: Queues a message that needs no credit. Raises the errors of ``send``.
Post = Callable[[PeerId, Tag, Payload], Withdrawable]


class Requests:
    """Both sides of all requests of one endpoint."""

    def __init__(
        self,
        mailbox: Mailbox,
        post: Post,
        window_bytes: int,
        unreached: Callable[[PeerId], str],
        wrong: Callable[[PeerId], None],
    ) -> None:
        """``unreached``: why there is no connection to a peer, as far as is known; empty if there is one. ``wrong``: called with a
        peer that sent a request with other arguments than the method takes."""
        self._post, self._unreached, self._wrong = post, unreached, wrong
        self._window = window_bytes
        # Not from 0: a handler that outlives the process that asked must not answer another process with the same name.
        self._number = random_bits(48)
        self._calls: dict[int, tuple[PeerId, asyncio.Future[Payload], str]] = {}
        self._used: dict[PeerId, int] = {}
        self._turns: dict[PeerId, deque[asyncio.Future[None]]] = {}
        self._handlers: dict[str, Handler] = {}
        self._takes: dict[str, tuple[Handler, tuple[float, float]]] = {}  # how many arguments: at least, and at most
        self._unserved: dict[str, list[Incoming]] = {}
        self._reported: dict[str, tuple[float, int]] = {}  # method: when its failure was reported, and failures since then
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        mailbox.route(REQUEST, self._requested)
        mailbox.route(ANSWER, self._answered)
        mailbox.route(ERROR, self._answered)

    # The caller's side.

    async def call(self, to: PeerId, method: str, args: tuple[Value, ...], timeout: float) -> Payload:
        what = f"the answer to {method!r}"
        payload = ValuePayload(list(args))
        nbytes = len(packed_value(payload))
        deadline = asyncio.get_running_loop().time() + timeout
        if self._full(to, nbytes):
            async with in_time(to, what, timeout, why=lambda: self._unreached(to)):
                await self._room(to, nbytes)
        self._used[to] = self._used.get(to, 0) + nbytes
        try:
            return await self._exchange(to, method, payload, what, timeout, deadline)
        finally:
            self._leave(to, nbytes)

    async def _exchange(self, to: PeerId, method: str, payload: Payload, what: str, timeout: float, deadline: float) -> Payload:
        self._number += 1
        number = self._number
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Payload] = loop.create_future()
        self._calls[number] = (to, future, what)
        # Not `in_time`: whose contexts take a tenth of the time of a small request.
        alarm = loop.call_at(deadline, self._late, number, timeout)
        try:
            message = self._post(to, (REQUEST, number, method), payload)
            try:
                return await future
            except (asyncio.CancelledError, PeerTimeoutError):
                message.withdraw()
                raise
        finally:
            alarm.cancel()
            del self._calls[number]

    def _late(self, number: int, timeout: float) -> None:
        to, future, what = self._calls[number]
        if not future.done():
            future.set_exception(PeerTimeoutError(to, what, timeout, why=self._unreached(to)))
            future.exception()  # it counts as retrieved, should the caller be cancelled before it runs

    def _full(self, peer: PeerId, nbytes: int) -> bool:
        """Whether unanswered requests leave no room for another of this size."""
        used = self._used.get(peer, 0)
        return used > 0 and used + nbytes > self._window

    async def _room(self, peer: PeerId, nbytes: int) -> None:
        while self._full(peer, nbytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._turns.setdefault(peer, deque()).append(turn)
            await turn

    def _leave(self, peer: PeerId, nbytes: int) -> None:
        self._used[peer] -= nbytes
        for turn in self._turns.pop(peer, ()):
            if not turn.done():
                turn.set_result(None)

    def waits(self) -> list[str]:
        """The pending answers, in words."""
        return [f"{what} of {peer}" for peer, _, what in self._calls.values()]

    def _answered(self, incoming: Incoming) -> None:
        tag = incoming.tag
        call = self._calls.get(tag[1]) if len(tag) == 2 and isinstance(tag[1], int) else None
        if call is None or call[0] != incoming.source or call[1].done():
            return  # its caller has gone
        payload = incoming.finish()
        if tag[0] == ERROR:
            call[1].set_exception(rebuild_error(payload.meta, incoming.source))
        else:
            call[1].set_result(payload)

    def lose(self, peer: PeerId, error: Callable[[str], ZmqTrainError]) -> None:
        """The peer is gone: its answers will not come, and its requests need none."""
        self.lose_calls(peer, error)
        for queue in self._unserved.values():
            queue[:] = [incoming for incoming in queue if incoming.source != peer]

    def lose_calls(self, peer: PeerId, error: Callable[[str], ZmqTrainError]) -> None:
        """The process that was called is gone: its answers will not come."""
        for other, future, what in self._calls.values():
            if other == peer and not future.done():
                future.set_exception(error(what))

    # The serving side.

    def serve(self, method: str, handler: Handler) -> None:
        self._handlers[method] = handler
        for incoming in self._unserved.pop(method, ()):
            self._start(method, handler, incoming)

    def _requested(self, incoming: Incoming) -> None:
        tag = incoming.tag
        method = str(tag[-1])
        if len(tag) != 3 or not isinstance(tag[1], int) or not isinstance(incoming.finish().meta, list):
            self._answer(incoming, ERROR, ValuePayload(describe_error(ZmqTrainError("this is not a valid request"))))
        elif method in self._handlers:
            self._start(method, self._handlers[method], incoming)
        else:
            self._unserved.setdefault(method, []).append(incoming)

    def _start(self, method: str, handler: Handler, incoming: Incoming) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(handler, incoming), name=f"{method} for {incoming.source}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, handler: Handler, incoming: Incoming) -> None:
        args: Any = incoming.finish().meta
        method = str(incoming.tag[2])
        known = self._takes.get(method)
        if known is None or known[0] is not handler:  # at the first call: most handlers of a process are never called
            known = self._takes[method] = handler, _arguments(handler)
        least, most = known[1]
        if not least <= len(args) <= most:
            self._wrong(incoming.source)
            error = ProtocolError(f"{incoming.tag[2]!r} does not take {len(args)} arguments")
            self._answer(incoming, ERROR, ValuePayload(describe_error(error)))
            return
        try:
            answer = await handler(incoming.source, *args)
            # Not by isinstance: with a protocol that would take a tenth of what a small request does. Values have no methods.
            payload = cast("Payload", answer) if hasattr(answer, "frames") else ValuePayload(answer)
            self._answer(incoming, ANSWER, payload)
        except ZmqTrainError as error:
            self._answer(incoming, ERROR, ValuePayload(describe_error(error)))
        except EndingError:
            return
        except Exception as error:  # noqa: BLE001 - the caller gets an answer, and the loop's handler reports it
            text = f"{incoming.tag[2]!r} failed there: {type(error).__name__}: {error}"
            self._answer(incoming, ERROR, ValuePayload({"type": "ZmqTrainError", "text": text[:2000], "attributes": {}}))
            self._report(str(incoming.tag[2]), incoming.source, error)

    def _report(self, method: str, caller: PeerId, error: Exception) -> None:
        """Give an unexpected error to the loop's exception handler, at most one of a method in `REPORT_EVERY_S`."""
        loop = asyncio.get_running_loop()
        last, silent = self._reported.get(method, (-math.inf, 0))
        if loop.time() - last < REPORT_EVERY_S:
            self._reported[method] = last, silent + 1
            return
        self._reported[method] = loop.time(), 0
        more = f" ({silent} more failures of it since the last one that was reported)" if silent else ""
        message = f"the handler of {method!r}, called by {caller}, raised{more}"
        loop.call_exception_handler({"message": message, "exception": error})

    def _answer(self, incoming: Incoming, kind: str, payload: Payload) -> None:
        if self._closed:
            return  # the endpoint's farewell tells the caller
        try:
            self._post(incoming.source, (kind, incoming.tag[1]), payload)
        except zmqtrain.errors.ConnectivityError:
            return  # the caller has gone
        except zmqtrain.errors.WireError:
            if kind != ERROR:  # it may be this answer that cannot be sent
                raise
            # Otherwise the link was closed for a damaged message, of which both ends know.

    async def close(self) -> None:
        """Cancel what is being served; nothing is answered any more."""
        self._closed = True
        await abandoned(self._tasks)


def _arguments(handler: Handler) -> tuple[float, float]:
    """How many arguments a handler takes beside the caller: at least, and at most."""
    function = getattr(handler, "__func__", handler)
    if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):  # the usual case, in a thirtieth of the time
        code, bound = function.__code__, function is not handler
        takes, optional = code.co_argcount - bound - 1, len(function.__defaults__ or ())
        return takes - optional, float("inf") if code.co_flags & CO_VARARGS else takes
    kinds = list(signature(handler).parameters.values())
    places = [each for each in kinds if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    endless = any(each.kind is Parameter.VAR_POSITIONAL for each in kinds)
    least = sum(each.default is Parameter.empty for each in places)
    return least - 1, float("inf") if endless else len(places) - 1


def describe_error(error: ZmqTrainError) -> dict[str, Value]:
    """An error as plain data; attributes that cannot be sent are left out."""
    attributes: dict[str, Value] = {}
    for name, value in vars(error).items():
        try:
            pack_value(value)
        except (TypeError, ValueError):
            continue
        attributes[name] = value
    return {"type": type(error).__name__, "text": str(error), "attributes": attributes}


def rebuild_error(data: Any, peer: PeerId) -> ZmqTrainError:
    """The error that a peer answered with. Only classes of `zmqtrain.errors` are created, and none of their code runs."""
    if not isinstance(data, dict) or not isinstance(data.get("attributes"), dict):
        return ZmqTrainError(f"{peer} answered with an unreadable error")
    kind = getattr(zmqtrain.errors, str(data.get("type")), ZmqTrainError)
    if not (isinstance(kind, type) and issubclass(kind, ZmqTrainError)):
        kind = ZmqTrainError
    error = kind.__new__(kind)
    Exception.__init__(error, str(data.get("text")))
    vars(error).update(data["attributes"])
    return error
