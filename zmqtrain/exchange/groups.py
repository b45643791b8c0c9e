"""The groups of an elastic run: each change of the members makes new ones."""

from __future__ import annotations

from zmqtrain.collectives.group import Group
from zmqtrain.exchange.members import group_of
from zmqtrain.net.endpoint import Endpoint, PeerId

#: So many groups are kept. What follows a change needs two or three; an older one is used again only by what began before it.
MOST_KEPT = 8


class Groups:
    """Groups of workers, by name. The newest are kept, so that a run may change its members any number of times."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        """``timeout_s``: how long a collective may wait without any progress."""
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._groups: dict[str, Group] = {}  # those used last at the end

    def of(self, members: tuple[PeerId, ...], name: str) -> Group:
        """The group of this name, this process among its members; the same object as long as it is in use."""
        group = self._groups.pop(name, None) or group_of(self._endpoint, members, name, self._timeout_s)
        self._groups[name] = group
        idle = [other for other, kept in self._groups.items() if other != name and not kept.busy]
        for other in idle[: max(0, len(self._groups) - MOST_KEPT)]:
            self._groups.pop(other).close()
        return group

    def close(self) -> None:
        """No group is used any more."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()
