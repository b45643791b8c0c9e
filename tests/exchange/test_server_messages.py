"""What workers and servers say to each other survives msgpack, and garbage is refused by name."""

from __future__ import annotations

from typing import Any, cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import ProtocolError
from zmqtrain.exchange.base import OptimizerSpec
from zmqtrain.exchange.server_messages import (
    BucketDescription,
    Configuration,
    PushMeta,
    ReadMeta,
    differing,
    parse_push_tag,
    push_tag,
)

CONFIGURATION = Configuration(
    buckets=(BucketDescription(10, "float32", 0), BucketDescription(7, "bfloat16", 1)),
    optimizer=OptimizerSpec("torch.optim:Adam", ({"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.2, "betas": [0.9, 0.99]})),
    groups=(("worker/0", "worker/1"), ("worker/2", "worker/3")),
    servers=("server/0",),
    split_bytes=16,
    policy="bound",
    bound=3,
    clip_norm=0.5,
    horizon=5.0,
    rises=(100.0, 0.0),
    ceilings=(2.0, 1.0),
    limits=True,
)

plain: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=5), values, max_size=4),
    max_leaves=8,
)


def travel(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value), strict_map_key=False)


def test_a_configuration_travels() -> None:
    assert Configuration.from_value(travel(CONFIGURATION.to_value())) == CONFIGURATION
    assert [(piece.bucket, piece.position, piece.numel) for piece in CONFIGURATION.pieces()] == [
        (0, 0, 3), (0, 0, 2), (0, 1, 3), (0, 1, 2), (1, 0, 4), (1, 1, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["rises", "ceilings"])
@pytest.mark.parametrize("wrong", [[1.0], [1.0, 2.0, 3.0], ["x", 1.0], None, 3.0])
def test_rates_of_something_else_are_refused(what: str, wrong: Any) -> None:
    with pytest.raises(ProtocolError):
        Configuration.from_value({**cast(dict[str, Any], CONFIGURATION.to_value()), what: wrong})


@given(plain)
def test_garbage_is_no_message(value: Any) -> None:
    with pytest.raises(ProtocolError):
        Configuration.from_value(value)
    for kind in (PushMeta, ReadMeta):
        try:
            kind.from_value(value)
        except ProtocolError:
            continue
        assert isinstance(value, list)


@pytest.mark.parametrize("meta", [PushMeta(1, 7), PushMeta(0, 2, {"lr": 0.5})])
def test_what_a_push_says_travels(meta: PushMeta) -> None:
    assert PushMeta.from_value(travel(meta.to_value())) == meta


def test_tags() -> None:
    assert parse_push_tag(push_tag(3, 8)) == (3, 8)
    for tag in [("push",), ("push", 1), ("push", "1", 2), ("parameters", 1, 2)]:
        with pytest.raises(ProtocolError, match="is not a tag of a push"):
            parse_push_tag(tag)


def test_only_what_a_schedule_changed_travels() -> None:
    base = CONFIGURATION.optimizer
    later = OptimizerSpec(base.name, ({**base.groups[0], "lr": 0.05}, base.groups[1]))
    assert differing(later, base) == [{"lr": 0.05}, None]
