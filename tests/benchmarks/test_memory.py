"""The benchmark of a worker's memory, with a tiny model: that it measures, not how much."""

from __future__ import annotations

from benchmarks.memory import TINY, bench_memory


def test_cases() -> None:
    code, two = bench_memory(rows=(2,), large=TINY)
    assert (code["bench"], code["unit"], two["unit"]) == ("memory", "MB", "MB")
    assert code["value"] > 50
    assert "2x1" in two["case"]
