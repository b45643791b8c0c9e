"""The state of a run as one worker has it in its hands, and gives it to others: a checkpoint of one ordinary worker that never
reaches a disk. `zmqtrain.train.checkpoint.saving.Saver` makes it, and restores from it.

Whole tensors of a model that is divided are kept in a file until they are sent (`zmqtrain.train.checkpoint.spool`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from zmqtrain.errors import CheckpointError, PeerLostError
from zmqtrain.exchange.checkpoint_part import AS_KEPT, OPEN_PART, RESUME, Part, fetch_part, pack_manifest
from zmqtrain.exchange.grid_era import FetchPart
from zmqtrain.net.endpoint import Endpoint, PeerId
from zmqtrain.train.checkpoint.payloads import Payloads
from zmqtrain.wire.payload import Payload, Value
from zmqtrain.wire.tensor import TensorPayload


class HandedOver:
    """What a worker hands over. `put` all parts, then `serve` them; the tensors must not change meanwhile."""

    def __init__(self, endpoint: Endpoint, step: int) -> None:
        """``step``: the number of completed steps."""
        self.step = step
        self._endpoint = endpoint
        self._parts: dict[str, tuple[Payloads, dict[str, Any]]] = {}
        self._asked: asyncio.Queue[tuple[PeerId, str]] = asyncio.Queue()
        self._opened = asyncio.Event()

    def put(self, name: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Hand over a part of this name as well."""
        self._parts[name] = Payloads(tensors), dict(values)

    def open(self) -> None:
        """All parts are there. Those who ask earlier wait."""
        self._opened.set()

    async def serve(self) -> None:
        """Give the parts to those who ask for them. Run it as a task, and cancel it once all have them."""
        self._endpoint.serve(OPEN_PART, self._on_open)
        async with asyncio.TaskGroup() as sending:
            while True:
                sending.create_task(self._send(*await self._asked.get()))

    async def fetch(
        self, name: str, into: Mapping[str, Payload] | None = None, keep: Callable[[str, Payload], Payload] | None = None
    ) -> Part | None:
        """For this worker itself: copies, as `fetch_part` returns what it has received."""
        found, values = self._part(name)
        tensors: dict[str, Payload] = {}
        for tensor in found:
            payload, target = found[tensor], None if into is None else into.get(tensor)
            if target is not None:
                target.copy_(payload)
                tensors[tensor] = target
            else:
                copied = TensorPayload.of(payload.tensor.clone())
                tensors[tensor] = copied if keep is None else keep(tensor, copied)
        return Part(name, self.step, tensors, values)

    async def _on_open(self, caller: PeerId, name: str) -> Value:
        await self._opened.wait()
        self._part(name)
        self._asked.put_nowait((caller, name))
        return self.step

    async def _send(self, to: PeerId, name: str) -> None:
        found, values = self._part(name)
        try:
            sent = [await self._endpoint.send(to, (RESUME, name), pack_manifest(found, values))]
            sent += [await self._endpoint.send(to, (RESUME, name), found[tensor]) for tensor in found]
            for message in sent:
                await message.wait_released()
        except PeerLostError:
            return  # membership reports the loss

    def _part(self, name: str) -> tuple[Payloads, dict[str, Any]]:
        """All workers begin as the only one that there is in it."""
        kind = name.removeprefix(AS_KEPT).partition("-")[0]
        part = self._parts.get(kind if kind not in ("worker", "group") else f"{kind}-0")
        if part is None:
            raise CheckpointError(f"what was handed over has no part {name:.60}")
        return part


def from_another(endpoint: Endpoint, giver: PeerId, timeout_s: float) -> FetchPart:
    """Fetches what ``giver`` hands over."""

    async def fetch(name: str, into: Mapping[str, Payload] | None, keep: Callable[[str, Payload], Payload] | None) -> Part | None:
        return await fetch_part(endpoint, name, timeout_s=timeout_s, into=into, keep=keep, coordinator=giver)

    return fetch
