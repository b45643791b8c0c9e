"""Numbers with their nouns."""

from __future__ import annotations

from zmqtrain.words import counted


def test_one_is_singular() -> None:
    assert [counted(count, "model server") for count in (0, 1, 2, 1000)] == [
        "0 model servers",
        "1 model server",
        "2 model servers",
        "1,000 model servers",
    ]
