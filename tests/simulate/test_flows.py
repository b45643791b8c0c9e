"""Fair shares: against a naive water-filling, and by what defines them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.simulate.flows import Flow, FlowTable, Resource


def test_one_flow_gets_all_of_the_narrowest() -> None:
    wide, narrow = Resource("wide", 100.0), Resource("narrow", 10.0)
    table, flow = FlowTable(), Flow((wide, narrow))
    table.start(flow, 50.0, now=2.0)
    assert table.balance(2.0) == [flow]
    assert flow.rate == 10
    assert flow.finishes_at == 7


def test_what_one_cannot_use_the_others_get() -> None:
    server, slow = Resource("server", 90.0), Resource("slow", 10.0)
    table = FlowTable()
    flows = [Flow((server,)), Flow((server,)), Flow((slow, server))]
    for flow in flows:
        table.start(flow, 1000.0, 0.0)
    table.balance(0.0)
    assert [flow.rate for flow in flows] == [40, 40, 10]


def test_a_flow_that_ends_leaves_its_share_and_what_was_sent_counts() -> None:
    nic = Resource("NIC", 10.0)
    table, one, other = FlowTable(), Flow((nic,)), Flow((nic,))
    table.start(one, 20.0, 0.0)
    table.start(other, 100.0, 0.0)
    table.balance(0.0)
    assert (one.finishes_at, other.finishes_at) == (4.0, 20.0)
    table.stop(one)
    assert table.balance(4.0) == [other]
    assert other.remaining == 80
    assert other.finishes_at == 12


def test_the_next_message_of_a_flow_changes_nobody() -> None:
    nic = Resource("NIC", 10.0)
    table, one, other = FlowTable(), Flow((nic,)), Flow((nic,))
    table.start(one, 20.0, 0.0)
    table.start(other, 100.0, 0.0)
    table.balance(0.0)
    table.follow(one, 30.0, 4.0)
    assert not table.unbalanced
    assert (one.finishes_at, other.finishes_at) == (10.0, 20.0)


def test_without_a_limit_it_takes_no_time() -> None:
    table, flow = FlowTable(), Flow(())
    table.start(flow, 1e12, 3.0)
    assert table.balance(3.0) == [flow]
    assert flow.rate == math.inf
    assert flow.finishes_at == 3.0


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[list[Resource], list[Flow]]:
    capacities = draw(st.lists(st.floats(0.5, 100.0), min_size=1, max_size=6))
    resources = [Resource(f"r{number}", capacity) for number, capacity in enumerate(capacities)]
    paths = draw(
        st.lists(st.lists(st.sampled_from(range(len(resources))), min_size=1, max_size=4, unique=True), min_size=1, max_size=10)
    )
    return resources, [Flow([resources[number] for number in path]) for path in paths]


@given(_worlds())
def test_shares_are_max_min_fair(world: tuple[list[Resource], list[Flow]]) -> None:
    resources, flows = world
    table = FlowTable()
    for flow in flows:
        table.start(flow, 100.0, 0.0)
    table.balance(0.0)
    for resource in resources:
        assert sum(flow.rate for flow in resource.flows) <= resource.capacity * (1 + 1e-9)
    for flow in flows:
        # That none could be faster: on its way is a full resource on which nobody is faster than it.
        assert any(
            sum(other.rate for other in resource.flows) >= resource.capacity * (1 - 1e-9)
            and all(other.rate <= flow.rate * (1 + 1e-9) for other in resource.flows)
            for resource in flow.path
        )


@given(_worlds(), st.data())
def test_changes_in_any_order_end_in_the_same_shares(world: tuple[list[Resource], list[Flow]], data: st.DataObject) -> None:
    """What is computed for the part that a change reaches equals what is computed for all."""
    resources, flows = world
    table, active = FlowTable(), dict.fromkeys(flows, False)
    for now in range(data.draw(st.integers(1, 15))):
        flow = data.draw(st.sampled_from(flows))
        if active[flow]:
            table.stop(flow)
        else:
            table.start(flow, 1e9, float(now))
        active[flow] = not active[flow]
        table.balance(float(now))
    expected = _filled(resources, [flow for flow in flows if active[flow]])
    for flow in flows:
        assert flow.rate == pytest.approx(expected.get(flow, 0.0), rel=1e-9)


def _filled(resources: list[Resource], flows: list[Flow]) -> dict[Flow, float]:
    """All flows rise together; those of a full resource stay. Slow, and plainly right."""
    rates = dict.fromkeys(flows, 0.0)
    rising = set(flows)
    while rising:
        room = []
        for resource in resources:
            users = [flow for flow in flows if resource in flow.path]
            more = [flow for flow in users if flow in rising]
            if more:
                room.append((max(0.0, resource.capacity - sum(rates[flow] for flow in users)) / len(more), resource))
        step = min(share for share, _ in room)
        for flow in rising:
            rates[flow] += step
        for share, resource in room:
            if share <= step * (1 + 1e-12):
                rising -= {flow for flow in rising if resource in flow.path}
    return rates
