"""An FC server as a coroutine: what it is sent, what it answers, and how it ends. Its layers double what they are given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import numpy as np
import pytest

from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.events import NullRecorder
from zmqtrain.merged_fc.client import FcClient
from zmqtrain.merged_fc.executor import BatchPart, ExecutorState, Trained
from zmqtrain.merged_fc.messages import ActivationsMeta, AnswerMeta, activations_tag
from zmqtrain.merged_fc.queue import Applied, FcQueue, Turn
from zmqtrain.merged_fc.server import FcServer, FcSettings
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.node import Node
from zmqtrain.server.staleness import Policy
from zmqtrain.topology.timeouts import Timeouts
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time

GROUPS = (("worker/0", "worker/1"), ("worker/2", "worker/3"))
TIMEOUTS = Timeouts.of(10.0)


class DoublingExecutor:
    """The gradient of what came is twice itself; the loss is the mean, and infinite for a first element of 13."""

    def __init__(self) -> None:
        self.turns: list[tuple[Turn, int]] = []
        self.updates: list[Applied] = []

    async def train(self, turn: Turn, parts: Sequence[BatchPart]) -> Trained:
        arrays = [part.tensors[0].numpy() for part in parts]  # type: ignore[attr-defined]
        self.turns.append((turn, sum(part.meta.samples for part in parts)))
        await asyncio.sleep(0)
        loss = float("inf") if any(array[0] == 13 for array in arrays) else float(np.concatenate(arrays).mean())
        return Trained(loss, 0.25, tuple((TensorPayload.of(2 * array),) for array in arrays))

    async def update(self, applied: Applied) -> None:
        self.updates.append(applied)

    async def evaluate(self, part: BatchPart) -> list[float]:
        return [float(part.tensors[0].numpy().sum()), float(part.meta.samples)]  # type: ignore[attr-defined]

    async def state(self) -> ExecutorState:
        return ExecutorState({}, {}, {})


class Kept:
    def __init__(self) -> None:
        self.steps: list[int] = []

    async def save(self, step: int, tensors: object, sidecar: object) -> None:
        self.steps.append(step)


class World:
    """An FC server and the clients of four workers."""

    def __init__(self, policy: str = "async") -> None:
        self.network = MemoryNetwork()
        self.executor, self.kept = DoublingExecutor(), Kept()
        self.own = self.network.endpoint("fc/0")
        queue = FcQueue(2, 2, Policy(policy))  # type: ignore[arg-type]
        settings = FcSettings(GROUPS, request_s=2.0)
        self.server = FcServer(self.own, settings, queue, self.executor, self.kept, NullRecorder())
        self.nodes: dict[str, Node] = {peer: self.network.endpoint(peer) for group in GROUPS for peer in group}
        self.clients = {peer: FcClient(node, "fc/0", TIMEOUTS) for peer, node in self.nodes.items()}

    async def run(self, *lives: Awaitable[object]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.server.run())
            for life in lives:
                tasks.create_task(_wait(life))
        for node in (self.own, *self.nodes.values()):
            await node.close()

    async def step(self, peer: str, step: int, values: Sequence[float]) -> tuple[AnswerMeta, list[float]]:
        into = TensorPayload.of(np.zeros(len(values)))
        meta = ActivationsMeta(1, (True,), len(values), divisor=4.0)
        answer = await self.clients[peer].train(step, 0, meta, [TensorPayload.of(np.array(values))], [into])
        return answer, into.numpy().tolist()


async def _wait(life: Awaitable[object]) -> None:
    await life


@pytest.mark.parametrize("policy", ["sync", "async"])
async def test_groups_train_and_checkpoints_are_kept(policy: str) -> None:
    world = World(policy)

    async def live(peer: str, number: int) -> None:
        for step in range(4):
            answer, gradients = await world.step(peer, step, [number, step])
            group = number // 2
            assert gradients == [2 * number, 2 * step]
            assert answer == AnswerMeta(loss=(4 * group + 1 + 2 * step) / 4, compute_s=0.25, gradients=1)
            if number == 0 and step % 2 == 1:
                await world.clients[peer].keep(step + 1, save=step > 1)
        assert await world.clients[peer].evaluate(ActivationsMeta(1, (False,), 2), [TensorPayload.of(np.ones(2))]) == [2.0, 2.0]
        await world.clients[peer].finish()

    await world.run(*(live(f"worker/{number}", number) for number in range(4)))
    assert len(world.executor.turns) == 8
    assert {samples for _, samples in world.executor.turns} == {4}
    assert [len(each.groups) for each in world.executor.updates] == ([2] * 4 if policy == "sync" else [1] * 8)
    assert world.kept.steps == [4]


async def test_a_loss_that_is_not_finite_has_no_gradients_and_no_update() -> None:
    world = World()

    async def live(peer: str, number: int) -> None:
        answer, gradients = await world.step(peer, 0, [13.0 if number == 0 else number])
        assert answer.gradients == (0 if number < 2 else 1)
        assert gradients == ([0.0] if number < 2 else [2 * number])
        await world.clients[peer].finish()

    await world.run(*(live(f"worker/{number}", number) for number in range(4)))
    assert [each.groups for each in world.executor.updates] == [(1,)]


async def test_what_is_not_due_is_refused_and_others_go_on() -> None:
    world = World()

    async def wrong(step: int) -> None:
        with pytest.raises(ProtocolError, match=r"fc/0 refused.*expected: 0 of step 0"):
            await world.step("worker/0", step, [1.0])

    async def foreign() -> None:
        stranger = world.network.endpoint("worker/9")
        refusal: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def refused(_caller: str, _tag: object, reason: str) -> None:
            refusal.set_result(reason)

        stranger.serve("fc_refused", refused)
        await stranger.send("fc/0", activations_tag(0, 0, 0), TensorPayload.of(np.ones(1)))
        async with asyncio.timeout(2):
            assert await refusal == "worker/9 is not a worker of this run"
        await stranger.close()

    async def live(peer: str, number: int) -> None:
        if number > 1:
            assert (await world.step(peer, 0, [number]))[1] == [2 * number]
        await world.clients[peer].finish()

    await world.run(wrong(3), foreign(), *(live(f"worker/{number}", number) for number in range(4)))
    assert [turn.group for turn, _ in world.executor.turns] == [1]


@pytest.mark.parametrize(("tags", "said"), [([0, 0], "twice"), ([1000], "more tensors than belong")])
async def test_tensors_that_do_not_belong_are_refused(tags: list[int], said: str) -> None:
    world = World()

    async def live(peer: str, number: int) -> None:
        if number == 0:
            for place in tags:
                payload = TensorPayload.of(np.ones(1), ActivationsMeta(2, (True,), 1).to_value())
                await world.nodes[peer].send("fc/0", activations_tag(0, 0, place), payload)
            with pytest.raises(ProtocolError, match=said):
                await world.clients[peer].evaluate(ActivationsMeta(2, (True,), 1), [TensorPayload.of(np.ones(1))])
        await world.clients[peer].finish()

    await world.run(*(live(f"worker/{number}", number) for number in range(4)))


async def test_a_lost_worker_ends_it() -> None:
    world = World()

    async def live(peer: str) -> None:
        await world.step(peer, 0, [1.0])

    async def die() -> None:
        await asyncio.sleep(0.01)  # worker/3's part never comes, so this group has no turn
        world.own.forget("worker/3", "its process ended")

    with pytest.raises(ExceptionGroup) as caught:
        await world.run(live("worker/2"), die())
    assert caught.group_contains(PeerLostError, match="lost worker/3 while waiting for its activations")
    for node in (world.own, *world.nodes.values()):
        await node.close()
