"""Workers whose centers differ find that out together."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.collectives.world import endpoints, group_of
from zmqtrain.errors import ProtocolError
from zmqtrain.exchange.averaging.alike import require_alike
from zmqtrain.wire.tensor import TensorPayload

pytestmark = pytest.mark.virtual_time


def errors(states: list[dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]]) -> list[BaseException | None]:
    async def run() -> list[BaseException | None]:
        async with endpoints(len(states)) as nodes:
            groups = group_of(nodes)
            states_of = [{name: TensorPayload.of(values) for name, values in state.items()} for state in states]
            calls = (require_alike(group, state, "end") for group, state in zip(groups, states_of, strict=True))
            return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 16, 17, 1000])
def test_equal_states_pass_and_a_small_difference_of_one_worker_is_found_on_all(size: int) -> None:
    center = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    states = [{"center/0": center.copy(), "center/1": 1000 * center} for _ in range(3)]
    assert errors(states) == [None] * 3
    states[1]["center/0"] *= 1 + 1e-4
    found = errors(states)
    assert all(isinstance(error, ProtocolError) and "worker/1" in str(error) for error in found)


def test_nothing_is_compared_without_a_state() -> None:
    assert errors([{}, {}]) == [None, None]
