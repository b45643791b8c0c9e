"""Small models travel in several buckets where they cross a network, and in one elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.topology.bucket_limit import LEAST_BYTES, LEAST_PIECE_BYTES, USUAL_BYTES, BucketLimit, PieceLimit
from zmqtrain.topology.schema import Topology

TWO_HOSTS = [{"name": "a"}, {"name": "b"}]


def job(hosts: list[dict[str, str]], kind: str, **exchange: Any) -> Topology:
    sections = {"job": {"task": "a:b"}, "hosts": hosts, "compute": {"groups": 2}, "exchange": {"kind": kind, **exchange}}
    return Topology.model_validate(sections)


def limit(hosts: list[dict[str, str]], kind: str) -> BucketLimit:
    return BucketLimit.of(job(hosts, kind))


@pytest.mark.parametrize("kind", ["allreduce", "gossip", "model_server"])
def test_between_hosts_a_small_model_is_a_few_buckets(kind: str) -> None:
    found = limit(TWO_HOSTS, kind)
    assert found.divides(2_000_000)
    assert not found.divides(100_000_000)
    assert found.bytes_of(2_000_000) == 500_000
    assert found.bytes_of(1000) == found.bytes_of(4 * LEAST_BYTES) == LEAST_BYTES
    assert found.bytes_of(100_000_000) == USUAL_BYTES


@pytest.mark.parametrize(("hosts", "kind"), [([{"name": "a"}], "allreduce"), ([{"name": "a"}], "gossip"), (TWO_HOSTS, "averaging")])
def test_elsewhere_it_is_one(hosts: list[dict[str, str]], kind: str) -> None:
    assert limit(hosts, kind).bytes_of(2_000_000) == limit(hosts, kind).bytes_of(100_000_000) == USUAL_BYTES
    assert not limit(hosts, kind).divides(2_000_000)


def test_what_the_file_says_holds() -> None:
    given = job(TWO_HOSTS, "allreduce")
    given = given.model_copy(update={"compute": given.compute.model_copy(update={"bucket_size": 1 << 20})})
    assert BucketLimit.of(given).bytes_of(2_000_000) == 1 << 20


def test_servers_of_several_hosts_have_a_piece_of_each_bucket() -> None:
    spread = PieceLimit.of(job(TWO_HOSTS, "model_server"))
    assert spread.of_model(2_000_000) == (500_000, LEAST_PIECE_BYTES)
    assert spread.of_model(100_000_000) == (USUAL_BYTES, LEAST_PIECE_BYTES)
    assert PieceLimit.of(job(TWO_HOSTS, "model_server", split_size="1 KiB")).of_model(2_000_000) == (1024, 1024)


@pytest.mark.parametrize(("hosts", "exchange"), [([{"name": "a"}], {}), (TWO_HOSTS, {"compression": "powersgd"})])
def test_elsewhere_a_bucket_is_divided_only_if_it_is_large(hosts: list[dict[str, str]], exchange: dict[str, str]) -> None:
    assert PieceLimit.of(job(hosts, "model_server", **exchange)).of_model(2_000_000) == (USUAL_BYTES, USUAL_BYTES)
