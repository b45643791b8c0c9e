"""What everything must pass that a server tells others: it may be held back until another server has what it follows from."""

from __future__ import annotations

from typing import Protocol


class Gate(Protocol):
    """Holds back what a shard's server sends."""

    @property
    def shut(self) -> bool:
        """Whether nothing is sent at all, because another server tells the same."""
        ...

    def ticket(self) -> int:
        """For what is about to be told: the number of the operation that it follows from."""
        ...

    async def passed(self, ticket: int) -> None:
        """Wait until it may be told."""
        ...


class OpenGate:
    """Lets everything out at once."""

    shut = False

    def ticket(self) -> int:
        return 0

    async def passed(self, ticket: int) -> None:
        return None


class ShutGate:
    """A gate that lets nothing out."""

    shut = True

    def ticket(self) -> int:
        return 0

    async def passed(self, ticket: int) -> None:
        raise AssertionError("nothing is sent through this gate")


OPEN = OpenGate()
