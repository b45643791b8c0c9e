"""A benchmark's case: its ratio is above 1 where we are better than the peer."""

from __future__ import annotations

import pytest

from benchmarks.case import Ratio, case_of, size_text


@pytest.mark.parametrize(("how", "ratio"), [("peer/value", 2.0), ("value/peer", 0.5), (0.7, 0.7)])
def test_with_a_peer(how: Ratio | float, ratio: float) -> None:
    case = case_of("net", "round trip", 4.0, "ms", "gloo", 8.0, how)
    assert list(case.values()) == ["net", "round trip", 4.0, "ms", "gloo", 8.0, ratio]


def test_without_a_peer_s_value_no_peer_is_named() -> None:
    assert list(case_of("net", "x", 4.0, "ms", "mxnet", None).values()) == ["net", "x", 4.0, "ms", None, None, None]


def test_rounded_after_they_were_compared() -> None:
    case = case_of("host", "x", 0.12349, "ms", "gloo", 0.37051, digits=3)
    assert (case["value"], case["peer_value"], case["ratio"]) == (0.123, 0.371, 3.0)


def test_nothing_has_no_ratio() -> None:
    assert case_of("net", "x", 0.0, "ms", "gloo", 8.0)["ratio"] is None


def test_sizes_in_names() -> None:
    assert [size_text(size) for size in (4_000, 250_000, 1_000_000, 100_000_000)] == ["4 KB", "250 KB", "1 MB", "100 MB"]
