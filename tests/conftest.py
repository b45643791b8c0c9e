"""Settings that every test shares."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.patience import pytest_timeout_set_timer

__all__ = ["pytest_timeout_set_timer"]  # a hook: pytest finds it here

settings.register_profile("fast", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("ZMQTRAIN_TEST_DEVICE"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
