"""The benchmark of start-up, with few roles: that it measures, not how much."""

from __future__ import annotations

from benchmarks.launch import bench_launch


def test_cases() -> None:
    joined, memory = bench_launch(roles=2)
    assert (joined["bench"], joined["unit"], memory["unit"]) == ("launch", "s", "MB")
    assert joined["value"] > 0
    assert joined["ratio"] == joined["peer_value"] / joined["value"]
    assert memory["value"] > 50
    assert memory["peer"] is None
