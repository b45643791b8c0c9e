"""A worker's team changes: what the old one had under way is freed first, then the new one's first parameters are read, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest

from zmqtrain.data.teams import Team
from zmqtrain.exchange.members import FixedMembers, Members
from zmqtrain.exchange.own_team import OwnTeam
from zmqtrain.net.endpoint import Endpoint, PeerId

pytestmark = pytest.mark.virtual_time


def team_of(life: int) -> Team:
    return Team("worker/0", life, (("worker/0", 1), ("worker/1", life)))


class ChangingMembers(FixedMembers):
    """The test says which team this worker belongs to."""

    def __init__(self, team: Team | None) -> None:
        super().__init__(cast(Endpoint, None), ("worker/0", "worker/1"), timeout_s=5.0)
        self.team_now = team
        self.tell: Callable[[int, tuple[PeerId, ...]], None] = lambda step, living: None

    def team(self) -> Team | None:
        return self.team_now

    def on_change(self, callback: Callable[[int, tuple[PeerId, ...]], None]) -> None:
        self.tell = callback

    def before_steps(self, prepare: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        return None

    def form_team(self, life: int) -> None:
        self.team_now = team_of(life)
        self.tell(3, ("worker/0", "worker/1"))


class Scene:
    """What has happened, in its order."""

    def __init__(self, team: Team | None) -> None:
        self.said: list[str] = []
        self.members = ChangingMembers(team)
        self.freed, self.answered = asyncio.Event(), asyncio.Event()
        self.own = OwnTeam(cast(Members, self.members), changed=self._changed, read=self._read)

    def _changed(self) -> Awaitable[None]:
        self.said.append("abandons")

        async def free() -> None:
            await self.freed.wait()
            self.said.append("free")

        return free()

    async def _read(self) -> None:
        assert self.own.now is not None
        self.said.append(f"reads {self.own.now.life}")
        await self.answered.wait()
        self.said.append("has read")


async def test_the_first_team_has_nothing_to_read() -> None:
    scene = Scene(team_of(1))
    assert await scene.own.enter()
    scene.members.form_team(1)  # others have changed
    assert await scene.own.enter()
    assert scene.said == []


async def test_a_new_team_reads_when_all_is_free_and_only_once() -> None:
    scene = Scene(team_of(1))
    scene.members.form_team(2)
    entering = asyncio.create_task(scene.own.enter())
    await asyncio.sleep(1.0)  # virtual
    assert scene.said == ["abandons"]
    scene.freed.set()
    scene.answered.set()
    assert not await entering
    assert await scene.own.enter()
    assert scene.said == ["abandons", "free", "reads 2", "has read"]
    await scene.own.stop()


async def test_a_read_for_a_team_that_has_changed_again_is_abandoned() -> None:
    scene = Scene(team_of(1))
    scene.freed.set()
    scene.members.form_team(2)
    entering = asyncio.create_task(scene.own.enter())
    await asyncio.sleep(1.0)
    scene.members.form_team(3)
    assert not await entering
    scene.answered.set()
    assert not await scene.own.enter()
    assert await scene.own.enter()
    assert [each for each in scene.said if each not in ("abandons", "free")] == ["reads 2", "reads 3", "has read"]
    await scene.own.stop()


async def test_one_that_comes_late_reads_when_it_has_a_team() -> None:
    scene = Scene(None)
    assert await scene.own.enter()  # nothing yet
    scene.freed.set()
    scene.answered.set()
    scene.members.form_team(4)
    assert not await scene.own.enter()
    assert scene.said[-1] == "has read"
    await scene.own.stop()
