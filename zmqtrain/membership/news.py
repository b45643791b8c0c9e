"""Waiting for a view of the members that says something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from zmqtrain.errors import ConnectivityError
from zmqtrain.membership.client import Membership
from zmqtrain.membership.view import View


class News:
    """Make one for as long as the membership lasts: it hears of each new view."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._heard = asyncio.Event()
        self._over = False  # the run has failed, so that no view will help
        self._patience_s = membership.timeouts.lost_s + membership.timeouts.request_s
        membership.on_view(self._hear)
        membership.on_halt(self._halt)

    @property
    def view(self) -> View:
        """The newest view of the members that this process knows."""
        return self._membership.view

    def _hear(self, _view: View) -> None:
        self._heard.set()
        self._heard = asyncio.Event()

    def _halt(self, reason: Mapping[str, Any]) -> None:
        if reason.get("kind") in ("failure", "coordinator lost"):
            self._over = True
            self._hear(self.view)

    async def until(self, says: Callable[[View], bool], error: ConnectivityError) -> None:
        """Wait until ``says`` is true of the newest view. Raises ``error``, which has happened, if no view says so within the
        time in which a loss is noticed and told; a coordinator that is away tells nobody who was lost, so that time does not
        count."""
        membership = self._membership
        while not says(membership.view):
            if self._over:
                raise error
            was_away = membership.away
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._heard.wait()
            except TimeoutError:
                if not was_away and not membership.away:
                    raise error from None
