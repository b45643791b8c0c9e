"""The coordinator and its members, over endpoints in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import HostLostError, PeerLostError, PeerTimeoutError, ProtocolError, RunTokenError
from zmqtrain.membership.actions import Outcome
from zmqtrain.membership.agent_link import AgentLink
from zmqtrain.membership.client import Membership
from zmqtrain.membership.coordinator import Coordinator
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import Placement, place
from zmqtrain.topology.timeouts import Timeouts

pytestmark = pytest.mark.virtual_time

TIMEOUTS = Timeouts.of(20.0)


def placement_of(groups: int, size: int, servers: int = 0, hosts: int = 1) -> Placement:
    text = "[job]\noversubscribe = true\n"
    text += "".join(f"[[hosts]]\nname = 'h{number}'\nslots = 4\n" for number in range(hosts))
    text += f"[compute]\ngroups = {groups}\ngroup_size = {size}\n[exchange]\n"
    text += f"kind = 'model_server'\nshards = {servers}\n" if servers else "kind = 'allreduce'\n"
    return place(parse_topology(text))


class Run:
    """A coordinator on a network in memory, and what it has told."""

    def __init__(self, placement: Placement, *, agents: bool, timeouts: Timeouts = TIMEOUTS) -> None:
        self.network, self.placement, self.timeouts = MemoryNetwork(), placement, timeouts
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.reports: list[tuple[str, list[dict[str, Any]]]] = []
        self.nodes: list[Node] = []
        self.coordinator = Coordinator(
            self.endpoint("coordinator"),
            placement,
            timeouts,
            agents=agents,
            on_event=lambda kind, values: self.events.append((kind, values)),
            on_report=lambda peer, events: self.reports.append((peer, events)),
        )

    def endpoint(self, peer: str, token: str = "secret") -> Node:
        self.nodes.append(self.network.endpoint(peer, NetSettings(token=token, lost_s=0.1, flush_s=0.1, greet_s=1.0)))
        return self.nodes[-1]

    async def close(self) -> None:
        await asyncio.gather(*(node.close() for node in self.nodes))

    async def join(self, peer: str) -> Membership:
        node = self.endpoint(peer)
        return await Membership.join(node, coordinator_address="memory://coordinator", timeouts=self.timeouts)

    async def agent(self, host: str) -> AgentLink:
        node = self.endpoint(f"agent/{host}")
        return await AgentLink.join(node, coordinator_address="memory://coordinator", timeouts=self.timeouts)

    async def everybody(self) -> dict[str, Membership]:
        peers = [role.peer for role in self.placement.roles]
        return dict(zip(peers, await asyncio.gather(*map(self.join, peers)), strict=True))


@asynccontextmanager
async def started(
    placement: Placement, *, agents: bool = False, timeouts: Timeouts = TIMEOUTS
) -> AsyncIterator[tuple[Run, asyncio.Task[Outcome]]]:
    run = Run(placement, agents=agents, timeouts=timeouts)
    task = asyncio.create_task(run.coordinator.run())
    try:
        yield run, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await run.close()


async def test_a_run_from_joining_to_its_end() -> None:
    async with started(placement_of(2, 2, servers=2)) as (run, task):
        members = await run.everybody()
        view = members["worker/3"].view
        assert view.complete
        assert [member.peer for member in view.workers()] == [f"worker/{rank}" for rank in range(4)]
        assert [(member.group, member.position) for member in view.workers()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [member.address for member in view.servers()] == ["memory://server/0", "memory://server/1"]
        assert run.coordinator.running.is_set()
        workers = [members[f"worker/{rank}"] for rank in range(4)]
        for _ in range(2):  # the same name again
            await asyncio.gather(*(worker.barrier("epoch") for worker in workers))
        await workers[2].report([{"kind": "step", "loss": 0.5}] * 1200)
        assert sum(len(events) for _, events in run.reports) == 1200
        assert not members["server/0"].finished.is_set()
        await asyncio.gather(*(worker.leave() for worker in workers))
        for number in range(2):
            await members[f"server/{number}"].finished.wait()
            await members[f"server/{number}"].leave()
        outcome = await task
        assert (outcome.status, outcome.failures) == ("done", ())
        assert [kind for kind, _ in run.events][-1] == "ended"


async def test_agents_vouch_for_their_roles() -> None:
    async with started(placement_of(1, 2, hosts=2), agents=True) as (run, task):
        links = {}
        for host in run.placement.hosts:
            if run.placement.of_host(host):
                links[host] = await run.agent(host)
                for role in run.placement.of_host(host):
                    links[host].started(role.peer)
        async with asyncio.TaskGroup() as group:
            for link in links.values():
                group.create_task(link.run())
            members = await run.everybody()
            for role in run.placement.roles:
                await members[role.peer].leave()
                await links[role.host].exited(role.peer, 0)
        assert (await task).status == "done"
        for link in links.values():
            await link.leave()
            assert link.alive == frozenset()


@given(st.permutations([*range(5)]), st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_joins_in_any_order_and_with_any_delay(order: list[int], delays: list[int]) -> None:
    async def scenario() -> None:
        async with started(placement_of(2, 2, servers=1)) as (run, _):
            peers = [role.peer for role in run.placement.roles]

            async def late(number: int) -> Membership:
                for _ in range(delays[number]):
                    await asyncio.sleep(0)
                return await run.join(peers[number])

            members = await asyncio.gather(*map(late, order))
            assert {tuple(sorted(member.view.members)) for member in members} == {tuple(sorted(peers))}
            assert len({member.view.version for member in members}) == 1

    run_virtual(scenario())


async def test_another_run_s_token_is_refused() -> None:
    async with started(placement_of(1, 1)) as (run, _):
        node = run.endpoint("worker/0", token="of another run")
        with pytest.raises(RunTokenError, match="coordinator has another run token"):
            await Membership.join(node, coordinator_address="memory://coordinator", timeouts=TIMEOUTS)
        assert run.coordinator.view.members == {}


async def test_a_role_that_cannot_be_reached_is_lost_although_its_agent_sees_it() -> None:
    async with started(placement_of(1, 2), agents=True, timeouts=Timeouts.of(1.0)) as (run, task):
        link = await run.agent("h0")
        for rank in range(2):
            link.started(f"worker/{rank}")
        beating = asyncio.create_task(link.run())
        await run.everybody()
        run.network.partition(["worker/1"], ["coordinator"])
        outcome = await task
        assert outcome.cause is not None
        assert outcome.cause.peer == "worker/1"
        assert "stands still" in outcome.cause.reason
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def test_a_stranger_is_refused() -> None:
    async with started(placement_of(1, 2)) as (run, _):
        with pytest.raises(ProtocolError, match=r"worker/7 is not part of this run, which expects worker/0, worker/1"):
            await run.join("worker/7")


async def test_a_join_that_takes_too_long_names_who_is_missing() -> None:
    async with started(placement_of(1, 3), timeouts=Timeouts.of(0.1)) as (run, task):
        with pytest.raises(PeerTimeoutError, match=r"worker/1, worker/2 did not answer .* \(2 of 3 are missing\)"):
            await run.join("worker/0")
        assert (await task).status == "failed"


async def test_a_second_process_replaces_the_first_while_joining() -> None:
    async with started(placement_of(1, 2)) as (run, _):
        first = asyncio.create_task(run.join("worker/0"))
        await asyncio.sleep(0.01)
        run.network.kill("worker/0")
        second = asyncio.create_task(run.join("worker/0"))
        await asyncio.sleep(0.01)
        first.cancel()
        await run.join("worker/1")
        assert (await second).view.complete


async def test_a_second_process_is_a_loss_once_the_run_goes() -> None:
    async with started(placement_of(1, 2)) as (run, task):
        members = await run.everybody()
        run.network.kill("worker/0")
        with pytest.raises(PeerLostError, match=r"too late to join|came back as another process"):
            await run.join("worker/0")
        await members["worker/1"].halted.wait()
        assert "worker/0" in members["worker/1"].view.lost
        await members["worker/1"].leave()
        assert (await task).failures[0].peer == "worker/0"


async def test_a_barrier_with_a_dead_member_names_it() -> None:
    async with started(placement_of(1, 3), agents=True) as (run, task):
        link = await run.agent("h0")
        for rank in range(3):
            link.started(f"worker/{rank}")
        members = await run.everybody()
        waiting = [asyncio.create_task(members[f"worker/{rank}"].barrier("eval")) for rank in (0, 2)]
        await asyncio.sleep(0.01)
        await link.exited("worker/1", -9)
        for task_ in waiting:
            with pytest.raises(PeerLostError, match=r"lost worker/1 while waiting for the barrier 'eval': .*SIGKILL"):
                await task_
        await members["worker/0"].halted.wait()
        assert members["worker/0"].halt_reason is not None
        assert members["worker/0"].halt_reason["kind"] == "failure"
        with pytest.raises(PeerLostError, match="worker/1"):  # the endpoint knows it, too
            await members["worker/0"].endpoint.receive("worker/1", ("gradient", 1))
        for rank in (0, 2):
            await link.exited(f"worker/{rank}", 128, {"message": "lost worker/1", "consequence": True})
        outcome = await task
        assert len(outcome.failures) == 3
        assert outcome.cause is not None
        assert outcome.cause.peer == "worker/1"
        assert isinstance(outcome.cause.error, HostLostError)
        await link.finished.wait()


async def test_halt_tells_everybody_once() -> None:
    async with started(placement_of(1, 3)) as (run, task):
        members = await run.everybody()
        told: list[str] = []
        for peer, member in members.items():
            member.on_halt(lambda reason, peer=peer: told.append(f"{peer}: {reason['message']}"))  # type: ignore[misc]
        await members["worker/0"].halt({"message": "the loss is nan"})
        await asyncio.gather(*(member.halt({"message": "mine, too"}) for member in members.values()))
        for member in members.values():
            await member.halted.wait()
            await member.leave()
        assert sorted(told) == [f"worker/{rank}: the loss is nan" for rank in range(3)]
        late: list[dict[str, Any]] = []
        members["worker/0"].on_halt(late.append)
        assert late[0]["peer"] == "worker/0"
        assert (await task).status == "halted"


async def test_members_are_told_when_the_coordinator_is_gone() -> None:
    async with started(placement_of(1, 1)) as (run, _):
        member = await run.join("worker/0")
        member.endpoint.forget("coordinator", "its process ended")
        assert member.halt_reason is not None
        assert member.halt_reason["kind"] == "coordinator lost"


async def test_a_role_without_an_agent_reports_its_own_failure() -> None:
    async with started(placement_of(1, 2)) as (run, task):
        members = await run.everybody()
        await members["worker/1"].fail({"message": "division by zero", "exit_code": 3, "consequence": False})
        await members["worker/0"].halted.wait()
        await members["worker/0"].fail({"message": "lost worker/1", "exit_code": 128, "consequence": True})
        outcome = await task
        assert outcome.cause is not None
        assert (outcome.cause.peer, outcome.cause.exit_code) == ("worker/1", 3)


async def test_cancelling_refuses_those_who_wait() -> None:
    run = Run(placement_of(1, 2), agents=False)
    task = asyncio.create_task(run.coordinator.run())
    waiting = asyncio.create_task(run.join("worker/0"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(PeerLostError, match="the run has ended"):
        await waiting
    await run.close()


async def test_an_agent_of_a_large_run_shows_between_its_heartbeats_that_it_is_there() -> None:
    timeouts, loop = replace(Timeouts.of(60.0), silent_s=2.0), asyncio.get_running_loop()
    async with started(placement_of(1000, 1, hosts=250), agents=True, timeouts=timeouts) as (run, _):
        link = await run.agent("h0")
        beats = asyncio.create_task(link.run())
        before, began = run.nodes[0].statistics()["messages_received"], loop.time()
        await asyncio.sleep(50.0)
        heartbeats = run.nodes[0].statistics()["messages_received"] - before
        assert heartbeats == 20  # one in 2.5 s, which is longer than an agent may be silent
        assert not run.coordinator.failed.is_set()
        beats.cancel()
        await run.coordinator.failed.wait()
        assert loop.time() - began < 50.0 + timeouts.silent_s
        assert run.events[-2][1]["reason"] == "lost the host h0: its agent has been silent for 2 s"
