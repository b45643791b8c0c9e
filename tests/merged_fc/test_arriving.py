"""Batches are put together from their tensors, in whatever order they come; what belongs to none is refused."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.errors import ProtocolError
from zmqtrain.merged_fc.arriving import MOST_BATCHES, Arriving
from zmqtrain.merged_fc.messages import ActivationsMeta, activations_tag, evaluate_tag
from zmqtrain.wire.tensor import TensorPayload

META = ActivationsMeta(3, (True, False), 4)
TENSORS = [TensorPayload.of(np.ones(4), META.to_value()), *(TensorPayload.of(np.ones(4)) for _ in range(2))]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_batch_is_complete_with_its_last_tensor(order: tuple[int, ...]) -> None:
    arriving = Arriving()
    for step in range(2 * MOST_BATCHES):
        for place in order[:-1]:
            assert arriving.add("worker/0", activations_tag(step, 1, place), TENSORS[place]) is None
            assert arriving.add("worker/1", evaluate_tag(step, place), TENSORS[place]) is None
        last = order[-1]
        trained = arriving.add("worker/0", activations_tag(step, 1, last), TENSORS[last])
        evaluated = arriving.add("worker/1", evaluate_tag(step, last), TENSORS[last])
        assert trained is not None
        assert evaluated is not None
        assert (*trained[:2], trained[2].meta) == (step, 1, META)
        assert all(mine is its for mine, its in zip(trained[2].tensors, TENSORS, strict=True))
        assert evaluated[:2] == ("evaluate", step)


def test_what_does_not_belong_is_refused_and_changes_nothing() -> None:
    arriving = Arriving()
    for step in range(MOST_BATCHES):
        arriving.add("worker/0", activations_tag(step, 0, 1), TENSORS[1])
    for tag, said in (
        (activations_tag(MOST_BATCHES, 0, 0), "more batches than it may"),
        (activations_tag(0, 0, 1), "tensor 1 .* twice"),
        (activations_tag(0, 0, 1 << 20), "more tensors than belong"),
        (("activations", "no", 0), "not a tag of activations"),
    ):
        with pytest.raises(ProtocolError, match=said):
            arriving.add("worker/0", tag, TENSORS[0])
    assert arriving.add("worker/1", activations_tag(MOST_BATCHES, 0, 1), TENSORS[1]) is None
    arriving.add("worker/0", activations_tag(0, 0, 0), TENSORS[0])
    assert arriving.add("worker/0", activations_tag(0, 0, 2), TENSORS[2]) is not None
    assert arriving.add("worker/0", activations_tag(MOST_BATCHES, 0, 0), TENSORS[0]) is None


def test_what_is_incomplete_of_a_sender_is_forgotten() -> None:
    arriving = Arriving()
    for number in range(MOST_BATCHES // 2):
        arriving.add("worker/0", activations_tag(number, 0, 1), TENSORS[1])
        arriving.add("worker/0", evaluate_tag(number, 1), TENSORS[1])
    arriving.add("worker/1", activations_tag(0, 0, 1), TENSORS[1])
    arriving.forget("worker/0", training=True)
    for place in (0, 2):  # what was sent for an evaluation is still there
        found = arriving.add("worker/0", evaluate_tag(0, place), TENSORS[place])
    assert found is not None
    arriving.forget("worker/0")
    for number in range(MOST_BATCHES):
        arriving.add("worker/0", activations_tag(number, 0, 0), TENSORS[0])
    for place in (0, 2):
        found = arriving.add("worker/1", activations_tag(0, 0, place), TENSORS[place])
    assert found is not None
