"""A benchmark's case: its ratio is above 1 where we are better than the peer."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.case import Ratio, case_of, size_text
from benchmarks.run import print_cases


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


def test_what_is_too_wide_for_a_table_has_two_lines() -> None:
    cases = [case_of("net", "goodput at 1 Gbit/s, 2 hosts " * 2, 998.8, "Mbit/s", "the link [1]", 1000.0, "value/peer")] * 2
    shown = {}
    for width in (80, 120):
        print_cases(cases, Console(width=width, file=(file := io.StringIO())))
        shown[width] = file.getvalue().splitlines()
        assert max(map(len, shown[width])) <= width
    assert shown[80][1].rstrip() == "    998.8 Mbit/s; the link [1]: 1,000 Mbit/s; ratio 1.00"
    assert [len(lines) for lines in shown.values()] == [5, 4]
    print_cases([case_of("study", "x", 1.0, "ms")], Console(width=80, file=(file := io.StringIO())))
    assert file.getvalue().split() == ["case", "value", "unit", "x", "1", "ms"]
