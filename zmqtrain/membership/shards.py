"""The shards of the model among the members of a run: which servers have each, which are to, and whom the run can spare.

`Chains` is the book about which servers have a shard, and `Moves` decides where it is to go. This joins them with the members.
Sans-IO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zmqtrain.errors import PeerLostError, ProtocolError, ZmqTrainError
from zmqtrain.membership.actions import Note
from zmqtrain.membership.chains import Chains
from zmqtrain.membership.ledger import CHAINS, MOVES
from zmqtrain.membership.moves import Moves
from zmqtrain.membership.state import Entry, MemberTable, Presence
from zmqtrain.membership.view import MemberKind, View
from zmqtrain.net.endpoint import PeerId
from zmqtrain.wire.payload import Value


class Shards:
    """Where the shards are. What changes is returned as the `Note` of it, or the error why it cannot be."""

    def __init__(self, chains: Chains, members: MemberTable, *, copies: bool) -> None:
        """``chains``: at the beginning; none if no server may be lost. ``copies``: whether each shard is to be on two servers."""
        self._chains, self._members, self._copies = chains, members, copies
        self._moves = Moves(copies=copies)
        # Each server begins with a shard. That of the merged layers is the one after those of model servers.
        self._count = sum(entry.presence is Presence.EXPECTED for entry in members.of_kind("server"))

    def __bool__(self) -> bool:
        return bool(self._chains)

    @property
    def lost(self) -> bool:
        """Whether there is a shard that nobody has any more."""
        return bool(self._chains.lost)

    def view(self, view: View) -> View:
        """The view with what members are to know of shards."""
        return replace(view, chains=self._chains.value, leaving=self._moves.leaving, goals=dict(self._moves.goals))

    def chained(self, kind: MemberKind) -> bool:
        """Whether others may have what members of this kind have."""
        return len(self._chains.value) > self._count if kind == "fc" else kind == "server" and bool(self._chains)

    def spared(self, entry: Entry) -> bool:
        """Whether an elastic run goes on without this role: a worker, or a server whose shards others have."""
        kind = entry.member.kind
        return kind == "worker" or (self.chained(kind) and self._chains.spare(entry.member.peer))

    def add_backup(self, shard: int, head: PeerId, backup: PeerId) -> Note | ZmqTrainError:
        """``head``, which serves the shard, says that ``backup`` has an equal copy from now on."""
        other = self._members.get(backup)
        if other is None or not other.here or not self.chained(other.member.kind):
            return PeerLostError(backup, "it is not there", waiting_for=f"its copy of shard {shard}")
        why = self._chains.add(shard, head, backup)
        if why is not None:
            return ProtocolError(why)
        values: dict[str, Any] = {"shard": shard, "server": head, "backup": backup}
        return Note("backup", values, f"shard {shard} is on {head} and on {backup}")

    def hand_over(self, shard: int, head: PeerId, to: PeerId) -> Note | str | ZmqTrainError:
        """``head`` gives the shard to its backup ``to``, which has an equal copy. A plain text if it has done so already: it asks
        once more, since it has had no answer."""
        other = self._members.get(to)
        if other is None or not other.here:
            return PeerLostError(to, "it is not there", waiting_for=f"it to serve shard {shard}")
        reason = f"{to} serves shard {shard} in place of {head}"
        if 0 <= shard < len(self._chains.value) and self._chains.value[shard][:1] == (to,):
            return reason
        why = self._chains.hand_over(shard, head, to, copies=self._copies)
        if why is not None:
            return ProtocolError(why)
        values: dict[str, Any] = {"shard": shard, "server": to, "before": head}
        return Note("moved", values, reason)

    def do_without(self, shard: int, head: PeerId, backup: PeerId) -> Note | ZmqTrainError:
        """``head``, which serves the shard, needs this backup no more."""
        why = self._chains.do_without(shard, head, backup)
        if why is not None:
            return ProtocolError(why)
        reason = f"shard {shard} is only on {head} from now on: {backup} leaves, and there is no other server"
        values: dict[str, Any] = {"shard": shard, "server": head, "backup": None, "alone": True}
        return Note("backup", values, reason)

    def leave(self, servers: Sequence[PeerId]) -> None:
        """These are to have no shard any more."""
        self._moves.leave(servers)

    def decide(self) -> list[Note]:
        """Something has changed: what is to be moved now."""
        if not self._chains:
            return []
        hosts = {entry.member.peer: entry.member.host for entry in self._members.of_kind("server") if entry.here}
        notes = []
        for move in self._moves.decide(self._chains.value[: self._count], hosts):  # an FC server's layers do not move
            head, *backup = move.goal
            values: dict[str, Any] = {"shard": move.shard, "server": head, "backup": backup[0] if backup else None}
            reason = f"shard {move.shard} moves to {' and '.join(move.goal)}: {move.reason}"
            notes.append(Note("moves", values, reason))
        return notes

    def without(self, server: PeerId) -> list[Note]:
        """A member is lost, with all that it had of the model: the shards that are on one server from now on."""
        notes = []
        for shard in self._chains.remove(server):
            if shard in self._chains.lost:
                continue
            head, *_ = self._chains.value[shard]
            kind: MemberKind = "fc" if shard >= self._count else "server"
            alone = sum(entry.here for entry in self._members.of_kind(kind)) < 2
            why = f", since there is no other {'FC ' if kind == 'fc' else ''}server" if alone else ""
            what = "what the FC server has" if kind == "fc" else f"shard {shard}"
            reason = f"{what} is only on {head} for now, without {server}{why}"
            notes.append(Note("backup", {"shard": shard, "server": head, "backup": None, "alone": alone}, reason))
        return notes

    def ledger(self) -> dict[str, Value]:
        """What must not be forgotten, for the journal. Nothing where no server may be lost."""
        return {CHAINS: self._chains.to_value(), MOVES: self._moves.to_value()} if self._chains else {}

    def restore(self, ledger: Mapping[str, Any]) -> None:
        """Become what `ledger` has told of."""
        self._chains = Chains.from_value(ledger.get(CHAINS, ()))
        if self._chains:
            self._moves.restore(ledger[MOVES])
