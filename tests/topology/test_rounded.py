"""Quantities for people: three digits, and the unit that suits them."""

from __future__ import annotations

import pytest

from zmqtrain.topology.rounded import rounded_amount, rounded_duration, rounded_rate, rounded_size, rounded_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (2.5e-7, "250 ns"),
        (9.994e-4, "999 us"),
        (9.996e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.09996, "100 ms"),
        (1.5, "1.5 s"),
        (1234.5, "1,234 s"),
        (-0.0021, "-2.1 ms"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert rounded_time(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (4.05e-7, "405 ns"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.96, "10 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (7170, "2 h"),
        (7290, "2 h 2 min"),
        (1e7, "2,777 h 47 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert rounded_duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1000, "1,000 B"), (1024, "1 KiB"), (244_403_360, "233 MiB"), (9.9996 * 2**30, "10 GiB"), (2**50, "1,024 TiB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert rounded_size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (999.7, "1 KB"), (244_403_360, "244 MB"), (2e12, "2 TB"), (5e15, "5,000 TB")]
)
def test_amounts(nbytes: float, text: str) -> None:
    assert rounded_amount(nbytes) == text


@pytest.mark.parametrize(
    ("bits_per_s", "text"),
    [(1 / (1 / 1e9), "1 Gbit/s"), (999_999_999.9, "1 Gbit/s"), (941.2e6, "941 Mbit/s"), (950e3, "950 kbit/s"), (12, "12 bit/s")],
)
def test_rates(bits_per_s: float, text: str) -> None:
    assert rounded_rate(bits_per_s) == text
