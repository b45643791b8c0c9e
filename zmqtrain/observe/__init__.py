"""Metrics, traces, the live table and the run directory. Knows events only."""

from __future__ import annotations

from zmqtrain.observe.events_file import Events, read

__all__ = ["Events", "read"]
