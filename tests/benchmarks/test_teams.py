"""What groups that may lose workers cost: the same job both ways."""

from __future__ import annotations

from benchmarks.teams import EXCHANGES, simulated


def test_a_job_has_a_step_and_its_bytes_both_ways() -> None:
    (yes_s, yes), (no_s, no) = (simulated("lenet", 8, EXCHANGES["gossip"], 2, elastic=elastic) for elastic in (True, False))
    assert yes > no, "what a host's workers add up travels in messages"
    assert 0.3 < yes_s / no_s < 3
