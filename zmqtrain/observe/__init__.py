"""Metrics, traces, the live table and the run directory. Knows events only."""
