"""Which node is which host."""

from __future__ import annotations

import pytest

from zmqtrain.errors import ProtocolError, UsageError
from zmqtrain.launcher.environment.node_description import NodeDescription, own_description
from zmqtrain.launcher.environment.place import NodePlace
from zmqtrain.launcher.environment.register import OccupiedError, Register
from zmqtrain.topology.schema import Host

LISTED = [Host(name="alpha"), Host(name="beta", slots=8, bind="::"), Host(name="gamma", address="gamma.lab", slots=2)]


def node(*names: str, **more: object) -> NodeDescription:
    values = {"interface": "10.0.0.9", "launcher": "head", "slots": 4, "machine": "pod", **more}
    return NodeDescription(names, **values)  # type: ignore[arg-type]


def test_listed_hosts_are_found_by_name_by_number_and_in_turn() -> None:
    register = Register(LISTED, None)
    assert register.enter(node("other", "beta")) == "beta"
    assert register.missing() == "alpha, gamma"
    assert register.enter(node(rank=2)) == "gamma"
    assert not register.is_complete
    assert register.enter(node("somebody", interface="10.0.0.7", address="10.1.0.7")) == "alpha"
    assert register.is_complete
    settled = register.settle()
    assert [(host.name, host.address, host.slots, host.bind) for host in settled.hosts] == [
        ("alpha", "10.1.0.7", 4, None),  # where it says itself, with as many slots as it has
        ("beta", "10.0.0.9", 8, "::"),  # on the way to the launcher
        ("gamma", "gamma.lab", 2, None),  # as the file says
    ]
    assert settled.towards == dict.fromkeys(("alpha", "beta", "gamma"), "head")


def test_somebody_too_many_may_come_again() -> None:
    register = Register(LISTED[:2], None)
    assert register.enter(node("beta")) == "beta"
    with pytest.raises(OccupiedError, match=r"beta has joined already .*ZMQTRAIN_NAME"):
        register.enter(node("beta"))
    with pytest.raises(UsageError, match="number 2, but the file lists 2"):
        register.enter(node(rank=2))
    register.enter(node())
    with pytest.raises(OccupiedError, match="all 2 hosts"):
        register.enter(node())
    register.leave("beta")
    assert register.enter(node("beta")) == "beta"


def test_without_a_list_the_nodes_are_the_hosts() -> None:
    register = Register(None, None)
    assert register.expected is None
    assert "is not known" in register.missing()
    assert register.enter(node("n2", rank=1, nodes=3)) == "n2"
    assert register.missing() == "2 nodes"
    assert register.enter(node("n1", rank=0)) == "n1"
    with pytest.raises(OccupiedError, match="number 1 has joined already"):
        register.enter(node("n3", rank=1))
    assert register.enter(node("no good name!", machine="pod", rank=2)) == "pod"
    with pytest.raises(OccupiedError, match="all 3 nodes"):
        register.enter(node("n4"))
    assert [host.name for host in register.settle().hosts] == ["n1", "n2", "pod"]


def test_the_same_name_twice_gets_numbers() -> None:
    register = Register(None, 3)
    assert [register.enter(node("same", machine="same")) for _ in range(3)] == ["same", "node1", "node2"]


def test_the_launchers_own_machine_has_the_address_that_others_see() -> None:
    register = Register(None, 2)
    register.enter(node("first", interface="127.0.0.1"))
    register.enter(node("second"))
    assert [host.address for host in register.settle("10.0.0.1").hosts] == ["10.0.0.1", "10.0.0.9"]
    assert [host.address for host in register.settle().hosts] == ["127.0.0.1", "10.0.0.9"]


def test_descriptions_travel_and_foreign_ones_are_refused() -> None:
    description = own_description(NodePlace(names=("a", "b"), rank=1, nodes=2, address="10.0.0.1", bind="::"), "10.0.0.2", "head")
    assert NodeDescription.from_value(description.to_value()) == description
    assert description.versions["zmqtrain"]
    for wrong in (
        None,
        {},
        {**description.to_value(), "rank": "1"},
        {**description.to_value(), "slots": 0},
        {**description.to_value(), "nodes": -1},
    ):
        with pytest.raises(ProtocolError):
            NodeDescription.from_value(wrong)
