"""A part of a checkpoint on its way: tensors are made as there is room for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest

from zmqtrain.errors import DamagedError
from zmqtrain.exchange.checkpoint_part import (
    MOST_BYTES_ON_THEIR_WAY,
    MOST_ON_THEIR_WAY,
    pack_manifest,
    send_part,
    unpack_manifest,
)
from zmqtrain.net.endpoint import Endpoint
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload


class FakeEndpoint:
    """Messages arrive when someone waits for it. Counts the most of them that are on their way."""

    def __init__(self) -> None:
        self.under_way: deque[int] = deque()
        self.sent: list[int] = []
        self.most = self.most_bytes = 0

    async def send(self, to: str, tag: object, payload: Payload, *, priority: int = 0) -> FakeSent:
        self.sent.append(payload.nbytes)
        self.under_way.append(payload.nbytes)
        self.most, self.most_bytes = max(self.most, len(self.under_way)), max(self.most_bytes, sum(self.under_way))
        return FakeSent(self)

    async def request(self, to: str, method: str, *args: object, timeout: float) -> ValuePayload:
        return ValuePayload(None)


class FakeSent:
    def __init__(self, endpoint: FakeEndpoint) -> None:
        self._endpoint = endpoint

    async def wait_released(self) -> None:
        self._endpoint.under_way.popleft()


class Made(Mapping[str, Payload]):
    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def __getitem__(self, name: str) -> Payload:
        return PhantomPayload(self._sizes[int(name)], "uint8")

    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self._sizes)))

    def __len__(self) -> int:
        return len(self._sizes)


@pytest.mark.parametrize(
    ("sizes", "most", "most_bytes"),
    [
        ([100] * 30, MOST_ON_THEIR_WAY + 1, 100 * (MOST_ON_THEIR_WAY + 1)),
        ([MOST_BYTES_ON_THEIR_WAY // 2] * 6, 3, MOST_BYTES_ON_THEIR_WAY),
        ([MOST_BYTES_ON_THEIR_WAY * 3] * 4, 1, MOST_BYTES_ON_THEIR_WAY * 3),
    ],
)
async def test_few_bytes_are_on_their_way_at_a_time(sizes: list[int], most: int, most_bytes: int) -> None:
    endpoint = FakeEndpoint()
    await send_part(cast(Endpoint, cast(Any, endpoint)), 3, "model", Made(sizes), {}, timeout_s=1.0)
    assert endpoint.sent[1:] == sizes
    assert not endpoint.under_way
    assert endpoint.most <= most
    assert endpoint.most_bytes <= most_bytes + endpoint.sent[0]


def test_no_flipped_bit_of_a_manifest_is_taken_for_what_was_sent() -> None:
    manifest = pack_manifest({"weight": PhantomPayload(6, "float32")}, {"step": 3, "to": 6014512082707379231})
    assert unpack_manifest(manifest) == ([("weight", "float32", (6,))], {"step": 3, "to": 6014512082707379231})
    whole = b"".join(manifest.frames())
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError, match="damaged on the way"):
            unpack_manifest(TensorPayload.received(damaged, "uint8", (len(damaged),)))
    for length in range(1, len(whole)):
        with pytest.raises(DamagedError):
            unpack_manifest(TensorPayload.received(bytearray(whole[:length]), "uint8", (length,)))
