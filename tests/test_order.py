"""Long files come first, and those that wait are dealt out among those that compute."""

from __future__ import annotations

from tests.order import in_order


def test_files_that_wait_are_dealt_out_among_long_ones_that_compute() -> None:
    files = [
        *(f"launcher/test_{number}.py" for number in range(3)),
        *(f"train/test_{number}.py" for number in range(5)),
        "net/test_link.py",
        "cli/test_plan.py",
        "test_words.py",
    ]
    assert in_order(files) == [
        "launcher/test_0.py",
        "cli/test_plan.py",
        "train/test_0.py",
        "launcher/test_1.py",
        "train/test_1.py",
        "train/test_2.py",
        "launcher/test_2.py",
        "train/test_3.py",
        "train/test_4.py",
        "net/test_link.py",
        "test_words.py",
    ]


def test_short_files_alone_stay_in_their_order() -> None:
    assert in_order(["wire/test_b.py", "net/test_a.py"]) == ["wire/test_b.py", "net/test_a.py"]
