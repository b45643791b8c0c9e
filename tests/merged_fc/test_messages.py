"""What workers and FC servers say to each other survives the way, and nothing else is taken."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from zmqtrain.errors import ProtocolError
from zmqtrain.merged_fc.messages import (
    MOST_TENSORS,
    ActivationsMeta,
    AnswerMeta,
    activations_tag,
    evaluate_tag,
    parse_activations_tag,
)

METAS = [
    ActivationsMeta(1, (True,), 3),
    ActivationsMeta(4, (True, False), 5, 3, 12.5, {"a": ["tuple", 0, 1]}),
    ActivationsMeta(2, (False,), 1, hyperparameters=[None, {"lr": 0.1, "betas": [0.9, 0.99]}]),
    ActivationsMeta(1, (True,), 1, torn=((7, 3), (9, 4))),
    ActivationsMeta(1, (True,), 1, hyperparameters=[{"lr": 0.5}], torn=((7, 3),)),
]


@pytest.mark.parametrize("meta", METAS)
def test_metas_survive_the_wire(meta: ActivationsMeta) -> None:
    assert ActivationsMeta.from_value(msgpack.unpackb(msgpack.packb(meta.to_value()))) == meta


@pytest.mark.parametrize("answer", [AnswerMeta(1.5, 0.1, 2), AnswerMeta(None, 0.0, 1), AnswerMeta(float("inf"), 1.0, 0)])
def test_answers_survive_the_wire(answer: AnswerMeta) -> None:
    assert AnswerMeta.from_value(msgpack.unpackb(msgpack.packb(answer.to_value()))) == answer


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [1, [True], 3, 1, 1.0],
        [1, [], 3, 1, 1.0, 0],  # no activation
        [1, [True, True], 3, 1, 1.0, 0],  # more activations than tensors
        [MOST_TENSORS + 1, [True], 3, 1, 1.0, 0],
        [1, [1.5], 3, 1, 1.0, 0],
        [1, [True], 0, 1, 1.0, 0],  # no samples
        [1, [True], 3, 1, 0.0, 0],
        [1, [True], 3, 1, float("nan"), 0],
        [1, [True], 3, 1, 1.0, 0, {"lr": 0.1}],
        [1, [True], 3, 1, 1.0, 0, None, [[1]]],
        [1, [True], 3, 1, 1.0, 0, None, [["a", 1]]],
        [1, [True], 3, 1, 1.0, 0, [3]],
        [1, [True], 3, 1, 1.0, 0, None, None],
    ],
)
def test_other_metas_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="invalid description of activations"):
        ActivationsMeta.from_value(value)


@pytest.mark.parametrize("value", [None, [1.0], ["1", 1.0, 1], [1.0, 1.0, 1.5]])
def test_other_answers_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="an FC server answered"):
        AnswerMeta.from_value(value)


def test_tags() -> None:
    for life in (None, 0, 9):
        assert parse_activations_tag(activations_tag(3, 1, 2, life)) == ((3, 1), 2, life)
        assert parse_activations_tag(evaluate_tag(7, 0, life)) == (("evaluate", 7), 0, life)
    bad = (1, 2), ("train", 1, 2), (1, "a", 0), (1, 2, 0, "a"), (1, 2, 0, 1, 1)
    for tag in [("activations", *each) for each in bad]:
        with pytest.raises(ProtocolError, match="not a tag of activations"):
            parse_activations_tag(tag)
