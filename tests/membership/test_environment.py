"""What a process is told by its environment."""

from __future__ import annotations

from dataclasses import astuple

from zmqtrain.membership.environment import net_settings
from zmqtrain.topology.timeouts import Timeouts


def test_the_time_outs_of_an_endpoint_are_those_of_the_ladder_in_its_order() -> None:
    timeouts = Timeouts.of(60)
    settings = net_settings(timeouts, "token")
    rungs = (settings.heartbeat_s, settings.flush_s, settings.lost_s, settings.greet_s)
    assert rungs == (timeouts.ping_s, timeouts.flush_s, timeouts.lost_s, timeouts.join_s)
    assert list(astuple(timeouts)) == sorted(astuple(timeouts))
    # A request gives up, and names what it asked for, before the link on which it waits is given up.
    assert timeouts.request_s < settings.greet_s
