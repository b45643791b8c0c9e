"""Model servers between groups of ranks, for programs with DistributedDataParallel: a communication hook.

Each rank's process holds a shard of the model as a server, beside its work as a worker. Both are the coroutines of a launched job,
and run in a thread of the process.
"""

# Annotations must not be strings here: DistributedDataParallel compares those of its hooks with its own types.

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from secrets import token_hex
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from zmqtrain.arena import Arena, Region, shared_memory_missing
from zmqtrain.c10d.ddp_replica import SETTING, DdpReplica
from zmqtrain.c10d.groups import Groups
from zmqtrain.c10d.left_gradients import LeftGradients
from zmqtrain.c10d.network_thread import NetworkThread
from zmqtrain.c10d.rendezvous import encryption_wanted, encrypts, settings_here, this_host
from zmqtrain.exchange.model_server import ModelServerExchange
from zmqtrain.exchange.server_settings import ModelServerSettings
from zmqtrain.membership.secret import read_token, run_token
from zmqtrain.net.node import Node
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.server.model_server import ModelServer
from zmqtrain.server.settings import ServerSettings
from zmqtrain.topology.bucket_limit import PieceLimit
from zmqtrain.waiting import in_time


class ModelServers:
    """The state of `ddp_comm_hook`: groups of ranks that are synchronous inside, and use model servers between them (Omnivore's
    compute groups, Hadjis et al. 2016).

    ::

        dist.init_process_group("zmq")
        servers = zmqtrain.ModelServers(model, optimizer)           # all begin with rank 0's parameters
        replica = DistributedDataParallel(model, process_group=servers.within)
        replica.register_comm_hook(servers, zmqtrain.ddp_comm_hook)
        ...
        loss.backward()
        servers.step()                                              # in place of optimizer.step()
        ...
        servers.close()

    The servers run the optimizer, with the hyperparameters that ``optimizer`` has at each step; its own state stays
    empty. Gradients leave bucket by bucket while backward goes on, so clipping them afterwards, or any other change, is refused.
    Optimizers must work element by element (SGD, Adam, ...). The servers have the parameters, so a checkpoint must be loaded into
    the model before; a change between two steps is refused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        group_size: int | None = None,
        *,
        staleness: Literal["sync", "async"] | int = "async",
        bucket_bytes: int = 4 << 20,
        timeout_s: float = 600.0,
    ) -> None:
        """All ranks make one, at the same point of the program.

        Args:
            model: its parameters become rank 0's.
            optimizer: over the model's parameters.
            group_size: the number of consecutive ranks in a group; by default those of a host (``LOCAL_WORLD_SIZE``).
            staleness: whether groups wait for each other at each step (sync), never (async), or when they are a given number of
                steps apart.
            bucket_bytes: gradients are sent in buckets of about this size.
            timeout_s: how long anything may wait for another rank.

        Raises `ValueError` if the world cannot be divided in this way, and `TaskError` for an optimizer that servers cannot run.
        """
        divided = Groups(group_size)
        self._rank, world, size, group, position = dist.get_rank(), divided.world, divided.size, divided.group, divided.place
        groups = tuple(tuple(f"worker/{first + place}" for place in range(size)) for first in range(0, world, size))
        self.within: Any = divided.within
        """The process group of this rank's own group, for DistributedDataParallel."""
        self._timeout_s, self._optimizer = timeout_s, optimizer
        self._left = LeftGradients(model.named_parameters())
        self._network = NetworkThread()
        self._region: Region | None = None
        self._nodes: list[Node] = []
        self._serving: asyncio.Task[None] | None = None
        run = [token_hex(16)]
        dist.broadcast_object_list(run, 0)
        self._token = run_token(read_token(os.environ) or "", run[0])
        try:
            self._arenas = self._share_memory()
            self._replica = DdpReplica(model, optimizer, size, bucket_bytes, self._arenas[0], timeout_s)
            self._nodes = self._network.call(self._open())
            self._worker = self._nodes[0]
            addresses: list[Any] = [None] * world
            dist.all_gather_object(addresses, [node.address for node in self._nodes])
            self._network.call(self._serve(addresses))
            settings = ModelServerSettings(
                group=group,
                position=position,
                groups=groups,
                servers=tuple(f"server/{rank}" for rank in range(world)),
                policy="bound" if isinstance(staleness, int) else staleness,
                bound=staleness if isinstance(staleness, int) else 0,
                pieces=PieceLimit(bucket_bytes, spread=self._several_hosts),
                request_s=timeout_s,
                barrier_s=timeout_s,
            )
            self._exchange = ModelServerExchange(self._worker, settings)
            self._replica.connect(self._network.loop, self._exchange)
            self._network.call(self._exchange.start(self._replica))
        except BaseException as error:
            self._end(error)
            raise
        self._replica.take()

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Hand over a copy of a bucket's gradients, which stay unchanged. Never blocks."""
        self._left.leave()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._replica.add(parameter, gradient)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def step(self) -> None:
        """Call it in place of ``optimizer.step()``: waits for the parameters that result from this step's gradients, and takes
        them.

        Raises the error that broke the exchange (`PeerLostError` that names a lost rank, `PeerTimeoutError`, ...), and `UsageError`
        if gradients were changed after backward, since they have left for the servers as they were, or parameters since the last
        step, since they are the servers'.
        """
        self._left.require_unchanged()
        self._replica.require_taken()
        self._network.call(self._replica.finish_step())
        self._replica.take()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedules look at it

    def accept(self) -> None:
        """The model's parameters were changed for a while, which the next `step` ends; without this it is refused."""
        self._replica.accept()

    def close(self) -> None:
        """Training is over: waits until all ranks have called this, since they need this rank's server until then."""
        try:
            self._network.call(self._finish())
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._end(error)

    def _share_memory(self) -> tuple[Arena | None, Arena | None]:
        """The worker's and the server's slot in a region that the ranks of each host share."""
        world = dist.get_world_size()
        found: list[Any] = [None] * world
        dist.all_gather_object(found, {"host": this_host(), "encryption": encryption_wanted(), "memory": shared_memory_missing()})
        self._encrypted = encrypts(found, [f"rank {rank}" for rank in range(world)])
        own = found[self._rank]
        self._several_hosts = any(told["host"] != own["host"] for told in found)
        here = [rank for rank, told in enumerate(found) if own["memory"] is told["memory"] is None and told["host"] == own["host"]]
        if here and here[0] == self._rank:
            self._region = Arena.create(2 * len(here))
        paths: list[Any] = [None] * world
        dist.all_gather_object(paths, None if self._region is None else self._region.path)
        if not here:
            return None, None
        slot = 2 * here.index(self._rank)
        return Arena.join(paths[here[0]], slot), Arena.join(paths[here[0]], slot + 1)

    async def _open(self) -> list[Node]:
        """The endpoints of the worker and of the server."""
        nodes = []
        for kind, arena in zip(("worker", "server"), self._arenas, strict=True):
            # With keys of its own.
            settings = settings_here(self._token, self._timeout_s, _get_default_store(), encrypted=self._encrypted)
            nodes.append(await open_zeromq(f"{kind}/{self._rank}", settings=replace(settings, arena=arena)))
        return nodes

    async def _serve(self, addresses: Sequence[tuple[str, str]]) -> None:
        """Run this rank's server, for all workers; its worker gets the addresses of all servers."""
        for node in self._nodes:
            for rank, (worker, server) in enumerate(addresses):
                for peer, address in ((f"worker/{rank}", worker), (f"server/{rank}", server)):
                    if peer != node.peer:
                        node.add_peer(peer, address)
        workers = tuple(f"worker/{rank}" for rank in range(len(addresses)))
        server_settings = ServerSettings(self._rank, workers, request_s=self._timeout_s, barrier_s=self._timeout_s)
        serving = ModelServer(self._nodes[1], server_settings, arena=self._arenas[1])
        self._serving = asyncio.create_task(serving.run(), name=f"server/{self._rank}")
        self._serving.add_done_callback(self._on_served)

    def _on_served(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self._replica.abort(error)

    async def _finish(self) -> None:
        await self._exchange.settle()
        await self._exchange.stop()
        assert self._serving is not None
        async with in_time("another rank", "it to call close()", self._timeout_s, SETTING):
            await self._serving

    def _end(self, error: BaseException | None) -> None:
        """Nothing more will be sent or served. The endpoints tell the others so."""

        async def close() -> None:
            if self._serving is not None:
                self._serving.cancel()
                await asyncio.wait([self._serving])
            for node in self._nodes:
                with suppress(asyncio.CancelledError):
                    await node.close()

        self._network.call(close())
        self._network.close()
