"""What a run keeps of those who were lost and came back: however many there are, no more."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import pytest

from zmqtrain.run.faults import restart
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.load import parse_topology

#: Virtual seconds from one loss to the next, and losses between two looks: as many of each target.
APART_S, BETWEEN = 1.0, 6
#: Of each change of the members all remember who trained which samples: so many lines together.
LINES = {"Era": 10, "Slot": 10, "Team": 20, "Change": 10}
TOPOLOGY = """
[job]
steps = 80
timeout = "5 s"
elastic = true
restarts = 100
[[hosts]]
name = "h[1-3]"
address = "10.0.0.1"
slots = 2
[compute]
groups = 3
device = "modelled"
profile = "lenet"
bucket_size = "1 MiB"
[exchange]
{exchange}
[network]
bandwidth = "1 Gbit/s"
latency = "100 us"
[[network.hosts]]
name = "h[1-3]"
slowdown = 1000.0
[simulation]
payload = "small"
time_limit = 120
[observe]
trace_steps = 0
"""


def kept_in(exchange: str, targets: list[str]) -> list[Counter[str]]:
    """The objects of this package and of asyncio after so many losses, and after so many more, by type."""
    losses = 2 * BETWEEN + 1
    faults = [restart(targets[each % len(targets)], at=APART_S * (each + 1), after=0.2) for each in range(losses)]
    looks: list[Counter[str]] = []

    def look() -> None:
        gc.collect()
        names = (type(each) for each in gc.get_objects())
        looks.append(Counter(kind.__qualname__ for kind in names if str(kind.__module__).startswith(("zmqtrain.", "_asyncio"))))

    def begin(_halt: object) -> None:
        loop = asyncio.get_running_loop()
        for number in range(2):
            loop.call_later(APART_S * (BETWEEN * (number + 1) + 0.95), look)

    result = simulate(parse_topology(TOPOLOGY.format(exchange=exchange)), options=Options(faults=faults, on_begin=begin))
    assert (result.ending.status, len(result.faults), result.broken) == ("done", losses, []), result.ending.error
    assert len(looks) == 2
    return looks


@pytest.mark.parametrize(
    ("exchange", "targets"),
    [
        ('kind = "allreduce"', ["worker/1", "worker/2"]),
        ('kind = "averaging"\nevery = 4', ["h2", "h3"]),
        ('kind = "gossip"', ["worker/1", "worker/2"]),
        ('kind = "model_server"\nshards = 3\nreplicas = 1', ["worker/1", "server/1", "worker/2"]),
    ],
    ids=["allreduce", "averaging", "gossip", "servers"],
)
def test_losses_leave_nothing_behind(exchange: str, targets: list[str]) -> None:
    before, after = kept_in(exchange, targets)
    more = {name: after[name] - before[name] for name in after if after[name] > before[name] and name not in {*LINES, "_Handle"}}
    # A message more or less may be on its way; what stays of each loss is there six times.
    assert {name: count for name, count in more.items() if count >= BETWEEN} == {}
    assert all(after[name] - before[name] <= most * BETWEEN for name, most in LINES.items())
