from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.net.worlds import CurveWorld, MemoryWorld, PacedWorld, SimulatedWorld, World, ZeroMQWorld, opened


@pytest.fixture(params=[MemoryWorld, SimulatedWorld, ZeroMQWorld, CurveWorld, PacedWorld], ids=lambda kind: kind.name)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with opened(request.param) as world:
        yield world
