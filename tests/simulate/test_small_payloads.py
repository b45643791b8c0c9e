"""Small payloads find what no other check would: an update that was applied twice, or not at all, without anybody saying so."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from zmqtrain.server.shard import TensorEntry
from zmqtrain.simulate.run import simulate
from zmqtrain.topology.schema import Topology

EXCHANGES: list[dict[str, Any]] = [
    {"kind": "allreduce"},
    {"kind": "averaging", "every": 2},
    {"kind": "model_server", "staleness": "sync", "shards": 2},
    {"kind": "model_server", "staleness": "async", "shards": 2},
    {"kind": "model_server", "staleness": {"bound": 1}, "shards": 2},
]


def topology_of(exchange: dict[str, Any]) -> Topology:
    return Topology.model_validate(
        {
            "job": {"steps": 3},
            "hosts": [{"name": "node[1-4]", "address": "10.0.0.[1-4]", "slots": 1}],
            "compute": {
                "groups": 2,
                "group_size": 2,
                "device": "modelled",
                "profile": "cifarnet",
                "noise": {"kind": "normal", "straggler_chance": 0.1},
                "bucket_size": 100_000,
            },
            "network": {"bandwidth": "1 Gbit/s", "latency": "50 us", "hosts": [{"name": "node[2-3]", "slowdown": 1.5}]},
            "exchange": exchange,
            "simulation": {"payload": "small"},
        }
    )


@pytest.mark.parametrize("exchange", EXCHANGES, ids=str)
def test_all_gradients_count_once(exchange: dict[str, Any]) -> None:
    result = simulate(topology_of(exchange))
    assert result.ending.status == "done"
    assert not result.broken


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("exchange", EXCHANGES[2:], ids=str)
def test_an_update_that_happens_twice_or_never_is_found(
    exchange: dict[str, Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, updates = TensorEntry.update, 0

    def wrong(entry: TensorEntry, gradient: Tensor, *more: Any) -> None:
        nonlocal updates
        updates += 1
        version = entry.version
        for _ in range(times if updates == 5 else 1):
            right(entry, gradient, *more)
        entry.version = version + 1

    monkeypatch.setattr(TensorEntry, "update", wrong)
    result = simulate(topology_of(exchange))
    assert result.ending.status == "done"
    assert any("instead of" in finding for finding in result.broken)


def test_slow_hosts_are_found_by_range() -> None:
    assert topology_of(EXCHANGES[0]).network.slowdowns() == {"node2": 1.5, "node3": 1.5}
