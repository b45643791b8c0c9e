"""A roster at a table: what a test may do to it, and what it has said."""

from __future__ import annotations

from typing import Any

from zmqtrain.errors import ZmqTrainError
from zmqtrain.membership.actions import Action, Answer, Discard, Drop, End, Outcome, Push, Refuse
from zmqtrain.membership.chains import Chains
from zmqtrain.membership.roster import Roster
from zmqtrain.membership.view import Member
from zmqtrain.topology.timeouts import Timeouts

TIMEOUTS = Timeouts.of(60.0)


def members(workers: int = 2, servers: int = 1, hosts: int = 1, *, agents: bool = True) -> list[Member]:
    """Workers and servers in turn on hosts ``h0``, ``h1``, ..."""
    found = [Member(f"agent/h{number}", "", f"h{number}", "agent", -1) for number in range(hosts if agents else 0)]
    found += [Member(f"worker/{n}", "", f"h{n % hosts}", "worker", n, 0, n) for n in range(workers)]
    found += [Member(f"server/{n}", "", f"h{n % hosts}", "server", n) for n in range(servers)]
    return found


class Table:
    """A roster with the bookkeeping that a coordinator does: what each request was answered, who was told what."""

    def __init__(
        self,
        expected: list[Member],
        *,
        elastic: bool = False,
        lasting: bool = False,
        replicated: bool = False,
        patient: bool = False,
        whole_groups: bool = False,
        spare: list[Member] | None = None,
    ) -> None:
        chains = Chains([member.peer for member in expected if member.kind == "server"]) if replicated else None
        self.roster = Roster(
            expected,
            TIMEOUTS,
            now=0.0,
            elastic=elastic,
            lasting=lasting,
            patient=patient,
            whole_groups=whole_groups,
            chains=chains,
            spare=spare or (),
        )
        self.expected, self.now = expected, 0.0
        self.answers: dict[int, Any] = {}
        self.told: list[tuple[str, str]] = []
        self.dropped: list[str] = []
        self.outcome: Outcome | None = None
        self._ticket = 0

    def take(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            assert action.reason
            match action:
                case Answer(ticket, value):
                    assert ticket not in self.answers
                    self.answers[ticket] = value
                case Refuse(ticket, error):
                    assert ticket not in self.answers
                    self.answers[ticket] = error
                case Discard(ticket, reason):
                    assert ticket not in self.answers
                    self.answers[ticket] = reason
                case Push(to, what, _):
                    self.told.append((to, what))
                case Drop(peer):
                    self.dropped.append(peer)
                case End(outcome):
                    assert self.outcome is None
                    self.outcome = outcome
        return actions

    def ask(self, what: str, *args: Any, **named: Any) -> int:
        self._ticket += 1
        self.take(getattr(self.roster, f"handle_{what}")(*args, self._ticket, self.now, **named))
        return self._ticket

    def join(self, peer: str, incarnation: int = 1) -> int:
        return self.ask("join", peer, incarnation, f"tcp://{peer}")

    def join_all(self) -> list[int]:
        return [self.join(member.peer) for member in self.expected]

    def advance(self, seconds: float, alive: list[str] | None = None, hosts: tuple[str, ...] = ("h0",)) -> None:
        """Time goes by; every heartbeat the agents of ``hosts`` vouch for ``alive`` (all roles, if not given)."""
        roles = [member.peer for member in self.expected if member.is_role] if alive is None else alive
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TIMEOUTS.heartbeat_s)
            for host in hosts:
                self.take(self.roster.handle_heartbeat(f"agent/{host}", roles, self.now))
            deadline = self.roster.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.take(self.roster.tick(self.now))

    def leave(self, peer: str) -> None:
        self.take(self.roster.handle_leave(peer, self.now))

    def exited(
        self,
        peer: str,
        code: int,
        report: dict[str, Any] | None = None,
        *,
        stopped: bool = False,
        again: bool = False,
        agent: str = "agent/h0",
    ) -> None:
        self.take(self.roster.handle_exited(agent, peer, code, report, stopped=stopped, again=again, now=self.now))

    def error(self, ticket: int) -> ZmqTrainError:
        assert isinstance(self.answers[ticket], ZmqTrainError)
        return self.answers[ticket]
