"""How long planning takes: a small case of each."""

from __future__ import annotations

from benchmarks.planner import bench_planner, repeated


def test_cases() -> None:
    cases = list(bench_planner(sizes=[(4, 12)]))
    assert [case["unit"] for case in cases] == ["s of a processor", "paths"] * 2
    assert all(case["value"] > 0 for case in cases)


def test_layers_over_and_over() -> None:
    layers = repeated(20)
    assert len(layers) == 20
    assert layers[0].weights == layers[8].weights == layers[16].weights
