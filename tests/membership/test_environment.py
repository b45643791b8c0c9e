"""What a process is told by its environment."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.membership.environment import RoleEnvironment, net_settings
from zmqtrain.run.assembly import coordinator_settings
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.timeouts import Timeouts


def test_the_time_outs_of_an_endpoint_are_those_of_the_ladder_in_its_order() -> None:
    timeouts = Timeouts.of(60)
    settings = net_settings(timeouts, "token")
    rungs = (settings.heartbeat_s, settings.flush_s, settings.lost_s, settings.greet_s)
    assert rungs == (timeouts.ping_s, timeouts.flush_s, timeouts.lost_s, timeouts.join_s)
    assert list(astuple(timeouts)) == sorted(astuple(timeouts))
    # A request gives up, and names what it asked for, before the link on which it waits is given up.
    assert timeouts.request_s < settings.greet_s


def test_links_to_the_coordinator_of_a_large_run_are_pinged_less_often() -> None:
    timeouts = Timeouts.of(60)
    assert [timeouts.ping_for(members) for members in (0, 200, 500, 2000)] == [2.0, 2.0, 5.0, 10.0]
    environment = RoleEnvironment("worker/3", "tcp://127.0.0.1:1,2", "token", members=500)
    again = RoleEnvironment.from_environ(environment.to_environ())
    assert again == environment
    settings = again.settings()
    assert [settings.heartbeat_to(peer) for peer in ("coordinator", "worker/0")] == [5.0, 2.0]
    hosts = [{"name": "h[1-250]", "address": "127.0.0.1", "slots": 1}]
    topology = Topology.from_dict({"job": {}, "hosts": hosts, "compute": {"groups": 250}, "exchange": {"kind": "gossip"}})
    central = coordinator_settings(topology, "token", encrypted=False)
    assert (central.peers, central.heartbeat_to("worker/0"), central.pause_s) == (500, 5.0, 0.02)
    small = coordinator_settings(Topology.from_dict({"job": {}}), "token", encrypted=False)
    assert (small.heartbeat_to("worker/0"), small.pause_s) == (2.0, 0.0)
    assert (central.probe_later_s, settings.probe_later_s, small.probe_later_s) == (15.0, 15.0, None)


def test_a_wrong_number_of_members_is_named() -> None:
    environ = RoleEnvironment("worker/3", "tcp://127.0.0.1:1,2", "token").to_environ()
    with pytest.raises(UsageError, match="ZMQTRAIN_MEMBERS is 'many'; it must be a number"):
        RoleEnvironment.from_environ({**environ, "ZMQTRAIN_MEMBERS": "many"})
