"""Groups in each other's way: NICs that are shared, lines, and rounds of whole groups."""

from __future__ import annotations

import random

import pytest

from zmqtrain.plan.contention import Fc, GroupWork, Shared, update_s
from zmqtrain.plan.overlapped import BucketWay, LayerLoad, buckets_of, cycle_s
from zmqtrain.plan.queues import Life, Line, Nic, Queues
from zmqtrain.plan.variation import Variation

LOADS = [LayerLoad(str(number), 100.0, 1.0, 2.0) for number in range(4)]
BUCKETS = buckets_of(LOADS, 100)


def once(chance: random.Random) -> float:
    return 1.0


def test_who_uses_a_nic_at_the_same_time_shares_it() -> None:
    queues, ends = Queues(), {}
    nic = Nic(queues)

    def flow(name: str, begins: float, nbytes: float, alone: float) -> Life:
        yield queues.sleep(begins)
        yield nic.carry(nbytes, alone, 1.0)
        ends[name] = queues.now

    # Alone for 2, then two with half each; a third is slower by itself than its share.
    for each in (("first", 0.0, 4.0, 1.0), ("second", 2.0, 4.0, 1.0), ("slow", 20.0, 2.0, 3.0), ("quick", 20.0, 2.0, 1.0)):
        queues.start(flow(*each))
    queues.run()
    assert ends == {"first": 6.0, "second": 8.0, "quick": 24.0, "slow": 26.0}


def test_a_line_has_one_at_a_time_and_the_lowest_rank_next() -> None:
    queues, order = Queues(), []
    line = Line(queues)

    def life(name: str, rank: int) -> Life:
        yield from line.taken(rank, queues.sleep(1.0))
        order.append((name, queues.now))

    for name, rank in (("a", 5), ("b", 2), ("c", 1), ("d", 2)):
        queues.start(life(name, rank))
    queues.run()
    assert order == [("a", 1.0), ("c", 2.0), ("b", 3.0), ("d", 4.0)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "way",
    [
        BucketWay(),
        BucketWay(push_byte_s=0.01, read_byte_s=0.01, latency_s=0.5),
        BucketWay(ring_byte_s=0.01, push_byte_s=0.02, read_byte_s=0.02),
    ],
    ids=["free", "there and back", "ring"],
)
def test_one_group_alone_takes_its_path(way: BucketWay, overlap: bool) -> None:
    shared = Shared(way.push_byte_s)
    alone = update_s([GroupWork(LOADS, BUCKETS, way, overlap=overlap)], shared, once)
    assert alone == pytest.approx(cycle_s(LOADS, way, BUCKETS, overlap=overlap))


def test_groups_whose_cards_are_free_do_not_wait() -> None:
    work = GroupWork(LOADS, BUCKETS, BucketWay(push_byte_s=0.001, read_byte_s=0.001))
    alone = update_s([work], Shared(0.0), once)
    assert update_s([work] * 4, Shared(0.0), once) == pytest.approx(alone / 4)


def test_a_nic_that_is_always_busy_limits() -> None:
    """Four groups, 400 bytes each: however they arrange themselves, an update takes as long as its bytes do."""
    work = GroupWork(LOADS, BUCKETS, BucketWay(push_byte_s=0.04, read_byte_s=0.04))
    varies = Variation("normal", 0.1)
    found = update_s([work] * 4, Shared(0.04), lambda chance: varies.draw(chance, 1))
    assert 0.99 * 16.0 < found < 1.2 * 16.0


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_the_law_of_a_merged_fc_server(groups: int) -> None:
    """With constant times and a free network: HE(g) = max(t_fc, (t_conv + t_fc) / g)."""
    work = GroupWork(LOADS, BUCKETS, BucketWay(), Fc(3.0, 10.0, 0.0))
    assert update_s([work] * groups, Shared(), once) == pytest.approx(max(3.0, (12.0 + 3.0) / groups), rel=0.02)


@pytest.mark.parametrize(("depth", "seconds"), [(1, 15.0), (2, 12.0), (3, 12.0)])
def test_groups_on_the_same_slots_compute_while_others_wait(depth: int, seconds: float) -> None:
    """t_conv = 12 and t_fc = 3, on one slot: their sum with one group, the larger of both with two."""
    work = GroupWork(LOADS, BUCKETS, BucketWay(), Fc(3.0, 10.0, 0.0))
    assert update_s([work], Shared(), once, depth) == pytest.approx(seconds, rel=0.02)


def test_the_next_turn_begins_after_the_update_and_the_answer_before() -> None:
    fc = Fc(3.0, 10.0, 0.0, tell_s=1.0, exchange_s=2.0, update_s=4.0)
    assert fc.path_s == 6.0
    alone, two = (update_s([GroupWork(LOADS, BUCKETS, BucketWay(), fc)] * groups, Shared(), once) for groups in (1, 8))
    assert alone == pytest.approx(12.0 + 6.0)
    assert two == pytest.approx(6.0 + 4.0, rel=0.05)
