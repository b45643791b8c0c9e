"""Where shards are to be if their servers leave: tables without I/O."""

from __future__ import annotations

import random

from zmqtrain.membership.moves import Moves

HOSTS = {"a": "h1", "b": "h2", "c": "h3", "d": "h3"}


def test_nothing_moves_as_long_as_nobody_leaves() -> None:
    moves = Moves(copies=True)
    assert moves.decide([("a", "b"), ("b", "c"), ("c",)], HOSTS) == []
    assert moves.goals == {}


def test_the_backup_serves_next_and_gets_another_one_on_another_host() -> None:
    moves = Moves(copies=True)
    moves.leave(["b"])
    found = moves.decide([("a", "b"), ("b", "c"), ("c", "a")], HOSTS)
    assert [(move.shard, move.goal) for move in found] == [(0, ("a", "d")), (1, ("c", "a"))]
    assert all(move.reason == "b leaves" for move in found)
    assert moves.leaving == ("b",)


def test_what_is_decided_stays_so_until_it_is_reached() -> None:
    moves = Moves(copies=True)
    moves.leave(["b"])
    moves.decide([("b", "c")], HOSTS)
    assert moves.goals == {0: ("c", "a")}
    for chain in (("b", "c"), ("c", "b")):
        assert moves.decide([chain], HOSTS) == []
        assert moves.goals == {0: ("c", "a")}
    assert moves.decide([("c", "a")], HOSTS) == []
    assert moves.goals == {}


def test_if_a_server_is_lost_or_leaves_to_which_a_shard_moves_it_is_decided_anew() -> None:
    moves = Moves(copies=True)
    moves.leave(["b"])
    moves.decide([("b", "c")], HOSTS)
    without_a = {peer: host for peer, host in HOSTS.items() if peer != "a"}
    (again,) = moves.decide([("b", "c")], without_a)
    assert again.goal == ("c", "d")  # on the same host, since there is no other
    moves.leave(["c"])
    (again,) = moves.decide([("b", "c")], without_a)
    assert again.goal == ("d",)
    assert again.reason == "b and c leave"


def test_without_copies_the_server_takes_it_that_serves_the_fewest() -> None:
    moves = Moves(copies=False)
    moves.leave(["a", "b"])
    found = moves.decide([("a",), ("b",), ("c",)], HOSTS)
    assert [(move.shard, move.goal) for move in found] == [(0, ("d",)), (1, ("c",))]


def test_a_server_that_has_come_back_gets_a_shard_that_shared_a_host() -> None:
    moves = Moves(copies=True)
    (move,) = moves.decide([("b", "c"), ("b", "a"), ("c", "b")], HOSTS)
    assert (move.shard, move.goal) == (1, ("a", "b"))  # it has a copy already
    assert move.reason == "h2 serves 2 shards, and h1 none"
    assert moves.decide([("a", "b"), ("b", "c"), ("c", "b")], HOSTS) == []
    assert moves.goals == {1: ("a", "b")}


def test_load_is_spread_over_hosts_one_shard_after_the_other() -> None:
    moves = Moves(copies=False)
    chains = [("c",), ("d",), ("c",), ("d",), ("b",)]
    found = []
    while decided := moves.decide(chains, HOSTS):
        (move,) = decided
        found.append((move.shard, *move.goal))
        assert moves.decide(chains, HOSTS) == []  # one at a time
        chains[move.shard] = move.goal
    assert found == [(2, "a"), (3, "a")]  # h3 served four shards, and serves two now; one of h1 or h2 has two, the other one


def test_the_last_one_stays() -> None:
    moves = Moves(copies=True)
    moves.leave(HOSTS)
    assert moves.decide([("a", "b")], HOSTS) == []


def test_it_survives_in_a_journal() -> None:
    moves, other = Moves(copies=True), Moves(copies=True)
    moves.leave(["b"])
    moves.decide([("b", "c")], HOSTS)
    other.restore(moves.to_value())
    assert (other.leaving, other.goals) == (moves.leaving, moves.goals)
    other.restore(Moves(copies=True).to_value())
    assert (other.leaving, other.goals) == ((), {})


def test_in_the_end_nobody_who_leaves_has_a_shard_whatever_is_lost_meanwhile() -> None:
    """Random histories, in which servers take the steps of `chain_step`, and some are lost."""
    from zmqtrain.membership.chains import Chains
    from zmqtrain.server.chain_step import DoWithout, Fill, HandOver, chain_step

    for seed in range(400):
        draw = random.Random(seed)
        copies = draw.random() < 0.6
        hosts = {f"s{n}": f"h{draw.randrange(4)}" for n in range(draw.randint(2, 6))}
        chains, moves = Chains(list(hosts)), Moves(copies=copies)
        loss_left = copies and draw.random() < 0.5
        steps = 0
        while True:
            moves.decide(chains.value, hosts)
            shard = draw.randrange(len(chains.value))
            head, *backups = chains.value[shard]
            backup = backups[0] if backups else None
            others = [peer for peer in hosts if peer != head and peer not in moves.leaving]
            step = chain_step(head, backup, moves.goals.get(shard), others, copies=copies)
            match step:
                case Fill(to):
                    assert to in hosts
                    assert chains.add(shard, head, to) is None
                case HandOver(to):
                    assert chains.hand_over(shard, head, to, copies=copies) is None
                case DoWithout(to):
                    assert chains.do_without(shard, head, to) is None
            if copies and backup is not None and not isinstance(step, DoWithout):
                assert len(chains.value[shard]) == 2, "never fewer than before"
            steps += 1
            if steps in (4, 9):
                stay = [peer for peer in hosts if peer not in moves.leaving]
                moves.leave(draw.sample(stay, draw.randint(0, len(stay) - 1)))
            if steps > 12 and loss_left and len(hosts) > 2:
                victim = draw.choice(list(hosts))
                if chains.spare(victim) and any(peer not in moves.leaving for peer in hosts if peer != victim):
                    loss_left = False
                    chains.remove(victim)
                    del hosts[victim]
            if steps > 400:
                break
        assert moves.goals == {}
        assert not any(peer in moves.leaving for chain in chains.value for peer in chain)
        stay = [peer for peer in hosts if peer not in moves.leaving]
        assert all(len(chain) == (2 if copies and len(stay) > 1 else 1) for chain in chains.value)
