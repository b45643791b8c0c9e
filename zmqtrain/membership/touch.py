"""A member's touch with the coordinator, which may be away for a while: its launcher has died, and another one is to take over.

Meanwhile the member goes on with what it can do alone. What it asks the coordinator waits, and is asked again (`repeated`)::

    in touch ──(link lost, or no answer)──▶ away ──(the coordinator has answered "again")──▶ in touch
                                              └──(nobody has come back for `alone_s`)──▶ given up
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from zmqtrain.errors import ConnectivityError, PeerLostError, PeerTimeoutError, ZmqTrainError
from zmqtrain.net.endpoint import Endpoint, PeerId, Returned

T = TypeVar("T")


class Touch:
    """Whether the coordinator is there. All methods on the loop's thread; `run` it as a task."""

    def __init__(self, pause_s: float, hurry_s: float) -> None:
        """``pause_s``: seconds between attempts to get back in touch. ``hurry_s``: how long one who is in a hurry still waits."""
        self.alone_s = 0.0
        """How long the coordinator may be away; 0: not at all."""
        self._pause_s, self._hurry_s = pause_s, hurry_s
        self._reason: str | None = None  # why the coordinator is away
        self._over = False
        self._result: Returned = "no"
        self._changed = asyncio.Event()
        self._hurried = asyncio.Event()

    @property
    def away(self) -> bool:
        """Whether the coordinator is away, and expected back."""
        return self._reason is not None and not self._over

    def lose(self, reason: str) -> bool:
        """The coordinator cannot be reached. Returns whether it is expected back."""
        if not self.alone_s or self._over:
            return False
        if self._reason is None:
            self._reason = reason
            self._changed.set()
        return True

    def hurry(self) -> None:
        """Wait no longer than a moment from now on: this process is about to end."""
        self._hurried.set()

    async def returned(self) -> Returned:
        """Wait until the coordinator is back, or given up."""
        if self._reason is None or self._over:
            return "no"
        while self._reason is not None and not self._over:
            await self._change()
        return "no" if self._over else self._result

    async def run(self, come_back: Callable[[], Awaitable[Returned]], give_up: Callable[[str], None]) -> None:
        """Get back in touch whenever touch was lost, until cancelled or given up.

        ``come_back()`` asks the coordinator once: it raises `ConnectivityError` if it cannot be reached, and another error if it
        wants nothing to do with this member. ``give_up(why)`` is called if nobody comes back."""
        while not self._over:
            if self._reason is None:
                await self._change()
                continue
            patience = asyncio.ensure_future(self._be_patient())
            trying = asyncio.ensure_future(self._try(come_back))
            try:
                await asyncio.wait({patience, trying}, return_when=asyncio.FIRST_COMPLETED)
                refusal = None
                if trying.done():
                    try:
                        self._result = trying.result()
                    except ZmqTrainError as error:
                        refusal = str(error)
                    else:
                        self._reason = None
                        self._tell()
                        continue
            finally:
                for task in (patience, trying):
                    task.cancel()
                await asyncio.wait({patience, trying})
            self._over = True
            give_up(refusal or f"{self._reason}, and it has not come back within {self.alone_s:g} s ([job] alone)")
            self._tell()

    async def _try(self, come_back: Callable[[], Awaitable[Returned]]) -> Returned:
        while True:
            try:
                return await come_back()
            except ConnectivityError as error:
                if isinstance(error, PeerLostError) and error.peer == _GIVEN_UP:
                    raise
            await asyncio.sleep(self._pause_s)

    async def _be_patient(self) -> None:
        try:
            async with asyncio.timeout(self.alone_s):
                await self._hurried.wait()
                await asyncio.sleep(min(self._hurry_s, self.alone_s))
        except TimeoutError:
            return

    def _tell(self) -> None:
        self._changed.set()

    async def _change(self) -> None:
        changed = self._changed
        await changed.wait()
        if self._changed is changed:
            self._changed = asyncio.Event()


#: The peer in the error with which the coordinator says that it has given up the member that asks.
_GIVEN_UP: PeerId = "member"


def given_up(peer: PeerId, why: str) -> PeerLostError:
    """The coordinator's answer to a member that it has given up."""
    return PeerLostError(_GIVEN_UP, f"the coordinator has given up {peer}: {why}")


async def repeated(endpoint: Endpoint, to: PeerId, ask: Callable[[], Awaitable[T]], *, of_another: bool = False) -> T:
    """Ask ``to``, and ask again whenever it was lost and is back (`Endpoint.expect_back`): to ask twice must do no harm.

    ``of_another``: ask again only another process that has taken its place, since this one knows of the first time.
    Raises what ``ask`` raises, once it is not worth another time."""
    timed_out = False
    while True:
        try:
            return await ask()
        except (PeerLostError, PeerTimeoutError) as error:
            if error.peer.partition(" ")[0] != to:
                raise
            back = await endpoint.returned(to)
            if back == "no" or (back == "same" and (of_another or timed_out)):
                raise
            timed_out = back == "same" and isinstance(error, PeerTimeoutError)
