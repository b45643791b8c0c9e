"""Numbers with their nouns, and types with their articles."""

from __future__ import annotations

from zmqtrain.words import counted, joined, typed


def test_one_is_singular() -> None:
    assert [counted(count, "model server") for count in (0, 1, 2, 1000)] == [
        "0 model servers",
        "1 model server",
        "2 model servers",
        "1,000 model servers",
    ]


def test_the_last_name_comes_after_an_and() -> None:
    assert [joined(names) for names in ((), ("a",), ("a", "b"), ("a", "b", "c"))] == ["", "a", "a and b", "a, b and c"]


def test_types_have_their_articles() -> None:
    assert [typed(value) for value in (1, "x", None, object())] == ["an int", "a str", "a NoneType", "an object"]
