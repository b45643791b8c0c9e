"""The plan of buckets: every parameter once, nothing mixed, backward order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.topology.bucket_limit import BucketLimit
from zmqtrain.train.buckets import ParameterInfo, plan_buckets

PARAMETERS = st.lists(
    st.tuples(st.integers(0, 50), st.sampled_from([("float32", 4), ("float64", 8), ("bfloat16", 2)]), st.integers(0, 2)),
    max_size=30,
).map(lambda rows: [ParameterInfo(f"p{i}", numel, size, dtype, group) for i, (numel, (dtype, size), group) in enumerate(rows)])


@given(PARAMETERS, st.integers(1, 400))
def test_every_parameter_lies_in_one_bucket_of_its_kind(parameters: list[ParameterInfo], bucket_bytes: int) -> None:
    by_name = {parameter.name: parameter for parameter in parameters}
    buckets = plan_buckets(parameters, bucket_bytes)
    names = [name for bucket in buckets for name in bucket.names]
    assert sorted(names) == sorted(p.name for p in parameters if p.numel)
    for bucket in buckets:
        held = [by_name[name] for name in bucket.names]
        assert {(p.dtype, p.group) for p in held} == {(bucket.dtype, bucket.group)}
        assert list(bucket.offsets) == [sum(p.numel for p in held[:i]) for i in range(len(held) + 1)]
        assert len(held) == 1 or sum(p.numel * p.itemsize for p in held) <= bucket_bytes
        assert held == sorted(held, key=lambda p: -parameters.index(p))


@given(PARAMETERS, st.integers(1, 400))
def test_buckets_stand_in_the_order_in_which_backward_completes_them(parameters: list[ParameterInfo], bucket_bytes: int) -> None:
    place = {parameter.name: index for index, parameter in enumerate(parameters)}
    ends = [min(place[name] for name in bucket.names) for bucket in plan_buckets(parameters, bucket_bytes)]
    assert ends == sorted(ends, reverse=True)


def test_alternating_groups_share_large_buckets() -> None:
    layers = [
        ParameterInfo(f"{kind}{i}", 10, 4, "float32", group) for i in range(6) for group, kind in enumerate(("weight", "bias"))
    ]
    assert len(plan_buckets(layers, 1 << 20)) == 2


def test_a_limit_that_follows_the_model_is_the_same_on_all_rows() -> None:
    """Rows whose parts differ in size divide their parameters at the same places."""
    limit = BucketLimit(buckets=4)
    rows = [[ParameterInfo(f"{n}", part, 4, "float32", 0, "2", 90_000) for n in range(8)] for part in (90_000, 80_000)]
    plans = [[bucket.names for bucket in plan_buckets(row, limit)] for row in rows]
    assert plans[0] == plans[1] == [("7", "6"), ("5", "4"), ("3", "2"), ("1", "0")]
