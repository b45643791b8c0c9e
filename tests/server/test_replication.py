"""What may be told before the backup has it: tables without I/O, and all orders of events."""

from __future__ import annotations

import random

from zmqtrain.server.replication import Replication, Stage


def joined() -> Replication:
    made = Replication(3)
    made.fill("b")
    made.acknowledge("b", 3)
    made.join("b")
    return made


def test_alone_everything_may_be_told_at_once() -> None:
    made = Replication()
    assert made.is_out(made.log())


def test_a_backup_joins_once_it_has_all_that_was_told() -> None:
    made = Replication(3)
    made.fill("b")
    assert made.is_out(made.log())  # 4, while the state is on its way
    made.acknowledge("b", 3)
    assert made.stage("b") is Stage.JOINING
    assert not made.is_out(made.log())  # 5
    made.acknowledge("b", 4)
    assert made.stage("b") is Stage.COMPLETE
    assert not made.is_out(5)
    assert made.backup is None
    assert made.join("b") is None
    assert made.backup == "b"
    made.acknowledge("b", 5)
    assert made.is_out(5)
    assert made.has_all("b")


def test_what_a_lost_backup_had_not_acknowledged_is_told() -> None:
    made = joined()
    number = made.log()
    assert not made.is_out(number)
    made.lose("b")
    assert made.is_out(number)
    made.acknowledge("b", number)
    assert made.stage("b") is Stage.ALONE


def test_acknowledgements_of_another_and_of_what_was_never_sent_do_not_count() -> None:
    made = joined()
    number = made.log()
    made.acknowledge("c", number)
    made.acknowledge("b", number + 1)
    assert not made.is_out(number)


def test_the_present_backup_counts_until_the_next_one_is_in_its_place() -> None:
    made = joined()
    made.fill("c")
    number = made.log()
    assert not made.is_out(number)
    made.acknowledge("b", number)
    assert made.is_out(number)  # as before; nothing is held back for the next one, which is being filled
    made.acknowledge("c", 3)
    other = made.log()
    made.acknowledge("b", other)
    assert not made.is_out(other)
    made.acknowledge("c", other)
    assert made.is_out(other)
    assert made.backup == "b"
    assert made.join("c") == "b"
    assert made.backup == "c"
    last = made.log()
    made.acknowledge("c", last)
    assert made.is_out(last)
    assert made.stage("b") is Stage.ALONE


def test_one_that_has_handed_the_shard_over_has_all() -> None:
    made = Replication(7, joined="a")
    assert made.has_all("a")
    number = made.log()
    assert not made.is_out(number)
    assert not made.has_all("a")
    made.acknowledge("a", number)
    assert made.is_out(number)


def test_once_joined_nothing_was_told_that_a_backup_lacks() -> None:
    """Random histories: at any time, all that was told while a backup is in the chain is among what it has acknowledged, also while
    another one comes in its place."""
    for seed in range(600):
        draw, made = random.Random(seed), Replication()
        has: dict[str, int] = {}
        told = 0
        for _ in range(80):
            match draw.choice(("log", "log", "acknowledge", "acknowledge", "fill", "join", "lose")):
                case "log":
                    made.log()
                case "acknowledge" if has:
                    backup = draw.choice(list(has))
                    has[backup] = draw.randint(has[backup], made.last)
                    made.acknowledge(backup, has[backup])
                case "fill" if not any(made.stage(each) is not Stage.JOINED for each in has):
                    backup = next(each for each in "bcd" if each not in has)
                    made.fill(backup)
                    has[backup] = made.last
                case "join":
                    ready = next((each for each in has if made.stage(each) is Stage.COMPLETE), None)
                    before = None if ready is None else made.join(ready)
                    if before is not None:
                        del has[before]
                case "lose" if has:
                    backup = draw.choice(list(has))
                    made.lose(backup)
                    del has[backup]
            told = max([told, *(number for number in range(1, made.last + 1) if made.is_out(number))])
            for backup, number in has.items():
                if made.stage(backup) in (Stage.COMPLETE, Stage.JOINED):
                    assert told <= number
