"""Ranges of names."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.topology.ranges import MOST_HOSTS, ahead, between, count, expand, last


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("alpha", ["alpha"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11].lan", ["n08.lan", "n09.lan", "n10.lan", "n11.lan"]),
        ("n[0-10]", [f"n{number}" for number in range(11)]),
        ("n[00-02]", ["n00", "n01", "n02"]),
        ("10.0.0.[254-255]", ["10.0.0.254", "10.0.0.255"]),
        ("n[5-5]", ["n5"]),
        ("[1-2]", ["1", "2"]),
        ("", [""]),
        ("*", ["*"]),
    ],
)
def test_what_a_range_stands_for(text: str, names: list[str]) -> None:
    assert expand(text) == tuple(names)
    assert count(text) == len(names)
    assert last(text) == names[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n[", "is not a range of names: write one like"),
        ("n]", "is not a range of names"),
        ("n[1]", "is not a range of names"),
        ("n[1-]", "is not a range of names"),
        ("n[a-b]", "is not a range of names"),
        ("n[1,2]", "is not a range of names"),
        ("n[-1-2]", "is not a range of names"),
        ("n[1-2]m[1-2]", "is not a range of names"),
        ("n[[1-2]]", "is not a range of names"),
        ("n[1-9999999999]", "is not a range of names"),
        ("n[١-٢]", "is not a range of names"),
        ("n[4-1]", r"runs backwards: write n\[1-4\]"),
        ("n[0-65536]", "is a range of 65,537 names, but at most 65,536"),
        ("n[000000000-999999999]", "1,000,000,000 names"),
        ("n[01-100]", r"leading zeros at one end only: write n\[001-100\]"),
        ("n[1-010]", r"write n\[001-010\]"),
    ],
)
def test_what_is_no_range(text: str, message: str) -> None:
    for read in (expand, count, last):
        with pytest.raises(ValueError, match=message):
            read(text)


def test_the_longest_range() -> None:
    assert len(set(expand(f"n[1-{MOST_HOSTS}]"))) == MOST_HOSTS


@given(st.text("ab.-x", max_size=4), st.integers(0, 2000), st.integers(0, 300), st.integers(0, 6), st.text("ab.-", max_size=4))
def test_any_range(head: str, first: int, more: int, digits: int, tail: str) -> None:
    high = f"{first + more:0{digits}d}"
    text = f"{head}[{first:0{digits}d}-{high}]{tail}"
    if len(f"{first:0{digits}d}") != len(high) and digits > len(str(first)):
        with pytest.raises(ValueError, match="leading zeros"):
            expand(text)
        return
    names = expand(text)
    assert len(names) == len(set(names)) == count(text) == more + 1
    assert (names[0], names[-1]) == (f"{head}{first:0{digits}d}{tail}", last(text))
    assert [ahead(names[0], places) for places in range(len(names))] == list(names)
    assert expand(between(names[0], names[-1])) == names


@pytest.mark.parametrize(
    ("name", "places", "result"),
    [
        ("n1", 1, "n2"),
        ("n09", 1, "n10"),
        ("n99", 1, "n100"),
        ("n099", 1, "n100"),
        ("n09", 91, None),
        ("alpha", 1, None),
        ("10.0.0.9", 1, "10.0.0.10"),
        ("a1b2c", 1, "a1b3c"),
        ("n999999999", 1, None),
        ("n1234567890", 1, "n1234567891"),
    ],
)
def test_what_stands_further_on(name: str, places: int, result: str | None) -> None:
    assert ahead(name, places) == result


@given(st.text(alphabet="[]-0123456789ab*"))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    with suppress(ValueError):
        number = count(text)
        if number < 1000:
            assert len(expand(text)) == number
