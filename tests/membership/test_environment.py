"""What a process is told by its environment."""

from __future__ import annotations

from dataclasses import astuple

from zmqtrain.membership.environment import net_settings
from zmqtrain.topology.timeouts import Ladder


def test_the_time_outs_of_an_endpoint_are_those_of_the_ladder_in_its_order() -> None:
    ladder = Ladder.of(60)
    settings = net_settings(ladder, "token")
    rungs = (settings.heartbeat_s, settings.flush_s, settings.lost_s, settings.greet_s)
    assert rungs == (ladder.heartbeat_s, ladder.flush_s, ladder.lost_s, ladder.join_s)
    assert list(astuple(ladder)) == sorted(astuple(ladder))
    # A request gives up, and names what it asked for, before the link on which it waits is given up.
    assert ladder.request_s < settings.greet_s
