"""Small models travel in several buckets where they cross a network by all-reduce, and in one elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.topology.bucket_limit import LEAST_BYTES, USUAL_BYTES, BucketLimit
from zmqtrain.topology.schema import Topology

TWO_HOSTS = [{"name": "a"}, {"name": "b"}]


def limit(hosts: list[dict[str, str]], kind: str, **compute: Any) -> BucketLimit:
    sections = {"job": {"task": "a:b"}, "hosts": hosts, "compute": {"groups": 2, **compute}, "exchange": {"kind": kind}}
    return BucketLimit.of(Topology.model_validate(sections))


def test_between_hosts_a_small_model_is_a_few_buckets() -> None:
    found = limit(TWO_HOSTS, "allreduce")
    assert found.bytes_of(2_000_000) == 500_000
    assert found.bytes_of(1000) == found.bytes_of(4 * LEAST_BYTES) == LEAST_BYTES
    assert found.bytes_of(100_000_000) == USUAL_BYTES


@pytest.mark.parametrize(
    ("hosts", "kind"),
    [([{"name": "a"}], "allreduce"), (TWO_HOSTS, "gossip"), (TWO_HOSTS, "model_server"), (TWO_HOSTS, "averaging")],
)
def test_elsewhere_it_is_one(hosts: list[dict[str, str]], kind: str) -> None:
    assert limit(hosts, kind).bytes_of(2_000_000) == limit(hosts, kind).bytes_of(100_000_000) == USUAL_BYTES


def test_what_the_file_says_holds() -> None:
    assert limit(TWO_HOSTS, "allreduce", bucket_size="1 MiB").bytes_of(2_000_000) == 1 << 20
