"""Public helpers for tests: virtual time, in-memory networks, simulated runs and faults."""
