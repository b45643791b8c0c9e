"""A run's events, folded as they come, where nobody writes them down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zmqtrain.net.endpoint import PeerId
from zmqtrain.observe.dashboard.state import RunState
from zmqtrain.observe.line import line_of
from zmqtrain.observe.slowness import Slowness
from zmqtrain.observe.summary import Summary


class Fold:
    """The state and the summary of a run, as its events tell them; of bounded size."""

    def __init__(self, host_of: Mapping[PeerId, str], *, group_size: int) -> None:
        """``host_of``: where the roles are placed."""
        self._host_of = host_of
        self._slowness = Slowness()
        self.state, self.summary = RunState(group_size=group_size), Summary()

    def event(self, peer: PeerId, event: Mapping[str, Any]) -> None:
        """Take an event of a peer."""
        line = line_of(peer, event, self._host_of)
        self.state.add(line)
        self.summary.add(peer, line)
        for slow in self._slowness.add(peer, line):
            self.event(slow.peer, {"kind": "slow", "time": line["time"], "step": line["step"], "values": slow.values()})
