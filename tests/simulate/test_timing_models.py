"""The four models of a network's timing give the same times where they describe the same thing (docs/simulation.md)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from zmqtrain.net.nics import TIMES, Nics
from zmqtrain.plan.link import Cost, Link
from zmqtrain.plan.queues import Life, Nic, Queues
from zmqtrain.simulate.flows import Flow, FlowTable, Resource

RATE = 125e6
NBYTES = 8_000_000
PIECE = 64 * 1024


def by_flows(senders: int, receiver: float) -> list[float]:
    """When each of these senders' messages has arrived at one receiver, whose NIC has this rate: the simulated world."""
    into, table, now, ends = Resource("into", receiver), FlowTable(), 0.0, []
    flows = [Flow((Resource(f"out of {sender}", RATE), into)) for sender in range(senders)]
    for flow in flows:
        table.start(flow, NBYTES, now)
    while flows:
        table.balance(now)
        now = min(flow.finishes_at for flow in flows)
        for flow in [each for each in flows if each.finishes_at <= now * (1 + 1e-12)]:
            flows.remove(flow)
            table.stop(flow)
            ends.append(now)
    return ends


def by_nics(senders: int, receiver: float) -> list[float]:
    """The same in the emulated world: pieces reserve NICs one after another."""
    nics = Nics([0.0] * (TIMES * (senders + 1)), [RATE] * senders + [receiver])
    left, free, ends = [NBYTES] * senders, [0.0] * senders, [0.0] * senders
    while any(left):
        for sender in range(senders):
            piece = min(PIECE, left[sender])
            left[sender] -= piece
            start, free[sender] = nics.reserve(sender, piece, free[sender])
            ends[sender] = nics.follow([senders], piece, start, free[sender])
    return ends


def by_queues(senders: int, receiver: float) -> list[float]:
    """The same as the planner sees groups that delay each other."""
    queues, ends = Queues(), []
    nic = Nic(queues)

    def message() -> Life:
        yield nic.carry(NBYTES, 1 / RATE, 1 / receiver)
        ends.append(queues.now)

    for _ in range(senders):
        queues.start(message())
    queues.run()
    return ends


def by_cost(senders: int, receiver: float) -> list[float]:
    """The same as a price: the bytes of the busiest NIC."""
    link = Link(alpha_s=0.0, byte_s=1 / min(RATE, receiver / senders))
    return [link.seconds(Cost.sent(1, NBYTES))] * senders


@pytest.mark.parametrize(("senders", "receiver"), [(1, RATE), (4, RATE), (4, 10 * RATE), (3, RATE / 2)])
def test_messages_to_one_receiver_take_the_same_time_in_all_models(senders: int, receiver: float) -> None:
    expected = max(by_cost(senders, receiver))
    found: dict[str, Sequence[float]] = {
        "flows": by_flows(senders, receiver),
        "nics": by_nics(senders, receiver),
        "queues": by_queues(senders, receiver),
    }
    for name, ends in found.items():
        assert len(ends) == senders, name
        # Pieces pass one NIC after another: the last one is a piece's time later than a fluid would be, on each NIC.
        tolerance = 2 * senders * PIECE / min(RATE, receiver) if name == "nics" else 1e-9 * expected
        assert max(ends) == pytest.approx(expected, abs=tolerance), name
    assert min(found["flows"]) == pytest.approx(min(found["queues"]))


def test_a_message_behind_another_waits_in_all_models() -> None:
    """Two messages of one sender, one after the other, with something on its way to another receiver all the time."""
    table, sender = FlowTable(), Resource("out", RATE)
    first, other = Flow((sender, Resource("a", RATE))), Flow((sender, Resource("b", RATE)))
    table.start(first, NBYTES, 0.0)
    table.start(other, 2 * NBYTES, 0.0)
    table.balance(0.0)
    half = first.finishes_at
    assert half == pytest.approx(2 * NBYTES / RATE)  # at half the rate
    table.follow(first, NBYTES / 2, half)
    table.balance(half)
    assert first.finishes_at == pytest.approx(3 * NBYTES / RATE)

    queues, ends = Queues(), []
    nic = Nic(queues)

    def messages(*sizes: float) -> Life:
        for nbytes in sizes:
            yield nic.carry(nbytes, 1 / RATE, 1 / RATE)
            ends.append(queues.now)

    queues.start(messages(NBYTES, NBYTES / 2))
    queues.start(messages(2 * NBYTES))
    queues.run()
    assert ends == pytest.approx([half, first.finishes_at, 3.5 * NBYTES / RATE])
