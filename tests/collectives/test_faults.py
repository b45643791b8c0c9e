"""Lost, slow and mistaken members, and cancelled calls: an error that names the one, on every rank, and no waiting for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from tests.collectives.world import endpoints, everywhere, group_of
from zmqtrain.collectives.call import collective
from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce, barrier, broadcast
from zmqtrain.errors import PeerLostError, PeerTimeoutError, ProtocolError
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time


def ones(numel: int = 50_000) -> TensorPayload:
    return TensorPayload.of(np.ones(numel, "float32"))


async def outcomes(calls: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
    return await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[return-value]


@pytest.mark.parametrize("algorithm", ["ring", "halving", "doubling"])
async def test_a_lost_member_is_named_on_every_rank(algorithm: str) -> None:
    async with endpoints(5) as nodes:
        groups = group_of(nodes, loss_grace_s=0.02)
        calls = [
            asyncio.create_task(all_reduce(group, ones(), ("sum",), algorithm=algorithm))  # type: ignore[arg-type]
            for group in groups
            if group.rank != 3
        ]
        await asyncio.sleep(0.01)
        for node in nodes:
            if node.peer != "worker/3":
                node.forget("worker/3", "its process was killed")
        for error in await outcomes(calls):
            assert isinstance(error, PeerLostError)
            assert error.peer == "worker/3"
            assert "all_reduce group/sum" in str(error)
        with pytest.raises(PeerLostError, match="worker/3"):
            await barrier(groups[0], ("later",))


async def test_the_first_loss_is_named_not_those_that_follow_from_it() -> None:
    async with endpoints(4) as nodes:
        groups = group_of(nodes, loss_grace_s=0.02)
        call = asyncio.create_task(all_reduce(groups[0], ones(), ("sum",), algorithm="ring"))
        await asyncio.sleep(0)
        nodes[0].forget("worker/2", "killed")
        nodes[0].forget("worker/3", "gave up because of worker/2")  # the left neighbour, whom rank 0 waits for
        with pytest.raises(PeerLostError, match="worker/2"):
            await call


async def test_what_needs_no_lost_member_any_more_still_ends_well() -> None:
    async with endpoints(3) as nodes:
        groups = group_of(nodes, loss_grace_s=5.0)
        payloads = [ones(1000) for _ in groups]
        calls = [asyncio.create_task(broadcast(group, payload, ("x",))) for group, payload in zip(groups, payloads, strict=True)]
        await calls[2]
        groups[0].endpoint.forget("worker/2", "left")
        groups[1].endpoint.forget("worker/2", "left")
        assert await outcomes(calls) == [None] * 3


async def test_a_member_that_has_done_its_part_and_leaves_is_no_loss() -> None:
    """Down the tree from 0 to 1, and by way of 2, which comes late, to 3."""
    async with endpoints(4) as nodes:
        groups = group_of(nodes, loss_grace_s=0.01)
        payloads = [ones(1000) for _ in groups]
        calls = [asyncio.create_task(broadcast(groups[rank], payloads[rank], ("x",))) for rank in (0, 1, 3)]
        await outcomes(calls[:2])
        for node in nodes[:2]:
            await node.finish(timeout=5.0)
            await node.close()
        await asyncio.sleep(0.03)  # beyond the grace time that there would be after a loss
        assert not calls[2].done()
        await broadcast(groups[2], payloads[2], ("x",))
        assert await outcomes(calls) == [None] * 3


async def test_without_progress_for_the_timeout_the_member_waited_for_is_named() -> None:
    async with endpoints(3) as nodes:
        groups = group_of(nodes, timeout_s=0.02)
        with pytest.raises(PeerTimeoutError, match=r"worker/2 did not answer within 0\.02 s .* all_reduce group/sum"):
            await all_reduce(groups[0], ones(), ("sum",), algorithm="ring")


async def test_a_member_that_is_lost_as_the_timeout_runs_out_is_named() -> None:
    async with endpoints(3) as nodes:
        group = group_of(nodes)[0]
        said: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))

        async def loses_it() -> None:
            async with collective(group, "all_reduce", ("sum",)):
                (limit,) = group._running
                limit.reschedule(asyncio.get_running_loop().time())
                try:
                    await asyncio.Event().wait()
                finally:
                    assert limit.expired()
                    nodes[0].forget("worker/2", "killed")

        with pytest.raises(PeerLostError, match="worker/2"):
            await loses_it()
        assert said == []


async def test_members_that_call_with_different_sizes_are_told() -> None:
    async with endpoints(2) as nodes:
        calls = [asyncio.create_task(all_reduce(group, ones(100 + group.rank), ("sum",))) for group in group_of(nodes)]
        errors = await outcomes(calls)
        assert any(isinstance(error, ProtocolError) and "were expected in" in str(error) for error in errors)


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8, 20])
async def test_a_cancelled_call_leaves_the_endpoints_usable(turns: int) -> None:
    async with endpoints(3) as nodes:
        groups = group_of(nodes)
        calls = [asyncio.create_task(all_reduce(group, ones(300_000), ("cancelled",))) for group in groups]
        for _ in range(turns):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        assert all(isinstance(error, asyncio.CancelledError) for error in await outcomes(calls) if error is not None)
        payloads = [ones() for _ in groups]

        async def again(group: Group) -> None:
            await all_reduce(group, payloads[group.rank], ("again",))

        await everywhere(groups, again)
        assert all(bool((payload.numpy() == 3).all()) for payload in payloads)


async def test_a_group_must_hold_its_own_endpoint_once() -> None:
    async with endpoints(2) as nodes:
        with pytest.raises(ValueError, match="rank 1 of group g is worker/1, but this endpoint is worker/0"):
            Group(nodes[0], ("worker/0", "worker/1"), 1, "g")
        with pytest.raises(ValueError, match="twice"):
            Group(nodes[0], ("worker/0", "worker/0"), 0, "g")
