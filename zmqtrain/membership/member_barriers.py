"""Barriers and agreements of a run's members: who may call them with whom. What happens there is `Barriers`' business. Sans-IO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zmqtrain.errors import PeerLostError, UsageError, ViewChangedError, ZmqTrainError
from zmqtrain.membership.actions import Action, Refuse, Ticket
from zmqtrain.membership.barrier import Barriers, name_some
from zmqtrain.membership.state import MemberTable
from zmqtrain.net.endpoint import PeerId


class MemberBarriers:
    """Checks calls against the table of members. Callers are members of a run that all have joined."""

    def __init__(self, members: MemberTable, barriers: Barriers) -> None:
        self._members, self._barriers = members, barriers
        self._everyone: tuple[tuple[int, bool], tuple[PeerId, ...]] = (-1, False), ()

    def reach(
        self,
        peer: PeerId,
        name: str,
        members: Sequence[PeerId] | None,
        ticket: Ticket,
        now: float,
        *,
        version: int,
        elastic: bool,
        call: int | None = None,
    ) -> list[Action]:
        """A member has reached a barrier.

        Args:
            members: those that meet there; by default all workers.
            version: the view's.
            elastic: whether a barrier of all workers goes on without those that are lost.
            call: the member's number of this call.
        """
        who = self._all_workers(version, elastic=elastic) if members is None else tuple(sorted(set(members)))
        # A member that is lost ends an open barrier, or is left out: then there is another tuple. So thousands need one check.
        if not (peer.startswith("worker/") and members is None and self._barriers.is_for(name, who)):
            refused = self._not_all_here(peer, who, f"the barrier {name!r}")
            if refused is not None:
                return [Refuse(ticket, refused)]
        return self._barriers.arrive(peer, name, who, ticket, now, of_all=elastic and members is None, call=call)

    def agree(
        self,
        peer: PeerId,
        name: str,
        value: int,
        members: Sequence[PeerId],
        ticket: Ticket,
        now: float,
        *,
        version: int | None,
        newest: int,
        call: int | None = None,
        processes: Mapping[PeerId, int] | None = None,
    ) -> list[Action]:
        """A member gives its value for an agreement, whose members all get the largest one.

        Args:
            version: the view that it is about, if it is about one; a newer view ends it.
            newest: the version of the newest view that the members were told.
            call: the member's number of this call.
            processes: the incarnations of members, if another process of the name is another member.
        """
        if version is not None and version < newest:
            error = ViewChangedError(f"the members have changed: view {newest} is the newest, not {version}")
            return [Refuse(ticket, error)]
        who = tuple(sorted(set(members)))
        what = f"the agreement {name!r}"
        refused = self._not_all_here(peer, who, what) or self._replaced(processes, what)
        if refused is not None:
            return [Refuse(ticket, refused)]
        return self._barriers.arrive(peer, f"agree/{name}", who, ticket, now, value=value, version=version, call=call)

    def _not_all_here(self, peer: PeerId, who: Sequence[PeerId], what: str) -> ZmqTrainError | None:
        known = [entry for other in who if (entry := self._members.get(other)) is not None]
        unknown = sorted({*who} - {entry.member.peer for entry in known})
        if unknown or peer not in who:
            why = f"with {name_some(unknown)}, not part of this run" if unknown else "without being one of its members"
            return UsageError(f"{peer} calls {what} {why}")
        gone = next((entry for entry in known if entry.gone), None)
        return None if gone is None else PeerLostError(gone.member.peer, gone.reason, waiting_for=what)

    def _replaced(self, processes: Mapping[PeerId, int] | None, what: str) -> PeerLostError | None:
        for peer, incarnation in (processes or {}).items():
            entry = self._members.get(peer)
            if entry is not None and entry.member.incarnation != incarnation:
                return PeerLostError(peer, "another process has taken its place", waiting_for=what)
        return None

    def _all_workers(self, version: int, *, elastic: bool) -> tuple[PeerId, ...]:
        """The members of a barrier of all workers; the same object until the members change."""
        key = version, elastic
        if self._everyone[0] != key:
            workers = self._members.of_kind("worker")
            self._everyone = key, tuple(other.member.peer for other in workers if not elastic or other.here)
        return self._everyone[1]
