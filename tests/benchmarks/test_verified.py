"""Comparing a small ResNet, on parts of images and on whole ones."""

from __future__ import annotations

from benchmarks.verified import bench_verified, resnet


def test_cases() -> None:
    cases = list(bench_verified(lambda: resnet((1, 1), 4), 96))
    assert [case["case"].rpartition(" ")[2] for case in cases] == ["48x48"] * 3
    assert all(case["value"] > 0 for case in cases)


def test_it_is_resnet_50() -> None:
    assert sum(each.numel() for each in resnet().parameters()) == 25_557_032
