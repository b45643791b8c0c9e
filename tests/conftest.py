"""Settings that every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("fast", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fast")
