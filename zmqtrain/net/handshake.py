"""How two ends of a link find each other: who they are, where, and when to greet. Sans-IO.

Each end has a random number, its *session*. Both greet until each knows that the other knows its session; then the link is open.
"""

from __future__ import annotations

from enum import Enum

from zmqtrain.net.greeting import Hello
from zmqtrain.net.settings import NetSettings
from zmqtrain.world import random_bits


class Judgement(Enum):
    """The consequence of a greeting for the link that exists already."""

    CONTINUES = "the known end, or the first one"
    OUTDATED = "it knows an old end of ours, and has a new one itself: let it begin again"
    REPLACED = "another end, and nothing was open with the previous one: forget that one"
    RESTARTED = "it was restarted"
    GIVEN_UP = "it had already given up on this process"


class Handshake:
    """One process's side of the handshake with a peer: a state machine that gets the time as an argument."""

    __slots__ = (
        "_answer_by",
        "_connect_at",
        "_demanded_at",
        "_hello_at",
        "_hello_pause",
        "_settings",
        "address",
        "opened",
        "remote",
        "session",
    )

    def __init__(self, settings: NetSettings, now: float) -> None:
        self._settings = settings
        self.session = random_bits(63) | 1
        self.remote: Hello | None = None
        """What the peer's end has announced about itself."""
        self.opened = False
        """Whether each end knows that the other knows it; once true, it stays true."""
        self.address = ""
        """Where the transport tries to reach the peer."""
        self._demanded_at: float | None = None
        self._connect_at = now
        self._hello_at: float | None = None
        self._answer_by: float | None = None  # of an open link: when the greeting over a new connection must have been answered
        self._hello_pause = settings.hello_s

    @property
    def demanded(self) -> bool:
        """Whether this process waits for the peer."""
        return self._demanded_at is not None

    def demand(self, now: float) -> None:
        """This process waits for the peer from now on."""
        if self._demanded_at is None:
            self._demanded_at = now

    def connect(self, address: str, now: float) -> None:
        """The transport tries this address from now on."""
        self.address = address
        self._connect_at = now

    def gives_up_address(self, other: str, now: float) -> bool:
        """Whether to try ``other``, the address from which a peer greets, because the announced address leads nowhere. There is no
        connection.

        Not at once: the announced address may lead around an obstacle of which the peer does not know.
        """
        if self.opened or self.address == other:
            return False
        return not self.address or now >= self._connect_at + 4 * self._settings.hello_s

    def judge(self, hello: Hello) -> Judgement:
        """What a greeting of the peer (version and token are right) means for this link. Pass it to `greet` if it continues."""
        if self.remote is None or self.remote.session == hello.session:
            return Judgement.CONTINUES
        if hello.known not in (0, self.session):
            return Judgement.OUTDATED
        if not self.opened:
            return Judgement.REPLACED
        return Judgement.RESTARTED if self.remote.process != hello.process else Judgement.GIVEN_UP

    def forget(self) -> None:
        """The peer's end is no longer the known one."""
        assert not self.opened
        self.remote = None

    def greet(self, hello: Hello) -> bool:
        """Accept a greeting that `judge` found to continue. Returns whether to greet back."""
        if hello.known not in (0, self.session):
            return True  # it knows an earlier session of ours: announce this one again
        if self.remote is None:
            self.remote = hello
        if hello.known == self.session:
            self._answer_by = None
            if not self.opened:
                self.opened = True
                self._hello_at = None
        return not hello.opened

    # Time

    def link_up(self, now: float) -> None:
        """The transport has a connection: greet over it."""
        self._hello_at = now
        self._hello_pause = self._settings.hello_s
        self._answer_by = now + self._settings.greet_s if self.opened else None

    def link_down(self) -> None:
        """There is no connection to greet over."""
        self._hello_at = self._answer_by = None

    def hello_due(self, now: float) -> bool:
        """Whether to greet now; if so, the next greeting is postponed."""
        if self._hello_at is None or now < self._hello_at:
            return False
        if self.opened:
            self._hello_at = None
        else:
            self._hello_at = now + self._hello_pause
            self._hello_pause = min(self._hello_pause * 2, self._settings.hello_s * 8)
        return True

    @property
    def settled(self) -> bool:
        """Whether `hello_due` and `late` do not change by themselves, so that there are no `deadlines`."""
        return self.opened and self._hello_at is None and self._answer_by is None

    def deadlines(self) -> list[float]:
        """The times at which `hello_due` or `late` may change by themselves."""
        late_at = [] if self.opened or self._demanded_at is None else [self._demanded_at + self._settings.greet_s]
        return [*late_at, *(at for at in (self._hello_at, self._answer_by) if at is not None)]

    def unanswered(self, now: float) -> bool:
        """Whether the peer has not answered the greeting over a new connection of an open link. Its process may be another one now,
        which cannot tell what it gets from garbage if the greeting was damaged."""
        return self._answer_by is not None and now >= self._answer_by

    def late(self, now: float) -> bool:
        """Whether a peer for which this process waits has not answered in time."""
        return not self.opened and self._demanded_at is not None and now >= self._demanded_at + self._settings.greet_s
