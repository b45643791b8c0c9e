"""Shapes, stages and the shipped tables."""

from __future__ import annotations

import pytest

from tests.plan.networks import alexnet, conv, linear
from zmqtrain.errors import UsageError
from zmqtrain.plan.layers import LayerShape, stages
from zmqtrain.plan.shipped import IMAGES, TABLES, Alexnet, before_pooling, shipped_table


def test_alexnet_is_the_published_one() -> None:
    found = {stage.name: (stage.weights, stage.numel_in, stage.numel_out) for stage in alexnet()}
    assert found == {
        "conv1": (34_848, 3 * 227 * 227, 27 * 27 * 96),
        "conv2": (614_400, 27 * 27 * 96, 13 * 13 * 256),
        "conv3": (884_736, 13 * 13 * 256, 13 * 13 * 384),
        "conv4": (1_327_104, 13 * 13 * 384, 13 * 13 * 384),
        "conv5": (884_736, 13 * 13 * 384, 6 * 6 * 256),
        "fc6": (37_748_736, 9216, 4096),
        "fc7": (16_777_216, 4096, 4096),
        "fc8": (4_096_000, 4096, 1000),
    }
    assert sum(stage.weights for stage in stages(Alexnet(grouped=True).layers(biases=True))) == 60_965_224  # as Caffe's


def test_other_readings_of_alexnet() -> None:
    rows = {image: [stage.head.outputs[1] for stage in stages(Alexnet(image).layers())[:5]] for image in IMAGES}
    assert rows == {"227": [55, 27, 13, 13, 13], "224": [54, 26, 12, 12, 12], "224-padded": [56, 28, 14, 14, 14]}
    before = stages(before_pooling(Alexnet().layers()))
    assert before[0].numel_out == 55 * 55 * 96
    assert [stage.weights for stage in before] == [stage.weights for stage in alexnet()]
    assert shipped_table("alexnet-grouped-224") == Alexnet("224", grouped=True)
    with pytest.raises(UsageError, match=r"there is no such table of layers.*did you mean 'alexnet'"):
        shipped_table("alexnt")
    assert all(name == table.name for name, table in TABLES.items())


def test_layers_follow_the_one_before_them() -> None:
    norm = LayerShape("norm", "norm", (8, 4, 4), (8, 4, 4), 16)
    pool = LayerShape("pool", "pool", (8, 4, 4), (8, 2, 2), kernel=(2, 2), stride=(2, 2))
    flat = LayerShape("flat", "other", (3, 4, 4), (48,))
    found = stages([flat, conv("a", 3, 8, 4), norm, pool, linear("b", 32, 5)])
    assert [(stage.name, [each.name for each in stage.followers]) for stage in found] == [("a", ["norm", "pool"]), ("b", [])]
    assert (found[0].weights, found[0].numel_out) == (3 * 8 * 9 + 16, 32)
    assert [stage.name for stage in stages([norm, conv("a", 8, 8, 4)])] == ["norm", "a"]  # nothing that it could follow


def test_times_are_measured_or_counted() -> None:
    stage = stages([linear("a", 10, 10), LayerShape("r", "other", (10,), (10,), forward_s=1.0)])[0]
    assert stage.seconds(100.0) == (2.0 + 1.0, 4.0 + 2.0)
    assert stage.seconds(100.0, first=True) == (2.0 + 1.0, 2.0 + 2.0)
    assert stage.seconds(0) == (1.0, 2.0)
