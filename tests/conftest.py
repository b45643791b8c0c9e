"""Settings that every test shares."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.patience import pytest_timeout_set_timer
from zmqtrain.simulate.clock import VirtualLoop

__all__ = ["pytest_timeout_set_timer"]  # a hook: pytest finds it here

settings.register_profile("fast", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("ZMQTRAIN_TEST_DEVICE"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Which loop a coroutine test runs on."""
    return {"virtual": VirtualLoop} if item.get_closest_marker("virtual_time") else {"asyncio": asyncio.new_event_loop}
