"""The process of a model server: its part in the run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zmqtrain.errors import CheckpointError, PeerTimeoutError
from zmqtrain.exchange.checkpoint_part import fetch_part, send_nothing, send_part, wait_committed
from zmqtrain.membership.context import RoleContext
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.server.model_server import ModelServer
from zmqtrain.server.replicated import ReplicatedServer
from zmqtrain.server.settings import ServerSettings
from zmqtrain.waiting import once_set
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload


@dataclass(frozen=True, slots=True)
class CoordinatorCheckpoints:
    """Checkpoints that the coordinator's side collects and hands out."""

    endpoint: Endpoint
    name: str
    timeout_s: float

    async def save(self, step: int, tensors: dict[str, Tensor], sidecar: dict[str, Value]) -> None:
        payloads = {name: TensorPayload.of(tensor) for name, tensor in tensors.items()}
        await send_part(self.endpoint, step, self.name, payloads, sidecar, timeout_s=self.timeout_s)

    async def hold_nothing(self, sidecar: dict[str, Value]) -> None:
        await send_nothing(self.endpoint, self.name, sidecar, timeout_s=self.timeout_s)

    async def committed(self, step: int) -> None:
        while True:
            try:
                await wait_committed(self.endpoint, step, timeout_s=self.timeout_s)
            except PeerTimeoutError:
                continue  # it is late, but may still be complete
            except CheckpointError:
                return
            else:
                return

    async def restore(self) -> tuple[dict[str, Tensor], dict[str, Value]]:
        part = await fetch_part(self.endpoint, self.name, timeout_s=self.timeout_s)
        if part is None:
            raise CheckpointError(f"the checkpoint has no part {self.name}: it was written without this model server")
        tensors: dict[str, Tensor] = {}
        for name, payload in part.tensors.items():
            assert isinstance(payload, TensorPayload)
            tensors[name] = payload.tensor
        return tensors, dict(part.sidecar)


async def run_server(context: RoleContext) -> None:
    """Serve a shard of the model until all workers have finished. Opens nothing and leaves nothing open.

    Raises `PeerLostError` if a worker is lost and the run cannot go on without it, and `CheckpointError` if a resumed run has no
    part for this server.
    """
    role, timeouts = context.role, context.timeouts
    settings = ServerSettings(
        index=role.index,
        workers=tuple(worker.peer for worker in context.placement.workers),
        request_s=timeouts.request_s,
        barrier_s=timeouts.barrier_s,
        elastic=context.topology.elastic,
    )
    if context.topology.moves_shards:
        replicated = ReplicatedServer(
            context.endpoint,
            context.membership,
            context.placement,
            settings,
            checkpoints=lambda shard: CoordinatorCheckpoints(context.endpoint, f"server-{shard}", timeouts.barrier_s),
            copies=context.topology.replicated,
            recorder=context.recorder,
            arena=context.arena,
        )
        context.membership.on_halt(replicated.halt)
        await replicated.run()
        return
    checkpoints = CoordinatorCheckpoints(context.endpoint, f"server-{role.index}", timeouts.barrier_s)
    server = ModelServer(
        context.endpoint, settings, recorder=context.recorder, checkpoints=checkpoints, arena=context.arena
    )  # fmt: skip
    if not settings.elastic:
        await server.run()
        return
    context.membership.on_view(server.heed)
    context.membership.on_halt(server.halt)
    async with once_set(context.membership.finished, server.finish_all):
        await server.run()
