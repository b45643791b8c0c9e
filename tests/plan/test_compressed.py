"""What compressed gradients would make of a step's exchange."""

from __future__ import annotations

from typing import Any

import pytest

from zmqtrain.plan.compressed import WAYS, best, compressed, compressed_rows, in_words
from zmqtrain.plan.setup import source_of
from zmqtrain.topology.load import parse_topology

NUMEL = 145_578


def found(exchange: str, bandwidth: str = "100 Mbit/s", hosts: int = 4, compute: str = "group_size = 4") -> Any:
    text = f"""
[job]
[[hosts]]
name = "h[1-{hosts}]"
address = "10.0.0.1"
slots = {4 // hosts}
[compute]
{compute}
batch_size = 128
device = "modelled"
profile = "cifarnet"
[exchange]
{exchange}
[network]
bandwidth = "{bandwidth}"
latency = "200 us"
"""
    topology = parse_topology(text)
    layers = source_of(topology).layers
    assert [row["compression"] for row in compressed_rows(topology, layers)] == [
        each.way.name for each in compressed(topology, layers)
    ]
    return compressed(topology, layers)


def test_all_reduce_carries_nothing_but_gradients() -> None:
    ways = {each.way.name: each for each in found('kind = "allreduce"')}
    assert list(ways) == [way.name for way in WAYS]
    plain = ways["none"].nbytes
    assert plain == pytest.approx(2 * 3 / 4 * NUMEL * 4)
    assert ways["fp16"].nbytes == pytest.approx(plain / 2)
    assert ways["int8"].nbytes == pytest.approx(plain / 4, rel=0.01)
    assert ways["topk"].nbytes == pytest.approx(3 / 4 * NUMEL * 4 * (0.02 + 0.08))
    assert ways["powersgd"].nbytes < plain / 10


def test_model_servers_send_parameters_back_as_they_are() -> None:
    ways = {each.way.name: each for each in found('kind = "model_server"\nshards = 4', compute="groups = 4\ngroup_size = 1")}
    assert ways["none"].nbytes == pytest.approx(2 * 3 / 4 * NUMEL * 4)
    assert all(each.nbytes >= ways["none"].nbytes / 2 for each in ways.values())


def test_what_pays_depends_on_the_network() -> None:
    slow, fast = found('kind = "allreduce"'), found('kind = "allreduce"', "100 Gbit/s")
    assert best(slow).way.name in ("int8", "powersgd")
    assert best(slow).way.name in in_words(slow)
    assert best(fast) is fast[0]
    assert in_words(fast).startswith("Without compression")


@pytest.mark.parametrize(("exchange", "hosts"), [('kind = "averaging"', 4), ('kind = "allreduce"', 1)])
def test_where_nothing_can_be_compressed_nothing_is_said(exchange: str, hosts: int) -> None:
    assert found(exchange, hosts=hosts) == ()
    assert in_words(()) == ""
