"""What processes must have alike, compared with the first to say it."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.errors import ProtocolError
from zmqtrain.membership.alike import MOST_CHARACTERS, MOST_ITEMS, MOST_SUBJECTS, MOST_THINGS, Alike, Difference, bounded, facts_of


def test_the_first_is_the_measure_for_all_others() -> None:
    alike = Alike()
    assert alike.compare("task", "worker/1", "b", {"lr": ["0.1"], "model": ["Linear", "Tanh"]}) == []
    assert alike.compare("task", "worker/0", "a", {"lr": ["0.1"], "model": ["Linear", "Tanh"]}) == []
    found = alike.compare("task", "worker/2", "c", {"lr": ["0.2"], "model": ["Linear"]})
    assert found == [Difference("lr", "worker/1", "b", "0.1", "0.2"), Difference("model", "worker/1", "b", "Tanh", "")]
    assert alike.compare("other", "worker/2", "c", {"lr": ["0.2"]}) == []
    assert alike.compare("task", "worker/3", "c", {"lr": ["0.1"], "loss": ["x"]}) == []  # the first to name a loss
    assert alike.compare("task", "fc/0", "d", {"loss": ["y"]}) == [Difference("loss", "worker/3", "c", "x", "y")]
    assert [Difference.from_value(each.to_value()) for each in found] == found


def test_subjects_are_bounded() -> None:
    alike = Alike()
    for number in range(MOST_SUBJECTS + 1):
        alike.compare(str(number), "worker/0", "a", {"x": ["1"]})
    assert alike.compare(str(MOST_SUBJECTS), "worker/1", "a", {"x": ["2"]}) == []
    assert alike.compare("0", "worker/1", "a", {"x": ["2"]}) != []


def test_what_is_left_out_is_compared_by_a_digest() -> None:
    long = "x" * 500
    assert len(bounded([long])[0]) <= MOST_CHARACTERS
    assert bounded([long]) != bounded([long + "y"])
    many = [str(number) for number in range(1000)]
    assert len(bounded(many)) == MOST_ITEMS
    assert bounded(many)[:3] == ["0", "1", "2"]
    assert bounded(many) != bounded([*many[:-1], "other"])
    assert facts_of({"x": bounded([long, *many])}) is not None


@pytest.mark.parametrize(
    "value",
    [None, [], {"x": "y"}, {"x": [1]}, {"x": ["y" * 1000]}, {"x": ["y"] * 1000}, {str(n): ["y"] for n in range(MOST_THINGS + 1)}],
)
def test_what_are_no_facts_is_not_kept(value: Any) -> None:
    assert facts_of(value) is None


def test_an_answer_that_is_no_difference_is_refused() -> None:
    with pytest.raises(ProtocolError, match="which is no difference"):
        Difference.from_value(["lr", 1])
