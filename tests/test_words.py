"""Numbers with their nouns, and types with their articles."""

from __future__ import annotations

from zmqtrain.words import counted, typed


def test_one_is_singular() -> None:
    assert [counted(count, "model server") for count in (0, 1, 2, 1000)] == [
        "0 model servers",
        "1 model server",
        "2 model servers",
        "1,000 model servers",
    ]


def test_types_have_their_articles() -> None:
    assert [typed(value) for value in (1, "x", None, object())] == ["an int", "a str", "a NoneType", "an object"]
