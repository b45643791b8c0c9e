"""Which callers are admitted, which get an answer, and which are ignored. Sans-IO."""

from __future__ import annotations

from collections import OrderedDict

from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.greeting import Hello, RefusalCode
from zmqtrain.net.settings import NetSettings
from zmqtrain.wire.message import WIRE_VERSION

#: The number of strangers that are remembered; the oldest is forgotten first.
MAX_STRANGERS = 4096
#: A stranger gets at most one answer in this many seconds, and all strangers together at most `MAX_ANSWERS`.
ANSWER_PAUSE_S = 0.2
MAX_ANSWERS = 64


class Admission:
    """Limits the answers to strangers, so that garbage costs little and no caller can make this process flood others."""

    def __init__(self) -> None:
        self._ignored: OrderedDict[bytes, None] = OrderedDict()
        self._answered: OrderedDict[str, float] = OrderedDict()
        self._window_start = 0.0
        self._window_answers = 0
        self._dead: OrderedDict[bytes, str] = OrderedDict()

    def ignores(self, route: bytes) -> bool:
        return route in self._ignored

    def ignore(self, route: bytes) -> None:
        self._ignored[route] = None
        if len(self._ignored) > MAX_STRANGERS:
            self._ignored.popitem(last=False)

    def objection(self, hello: Hello, route: bytes, peer: PeerId, settings: NetSettings) -> tuple[RefusalCode, str] | None:
        """Why ``peer`` refuses this greeting, received over this route; None if it does not."""
        if hello.version != WIRE_VERSION:
            return "version", f"wire version {hello.version} meets {WIRE_VERSION}: install the same zmqtrain release on all hosts"
        if hello.token != settings.token:
            return "token", "it has another run token"
        if hello.to != peer or hello.peer == peer:
            return "protocol", f"this is {peer}, not {hello.to}"
        if settings.identity is not None and not settings.identity.believes(hello.peer, hello.address):
            return "protocol", "it greets from an address with another key than the one announced to the run's members"
        buried = self.buried(route)
        return None if buried is None else ("lost", buried)

    def may_answer(self, address: str, now: float) -> bool:
        """Whether to answer this address now; if so, it counts as answered."""
        if now - self._window_start >= 1.0:
            self._window_start, self._window_answers = now, 0
        last = self._answered.get(address)
        if self._window_answers >= MAX_ANSWERS or (last is not None and now - last < ANSWER_PAUSE_S):
            return False
        self._window_answers += 1
        self._answered[address] = now
        self._answered.move_to_end(address)
        if len(self._answered) > MAX_STRANGERS:
            self._answered.popitem(last=False)
        return True

    def bury(self, route: bytes, reason: str) -> None:
        """The session behind this route was abandoned and is never resumed."""
        self._dead[route] = reason
        if len(self._dead) > MAX_STRANGERS:
            self._dead.popitem(last=False)

    def buried(self, route: bytes) -> str | None:
        """Why the session behind the route was abandoned; None if it was not."""
        return self._dead.get(route)
