"""Which servers have each shard, and what the coordinator decides when they are lost: without a loop."""

from __future__ import annotations

from tests.membership.table import Table, members
from zmqtrain.errors import PeerLostError, ProtocolError
from zmqtrain.membership.chains import Chains
from zmqtrain.membership.state import State
from zmqtrain.membership.view import View


def test_a_chain_begins_with_the_server_and_takes_one_backup() -> None:
    chains = Chains(["a", "b"])
    assert chains.add(0, "a", "b") is None
    assert chains.value == (("a", "b"), ("b",))
    assert chains.add(1, "a", "b") == "a does not serve shard 1"
    assert chains.add(1, "b", "b") == "b cannot be its own backup"
    assert chains.add(2, "a", "b") == "a does not serve shard 2"
    assert chains.spare("a")
    assert not chains.spare("b")
    assert chains.remove("a") == [0]
    assert chains.value == (("b",), ("b",))
    assert chains.lost == []
    assert Chains.from_value(chains.to_value()).value == chains.value
    assert chains.remove("b") == [0, 1]
    assert chains.lost == [0, 1]


def test_without_servers_none_may_be_lost() -> None:
    assert not Chains()
    assert not Chains().spare("a")


def running(servers: int = 3) -> Table:
    table = Table(members(2, servers), elastic=True, replicated=True)
    table.join_all()
    assert table.roster.state is State.RUNNING
    return table


def joined(table: Table, *pairs: tuple[int, str, str]) -> None:
    for shard, head, backup in pairs:
        ticket = table.ask("backup", head, shard, backup)
        assert View.from_value(table.answers[ticket]).chains[shard] == (head, backup)


def test_a_server_without_a_backup_ends_the_run() -> None:
    table = running()
    joined(table, (1, "server/1", "server/2"))
    table.exited("server/0", -9)
    assert table.roster.state is State.FAILED
    assert table.roster.failures[0].peer == "server/0"


def test_its_backup_serves_and_all_are_told() -> None:
    table = running()
    joined(table, (0, "server/0", "server/1"), (1, "server/1", "server/2"), (2, "server/2", "server/0"))
    table.told.clear()
    table.exited("server/0", -9)
    assert table.roster.state is State.RUNNING
    assert table.roster.view().chains == (("server/1",), ("server/1", "server/2"), ("server/2",))
    assert {"worker/0", "worker/1", "server/1", "server/2"} <= {peer for peer, what in table.told if what == "view"}
    joined(table, (0, "server/1", "server/2"), (2, "server/2", "server/1"))
    table.exited("server/2", -9)
    assert table.roster.view().chains == (("server/1",),) * 3
    table.exited("server/1", -9)
    assert table.roster.state is State.FAILED
    assert table.roster.failures[0].peer == "server/1"


def test_who_may_say_that_there_is_a_backup() -> None:
    table = running()
    table.exited("worker/1", -9)
    assert isinstance(table.answers[table.ask("backup", "server/1", 0, "server/2")], ProtocolError)
    assert isinstance(table.answers[table.ask("backup", "worker/1", 0, "server/2")], PeerLostError)
    assert isinstance(table.answers[table.ask("backup", "server/0", 0, "worker/0")], PeerLostError)
    joined(table, (0, "server/0", "server/1"))
    joined(table, (0, "server/0", "server/1"))  # it asks once more, since the answer did not arrive


def test_a_lost_server_comes_back_as_one_that_has_nothing() -> None:
    table = running()
    joined(table, (0, "server/0", "server/1"))
    table.exited("server/0", -9)
    ticket = table.ask("join", "server/0", 77, "somewhere")
    view = View.from_value(table.answers[ticket])
    assert table.answers[ticket]["late"] is True
    assert view.chains[0] == ("server/1",)
    assert view.members["server/0"].incarnation == 77


def test_one_that_comes_back_before_its_loss_was_noticed_has_lost_its_shard() -> None:
    table = running()
    ticket = table.ask("join", "server/0", 77, "somewhere")
    assert isinstance(table.answers[ticket], PeerLostError)
    assert table.roster.state is State.FAILED


def test_another_roster_goes_on_with_the_chains() -> None:
    from zmqtrain.membership.roster import Roster

    table = running()
    joined(table, (0, "server/0", "server/1"))
    again = Roster(table.expected, table.roster._timeouts, now=1.0, ledger=table.roster.ledger())
    assert again.view().chains == table.roster.view().chains
