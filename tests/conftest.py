"""Settings that every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.patience import pytest_timeout_set_timer

__all__ = ["pytest_timeout_set_timer"]  # a hook: pytest finds it here

settings.register_profile("fast", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fast")
