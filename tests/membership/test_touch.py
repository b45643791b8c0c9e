"""Members that lose touch with a coordinator that keeps a journal, over endpoints in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.membership.test_coordinator import TIMEOUTS, placement_of
from zmqtrain.errors import PeerLostError, SupersededError
from zmqtrain.membership.actions import Outcome
from zmqtrain.membership.client import Membership
from zmqtrain.membership.coordinator import Coordinator
from zmqtrain.membership.journal import Ledger, apply
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.settings import NetSettings
from zmqtrain.wire.payload import Value

pytestmark = pytest.mark.virtual_time

ALONE_S = 50.0


class Kept:
    """A journal that is a table."""

    def __init__(self) -> None:
        self.ledger: Ledger = {}
        self.superseded = False
        self._staged: Ledger = {}

    def stage(self, changes: Mapping[str, Value]) -> None:
        self._staged.update(changes)

    def write(self, changes: Mapping[str, Value], *, durable: bool) -> None:
        apply(self.ledger, {**self._staged, **changes})
        self._staged.clear()


class World:
    """Two workers, and one coordinator after the other."""

    def __init__(self) -> None:
        self.network, self.placement, self.journal = MemoryNetwork(), placement_of(1, 2), Kept()
        self.reports: list[Any] = []
        self.events: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.members: list[Membership] = []

    def lead(self) -> tuple[Coordinator, asyncio.Task[Outcome]]:
        coordinator = Coordinator(
            self.network.endpoint("coordinator", NetSettings(token="t", flush_s=0.1)),
            self.placement,
            TIMEOUTS,
            agents=False,
            on_report=lambda _peer, events: self.reports.extend(events),
            on_event=lambda kind, _values: self.events.append(kind),
            journal=self.journal,
        )
        self.tasks.append(asyncio.create_task(coordinator.run()))
        return coordinator, self.tasks[-1]

    async def join(self, alone_s: float = ALONE_S) -> list[Membership]:
        async def one(rank: int) -> Membership:
            node = self.network.endpoint(f"worker/{rank}", NetSettings(token="t", lost_s=0.5, flush_s=0.1))
            membership = await Membership.join(node, coordinator_address="memory://coordinator", timeouts=TIMEOUTS)
            membership.outlive(alone_s)
            self.tasks.append(asyncio.create_task(membership.keep_in_touch()))
            return membership

        self.members = list(await asyncio.gather(one(0), one(1)))
        return self.members

    async def die(self, leading: asyncio.Task[Outcome]) -> None:
        self.network.kill("coordinator")
        leading.cancel()
        await asyncio.wait({leading})

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*(member.endpoint.close() for member in self.members))


async def test_a_barrier_and_reports_wait_for_the_next_coordinator() -> None:
    world = World()
    _, leading = world.lead()
    first, second = await world.join()
    await first.report([{"n": 0}])
    waiting = asyncio.create_task(first.barrier("end"))
    await asyncio.sleep(1.0)
    await world.die(leading)
    held = [asyncio.create_task(second.report([{"n": number}])) for number in (1, 2, 3)]
    await asyncio.sleep(20.0)
    assert not any(task.done() for task in (waiting, *held))
    assert first.away
    _, leading = world.lead()
    await asyncio.gather(*held)
    assert [event["n"] for event in world.reports] == [0, 1, 2, 3]
    await asyncio.gather(waiting, second.barrier("end"))
    assert not first.away
    await asyncio.gather(first.leave(), second.leave())
    assert (await leading).status == "done"
    assert world.events == ["join", "join", "running", "leave", "leave", "finishing", "ended"]
    await world.close()


async def test_a_report_whose_answer_was_lost_is_recorded_once() -> None:
    world = World()
    world.lead()
    first, _ = await world.join()
    for _ in range(2):
        await first.ask("membership.report", [{"n": 0}], first._incarnation, 1)
    await first.ask("membership.report", [{"n": 1}], first._incarnation, 2)
    assert [event["n"] for event in world.reports] == [0, 1]
    await world.close()


async def test_the_run_is_given_up_when_nobody_comes_back() -> None:
    world = World()
    _, leading = world.lead()
    first, second = await world.join()
    told: list[dict[str, Any]] = []
    first.on_halt(told.append)
    await world.die(leading)
    with pytest.raises(PeerLostError):
        await second.report([{"n": 1}])
    await first.halted.wait()
    assert "has not come back within 50 s ([job] alone)" in told[0]["message"]
    await world.close()


async def test_without_patience_a_member_ends_with_its_coordinator() -> None:
    world = World()
    _, leading = world.lead()
    first, _ = await world.join(alone_s=0.0)
    await world.die(leading)
    await first.halted.wait()
    assert first.halt_reason is not None
    assert first.halt_reason["kind"] == "coordinator lost"
    await world.close()


async def test_a_coordinator_whose_journal_is_another_ones_decides_nothing_more() -> None:
    world = World()
    coordinator, leading = world.lead()
    first, _ = await world.join()
    world.journal.superseded = True
    leaving = asyncio.create_task(first.leave())
    with pytest.raises(ExceptionGroup) as raised:
        await leading
    assert isinstance(raised.value.exceptions[0], SupersededError)
    assert coordinator.superseded
    assert not leaving.done()  # it waits for the one that has taken over
    leaving.cancel()
    await world.close()
