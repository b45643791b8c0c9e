"""What may be told before the backup has it: tables without I/O, and all orders of events."""

from __future__ import annotations

import random

from zmqtrain.server.replication import Replication, Stage


def joined() -> Replication:
    made = Replication(3)
    made.fill("b")
    made.acknowledge("b", 3)
    made.join()
    return made


def test_alone_everything_may_be_told_at_once() -> None:
    made = Replication()
    assert made.is_out(made.log())


def test_a_backup_joins_once_it_has_all_that_was_told() -> None:
    made = Replication(3)
    made.fill("b")
    assert made.is_out(made.log())  # 4, while the state is on its way
    made.acknowledge("b", 3)
    assert made.stage is Stage.JOINING
    assert not made.is_out(made.log())  # 5
    made.acknowledge("b", 4)
    assert made.stage is Stage.COMPLETE
    assert not made.is_out(5)
    made.join()
    made.acknowledge("b", 5)
    assert made.is_out(5)


def test_what_a_lost_backup_had_not_acknowledged_is_told() -> None:
    made = joined()
    number = made.log()
    assert not made.is_out(number)
    made.lose()
    assert made.is_out(number)
    made.acknowledge("b", number)
    assert made.stage is Stage.ALONE


def test_acknowledgements_of_another_and_of_what_was_never_sent_do_not_count() -> None:
    made = joined()
    number = made.log()
    made.acknowledge("c", number)
    made.acknowledge("b", number + 1)
    assert not made.is_out(number)


def test_once_joined_nothing_was_told_that_the_backup_lacks() -> None:
    """Random histories: at any time, all that was told while a backup is in the chain is among what it has acknowledged."""
    for seed in range(300):
        draw, made = random.Random(seed), Replication()
        has, told = 0, 0
        for _ in range(60):
            match draw.choice(("log", "log", "acknowledge", "fill", "join", "lose")):
                case "log":
                    made.log()
                case "acknowledge" if made.backup is not None:
                    has = draw.randint(has, made.last)
                    made.acknowledge(made.backup, has)
                case "fill" if made.stage is Stage.ALONE:
                    made.fill("b")
                    has = made.last
                case "join" if made.stage is Stage.COMPLETE:
                    made.join()
                case "lose" if made.stage is not Stage.ALONE:
                    made.lose()
            told = max([told, *(number for number in range(1, made.last + 1) if made.is_out(number))])
            if made.stage in (Stage.COMPLETE, Stage.JOINED):
                assert told <= has
