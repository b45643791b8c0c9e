"""What models contain of what others have trained, with gossip and with averaging: tables, and random histories against sets."""

from __future__ import annotations

import random

import pytest

from zmqtrain.data.slots import Life
from zmqtrain.errors import ProtocolError
from zmqtrain.exchange.averaging.contents import AveragedContents
from zmqtrain.exchange.contents import known_of, rows_of
from zmqtrain.exchange.gossip.contents import MOST_TOLD, MixedContents

A, B, C = ("worker/0", 1), ("worker/1", 2), ("worker/2", 3)


def test_a_partner_s_model_counts_once_all_of_it_has_come() -> None:
    mine, others = MixedContents(), MixedContents()
    mine.begin(4)
    others.begin(4)
    mine.came(B, 4, others.told(4), of=2)
    assert mine.got(B) == 0
    mine.came(B, 4, others.told(4), of=2)
    assert mine.got(B) == 5


def test_what_a_partner_had_of_others_comes_with_it() -> None:
    mine, others = MixedContents(), MixedContents()
    others.begin(3)
    others.came(C, 3, [], of=1)
    for contents in (mine, others):
        contents.begin(4)
    mine.came(B, 4, others.told(4), of=1)
    assert (mine.got(B), mine.got(C)) == (5, 4)


def test_a_model_that_is_sent_contains_nothing_of_the_same_step() -> None:
    contents = MixedContents()
    contents.begin(4)
    contents.came(C, 4, [], of=1)
    assert contents.told(4) == []
    assert contents.told(5) == [["worker/2", 3, 5]]
    contents.begin(5)
    contents.begin(6)
    contents.begin(7)
    assert (contents.got(C), contents.known()) == (5, {C: 5})


def test_a_message_tells_of_those_whose_newest_batches_are_known() -> None:
    contents = MixedContents()
    contents.begin_with({(f"worker/{rank}", rank): rank for rank in range(2 * MOST_TOLD)})
    told = contents.told(100)
    assert isinstance(told, list)
    assert [row[2] for row in told if isinstance(row, list)] == list(range(2 * MOST_TOLD - 1, MOST_TOLD - 1, -1))


def test_those_who_know_the_same_tell_the_same() -> None:
    """In whatever order they have heard of it: all of a group do."""
    first, later = MixedContents(), MixedContents()
    known = [((f"worker/{rank}", 0), 3) for rank in range(2 * MOST_TOLD)]
    first.begin_with(dict(known))
    later.begin_with(dict(reversed(known)))
    assert first.told(4) == later.told(4)


def test_gossip_against_sets_of_batches() -> None:
    """What a model is known to contain is in it, and with every message complete it is all that is in it."""
    chance = random.Random(3)
    lives: list[Life] = [(f"worker/{rank}", rank) for rank in range(6)]
    for _ in range(30):
        contents = [MixedContents() for _ in lives]
        models: list[set[tuple[int, int]]] = [set() for _ in lives]  # rank and step of each batch
        for step in range(12):
            partners = chance.sample(range(6), 6)
            for rank in range(6):
                models[rank].add((rank, step))
                contents[rank].begin(step)
            before, told = [set(model) for model in models], [each.told(step) for each in contents]
            for rank, source in enumerate(partners):
                if rank != source:
                    models[rank] |= before[source]
                    contents[rank].came(lives[source], step, told[source], of=1)
        for rank in range(6):
            for other in range(6):
                steps = {step for of, step in models[rank] if of == other}
                assert other == rank or steps == set(range(contents[rank].got(lives[other])))


def test_averages_count_once_all_buckets_have_had_one() -> None:
    contents = AveragedContents()
    contents.begin([0, 1])
    contents.averaged([0], 3, [A, B], {})
    assert contents.got(A) == 0
    contents.averaged([1], 5, [A], {})
    assert (contents.got(A), contents.got(B)) == (4, 0)
    contents.averaged([0, 1], 7, [A, C], {})
    assert contents.known() == {A: 8, B: 0, C: 8}


def test_a_copy_contains_what_the_other_model_contained() -> None:
    contents = AveragedContents()
    contents.begin([0])
    contents.begin_with({A: 6, B: 4})
    contents.averaged([0], 4, [A], {})
    assert (contents.got(A), contents.got(B)) == (6, 4)


def test_an_average_has_what_a_copy_in_it_has_begun_with() -> None:
    contents = AveragedContents()
    contents.begin([0])
    contents.averaged([0], 4, [A, C], {B: 3, A: 2})
    assert (contents.got(A), contents.got(B)) == (5, 3)


def test_what_is_sent_can_be_read_and_nothing_else() -> None:
    known = {A: 4, B: 7}
    assert known_of(rows_of(known)) == known
    assert known_of(rows_of(known, 1)) == {B: 7}
    for wrong in (None, 3, "A", [["worker/0", 1]], [["worker/0", "1", 2]], {"worker/0": 1}):
        with pytest.raises(ProtocolError, match="does not say what a model contains"):
            known_of(wrong)
