"""The workers that take part in the training at each step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from zmqtrain.collectives.group import Group
from zmqtrain.net.endpoint import Endpoint, PeerId

T = TypeVar("T")

#: Hears that from a step on others take part: the step, and all of them.
Change = Callable[[int, tuple[PeerId, ...]], None]


class Members(Protocol):
    """The workers that train a step. All of them have the same answer for the same step."""

    survives: bool
    """Whether the others go on where one is lost. Where not, its loss is the run's end."""
    late: bool
    """Whether this worker comes to a run that is under way."""

    def at(self, step: int) -> tuple[PeerId, ...]:
        """Those who train ``step``, by rank."""
        ...

    def there(self, peer: PeerId, step: int) -> bool:
        """Whether that one of those who train ``step`` is still there. Another process that has its name by now is not."""
        ...

    async def join(self) -> int:
        """Take part from now on, if late. Returns the step to begin with."""
        ...

    async def release(self, step: int) -> None:
        """Wait until it is known who trains ``step``. It may begin afterwards, and only then."""

    def on_change(self, change: Change) -> None:
        """Call ``change(step, members)`` whenever it is known that others train from ``step`` on, before it is released."""

    async def together(self, name: str, step: int, run: Callable[[Group], Awaitable[T]]) -> T:
        """Run a collective of all who trained the step before ``step``, as far as they are still there; all of them call it.

        ``run`` may be called again, with a smaller group, where one is lost meanwhile: it then begins anew. ``name`` must be
        another for each call, and so must be the tags of its collectives."""
        ...

    async def stop(self) -> None:
        """Stop taking part."""


class FixedMembers:
    """Implements `Members` where everybody stays from the beginning to the end."""

    survives = False
    late = False

    def __init__(self, endpoint: Endpoint, members: tuple[PeerId, ...], *, timeout_s: float) -> None:
        self._endpoint, self._members, self._timeout_s = endpoint, members, timeout_s
        self._group: Group | None = None

    def at(self, step: int) -> tuple[PeerId, ...]:
        return self._members

    def there(self, peer: PeerId, step: int) -> bool:
        return True

    async def join(self) -> int:
        return 0

    async def release(self, step: int) -> None:
        return None

    def on_change(self, change: Change) -> None:
        return None

    async def together(self, name: str, step: int, run: Callable[[Group], Awaitable[T]]) -> T:
        if self._group is None:
            self._group = group_of(self._endpoint, self._members, "members", self._timeout_s)
        return await run(self._group)

    async def stop(self) -> None:
        return None


def group_of(endpoint: Endpoint, members: tuple[PeerId, ...], name: str, timeout_s: float) -> Group:
    """A group of these workers, this endpoint among them."""
    # The others may evaluate or write a checkpoint while we wait for them.
    return Group(endpoint, members, members.index(endpoint.peer), name, timeout_s=timeout_s)
