"""Quantities: read, refused and written back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.topology import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60 s", 60),
        ("200 us", 2e-4),
        ("200us", 2e-4),
        ("1.5 min", 90),
        ("2 h", 7200),
        ("1e-3 s", 1e-3),
        (5, 5),
        (0.5, 0.5),
        ("3 ms", 3e-3),
    ],
)
def test_times(text: Any, seconds: float) -> None:
    assert units.duration(0, 1e5)(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("text", "size"), [("4 MiB", 4 * 2**20), ("1 kB", 1000), (512, 512), ("0.5 KiB", 512), ("2 GiB", 2**31)])
def test_sizes(text: Any, size: int) -> None:
    value = units.size(0, 2**40)(text)
    assert value == size
    assert isinstance(value, int)


@pytest.mark.parametrize(("text", "bits"), [("1 Gbit/s", 1e9), ("125 MB/s", 1e9), ("10 Mbit/s", 1e7)])
def test_rates(text: str, bits: float) -> None:
    assert units.rate(1, 1e13)(text) == bits


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("-3 s", "out of range: give a time from 1 s to 100 s"),
        ("1000000 h", "out of range"),
        ("3 parsecs", "unknown unit 'parsecs': use one of ns, us"),
        ("3", "no unit"),
        ("fast", "is not a time: write it like '60 s'"),
        ("", "is not a time"),
        (True, "is not a time"),
        (None, "is not a time"),
        ([1], "is not a time"),
        (float("nan"), "is not a time"),
        (float("inf"), "is not a time"),
        (10**400, "is out of range"),
        ("1" * 500 + " s", "is out of range"),
    ],
)
def test_what_is_no_time_is_refused_with_what_is(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        units.duration(1, 100)(value)


def test_parts_of_a_second_are_the_nearest_number() -> None:
    read = units.duration(0, 10)
    assert [read(text) for text in ("200 us", "50us", "3 ms", "7 ns", "0.5 ms")] == [2e-4, 5e-5, 3e-3, 7e-9, 5e-4]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (5e-5, "50 us"), (2e-4, "200 us"), (1.5, "1500 ms"), (90, "90 s"), (86_400, "24 h")]
)
def test_times_as_people_write_them(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


def test_half_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number of bytes"):
        units.size(0, 100)(10.5)


@given(st.floats(0, 86400) | st.integers(0, 10**6).map(lambda n: n * 1e-6) | st.integers(0, 86400).map(float))
def test_a_time_written_reads_back_exactly(seconds: float) -> None:
    assert units.duration(0, 86400)(units.format_duration(seconds)) == seconds


@given(st.integers(0, 2**40) | st.integers(0, 40).map(lambda n: 2**n))
def test_a_size_written_reads_back_exactly(size: int) -> None:
    assert units.size(0, 2**40)(units.format_size(size)) == size


@given(st.floats(1, 1e13) | st.integers(0, 13).map(lambda n: 10.0**n))
def test_a_rate_written_reads_back_exactly(rate: float) -> None:
    assert units.rate(1, 1e13)(units.format_rate(rate)) == rate


@given(st.text())
def test_no_text_does_anything_but_be_read_or_refused(text: str) -> None:
    for read in (units.duration(0, 1), units.size(0, 1), units.rate(0, 1)):
        with suppress(ValueError):
            read(text)
