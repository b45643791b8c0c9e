from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.net.outbox import BULK, CONTROL, Outbox, Outgoing
from zmqtrain.wire.message import describe
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.value import ValuePayload

CHUNK = 100


def message(name: str, nbytes: int, priority: int = 0, *, number: int = 0, control: bool = False) -> Outgoing:
    payload = PhantomPayload(nbytes, "uint8") if nbytes else ValuePayload(name)
    header, frames = describe(payload, (name, number))
    return Outgoing(header, frames, priority, control=control)


def names(outbox: Outbox, *, credit: bool = True, lane: int = BULK) -> list[str]:
    """Everything that the lane gives, a name a piece; an empty piece that announces a phantom is left out."""
    found = []
    sequence = 0
    while (best := outbox.next(lane, credit=credit)) is not None:
        _, _, size = outbox.cut(best, sequence)
        outbox.acknowledged(best)
        sequence += 1
        if size or lane == CONTROL:
            found.append(str(best.tag[0]))
    return found


def test_urgent_messages_go_first_and_equal_ones_in_order() -> None:
    outbox = Outbox(10_000, CHUNK)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5)):
        outbox.put(message(name, 150, priority))
    assert names(outbox) == ["b", "b", "d", "d", "a", "a", "c", "c"]
    assert not outbox
    assert outbox.queued_bytes == 0


def test_a_more_urgent_one_goes_between_the_pieces_of_another() -> None:
    outbox = Outbox(10_000, CHUNK)
    slow = message("slow", 300)
    outbox.put(slow)
    outbox.cut(slow, 0)
    outbox.cut(slow, 1)
    outbox.put(message("urgent", 100, 1))
    assert names(outbox) == ["urgent", "slow", "slow"]


def test_one_tag_keeps_its_order_whatever_the_priority() -> None:
    outbox = Outbox(10_000, CHUNK)
    first, second = message("x", 100, 0), message("x", 100, 9)
    outbox.put(first)
    outbox.put(second)
    assert outbox.next(BULK, credit=True) is first


def test_a_value_does_not_overtake_the_tensor_of_its_tag() -> None:
    outbox = Outbox(10_000, CHUNK)
    outbox.put(message("x", 100))
    outbox.put(message("x", 0))
    assert outbox.next(CONTROL, credit=True) is None
    outbox.put(message("y", 0))
    assert names(outbox, lane=CONTROL) == ["y"]


def test_a_tensor_may_go_over_the_control_lane() -> None:
    outbox = Outbox(10_000, CHUNK)
    outbox.put(message("large", 50))
    outbox.put(message("small", 50, control=True))
    assert names(outbox, lane=CONTROL) == ["small"]
    assert names(outbox) == ["large"]


def test_such_a_tensor_keeps_its_place_among_those_of_its_tag() -> None:
    outbox = Outbox(10_000, CHUNK)
    for control in (False, True, False):
        outbox.put(message("x", 50, control=control))
    assert outbox.next(CONTROL, credit=True) is None
    assert names(outbox) == ["x", "x", "x"]
    small, large = message("y", 50, control=True), message("y", 50)
    outbox.put(small)
    outbox.put(large)
    outbox.cut(small, 0)
    assert outbox.next(BULK, credit=True) is None  # until the small one has arrived
    outbox.acknowledged(small)
    assert outbox.next(BULK, credit=True) is large


def test_only_so_many_bytes_are_admitted() -> None:
    outbox = Outbox(250, CHUNK)
    all_of_them = [message("m", 100, number=number) for number in range(4)]
    admitted: list[int] = []
    for number, one in enumerate(all_of_them):
        one.on_admitted = lambda number=number: admitted.append(number)  # type: ignore[misc]
        outbox.put(one)
    assert [one.admitted for one in all_of_them] == [True, True, False, False]
    outbox.cut(all_of_them[0], 0)
    assert all_of_them[2].admitted
    assert admitted == [0, 1, 2]


def test_what_has_not_begun_can_be_taken_back() -> None:
    outbox = Outbox(10_000, CHUNK)
    begun, waiting, behind = message("x", 200), message("y", 100), message("y", 100)
    for one in (begun, waiting, behind):
        outbox.put(one)
    outbox.cut(begun, 0)
    assert not outbox.cancel(begun)
    assert outbox.cancel(waiting)
    assert waiting.released
    assert names(outbox) == ["x", "x", "y"]


def test_what_is_wanted_needs_no_credit() -> None:
    outbox = Outbox(10_000, CHUNK)
    for name in ("a", "b"):
        outbox.put(message(name, 100))
    assert outbox.next(BULK, credit=False) is None
    outbox.want(("b", 0))
    assert names(outbox, credit=False) == ["b"]
    outbox.want(("c", 0))  # before there is such a message
    outbox.put(message("c", 100))
    assert names(outbox, credit=False) == ["c"]
    outbox.want("a")  # any of a topic
    assert names(outbox, credit=False) == ["a"]


def test_memory_is_released_when_the_last_piece_has_arrived() -> None:
    outbox = Outbox(10_000, CHUNK)
    one = message("x", 150)
    heard: list[bool] = []
    one.on_released = lambda: heard.append(True)
    outbox.put(one)
    sequence = 0
    while outbox.next(BULK, credit=True) is not None:
        outbox.cut(one, sequence)
        sequence += 1
    for _ in range(sequence - 1):
        outbox.acknowledged(one)
        assert not one.released
    outbox.acknowledged(one)
    assert one.released
    assert heard == [True]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 350), st.integers(-1, 1)), max_size=12))
def test_everything_goes_once_and_each_tag_in_order(puts: list[tuple[str, int, int]]) -> None:
    outbox = Outbox(500, CHUNK)
    order: dict[str, list[Outgoing]] = {}
    for name, nbytes, priority in puts:
        one = message(name, nbytes, priority)
        order.setdefault(name, []).append(one)
        outbox.put(one)
    done: dict[str, list[Outgoing]] = {}
    for sequence in range(1000):
        best = next((one for lane in (CONTROL, BULK) if (one := outbox.next(lane, credit=True)) is not None), None)
        if best is None:
            break
        outbox.cut(best, sequence)
        outbox.acknowledged(best)
        if best.finished:
            done.setdefault(str(best.tag[0]), []).append(best)
    assert done == order
    assert not outbox
    assert outbox.queued_bytes == 0
