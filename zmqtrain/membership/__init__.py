"""Joining a run, views, heartbeats, barriers and leaving."""
