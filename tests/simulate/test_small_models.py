"""A small model travels in a few buckets between hosts, which takes no longer than one: virtual time, so the figures are exact."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.simulate.run import simulate
from zmqtrain.topology.schema import Topology


def seconds(hosts: int, exchange: dict[str, Any], steps: int = 8, **compute: Any) -> float:
    topology = Topology.model_validate(
        {
            "job": {"steps": steps, "elastic": False},
            "hosts": [{"name": f"h{number}", "slots": 2} for number in range(hosts)],
            "compute": {"groups": hosts, "group_size": 1, "batch_size": 8, "device": "modelled", "profile": "cifarnet", **compute},
            "exchange": exchange,
            "network": {"bandwidth": "100 Mbit/s", "latency": "100 us"},
        }
    )
    result = simulate(topology, seed=1)
    assert result.ending.status == "done"
    return result.seconds


@pytest.mark.parametrize(
    ("hosts", "exchange", "most"),
    [(8, {"kind": "gossip"}, 1.03), (2, {"kind": "model_server", "staleness": "sync", "shards": 2}, 0.85)],
)
def test_a_few_buckets_take_no_longer_than_one(hosts: int, exchange: dict[str, Any], most: float) -> None:
    """There is next to no arithmetic, so buckets gain nothing during backward. Gossip peers that ran ahead of each other took 1.65
    times as long; servers of whole buckets twice as long, since half of the NICs had nothing to do."""
    assert seconds(hosts, exchange) < most * seconds(hosts, exchange, bucket_size="4 MiB")
