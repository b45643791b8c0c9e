"""The algebra of halos against a count of rows, one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import UsageError
from zmqtrain.parallel.geometry import (
    Count,
    Division,
    Range,
    Reach,
    Table,
    Transposed,
    Window,
    adaptive,
    checked,
    even,
    follow,
    halo_traffic,
    length,
    overlap,
    strip,
)


def rows_of(reach: Reach, row: int) -> set[int]:
    """The input rows that one output row reads, by the operation's definition."""
    if isinstance(reach, Window):
        first = row * reach.stride - reach.before
        return {first + tap * reach.dilation for tap in range(reach.kernel)} & set(range(reach.length))
    if isinstance(reach, Transposed):
        taps = range(reach.kernel)
        return {
            source
            for source in range(reach.length)
            if any(source * reach.stride - reach.padding + tap * reach.dilation == row for tap in taps)
        }
    assert isinstance(reach, Table)
    return set(range(reach.firsts[row], reach.lasts[row]))


@st.composite
def divisions(draw: st.DrawFn, rows: int, members: int) -> Division:
    """Any division, with empty strips and uneven ones."""
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=members - 1, max_size=members - 1)))
    return tuple(itertools.pairwise([0, *cuts, rows]))


@st.composite
def reaches(draw: st.DrawFn) -> Reach:
    rows = draw(st.integers(1, 24))
    kernel, stride, dilation = draw(st.integers(1, 11)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding = draw(st.integers(0, 5))
    kind = draw(st.sampled_from(["window", "transposed", "adaptive"]))
    if kind == "window":
        return Window(rows, kernel, stride, padding, draw(st.integers(0, 5)), dilation)
    if kind == "transposed":
        return Transposed(rows, kernel, stride, padding, draw(st.integers(0, 3)), dilation)
    return adaptive(rows, draw(st.integers(1, 12)))


@given(st.data())
def test_a_strip_has_what_it_needs_and_sends_what_others_need(data: st.DataObject) -> None:
    reach, members = data.draw(reaches()), data.draw(st.integers(1, 5))
    division = data.draw(divisions(reach.length, members))
    outputs = follow(reach, division) if data.draw(st.booleans()) else data.draw(divisions(reach.outputs, members))
    strips = [strip(reach, division, outputs, member) for member in range(members)]
    sent = {(part.member, each.member, part.rows) for each in strips for part in each.receives}
    assert sent == {(each.member, part.member, part.rows) for each in strips for part in each.sends}
    for each in strips:
        held = set(range(*each.own)).union(*(range(*part.rows) for part in each.receives))
        assert set(range(*each.needed)) <= held
        for part in each.receives:
            owner = division[part.member]
            assert part.member != each.member
            assert owner[0] <= part.rows[0] < part.rows[1] <= owner[1]
        assert (each.above[0], each.below[1]) == each.outputs
        assert (each.above[1], each.below[0]) == each.interior
        for row in range(*each.outputs):
            assert rows_of(reach, row) <= set(range(*each.needed))
        for row in range(*each.interior):
            assert rows_of(reach, row) <= set(range(*each.own))
        if length(each.interior) and isinstance(reach, Window) and reach.stride <= reach.kernel:
            for row in (*range(*each.above), *range(*each.below)):  # no row waits that need not
                assert not rows_of(reach, row) <= set(range(*each.own)) or reach.dilation > 1 or reach.before >= reach.kernel


@given(st.data())
def test_a_default_division_is_one_and_balanced(data: st.DataObject) -> None:
    reach, members = data.draw(reaches()), data.draw(st.integers(1, 5))
    outputs = follow(reach, even(reach.length, members))
    assert checked(outputs)[-1][1] == reach.outputs
    assert len(outputs) == members
    if isinstance(reach, Window) and reach.before == reach.after == reach.extent // 2 and reach.extent % 2:
        assert max(map(length, outputs)) <= -(-reach.outputs // members) + 1


@pytest.mark.parametrize("members", [2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "kernel", "stride", "padding"), [(227, 11, 4, 0), (224, 11, 4, 2), (55, 3, 2, 0), (56, 3, 1, 1)])
def test_k_minus_s_rows_cross_a_cut(rows: int, kernel: int, stride: int, padding: int, members: int) -> None:
    reach = Window(rows, kernel, stride, padding, padding)
    division = even(rows, members)
    outputs = follow(reach, division)
    for member, (_, cut) in enumerate(division[:-1]):
        above = max(0, reach.needs(outputs[member])[1] - cut)
        below = max(0, cut - reach.needs(outputs[member + 1])[0])
        assert above + below == kernel - stride, (cut, outputs)
    assert max(map(length, outputs)) - min(map(length, outputs)) <= 2
    traffic = halo_traffic(reach, division, outputs, 10)
    assert sum(count.nbytes for count in traffic["forward"]) == 10 * (kernel - stride) * (members - 1)
    assert sum(count.nbytes for count in traffic["backward"]) == 10 * (kernel - stride) * (members - 1)


def alexnet() -> list[Window]:
    """Convolution and pooling of AlexNet on 227 x 227."""
    shapes = [(11, 4, 0), (3, 2, 0), (5, 1, 2), (3, 2, 0), (3, 1, 1), (3, 1, 1), (3, 1, 1), (3, 2, 0)]
    reaches, rows = [], 227
    for kernel, stride, padding in shapes:
        reaches.append(Window(rows, kernel, stride, padding, padding))
        rows = reaches[-1].outputs
    assert rows == 6
    return reaches


@pytest.mark.parametrize("members", [2, 4, 8])
def test_alexnet_stays_balanced_to_its_end(members: int) -> None:
    division = even(227, members)
    for reach in alexnet():
        division = follow(reach, division)
        assert max(map(length, division)) <= -(-reach.outputs // members) + 1, (reach, division)


def test_no_row_crosses_for_1x1_and_for_2x2_pooling_of_even_strips() -> None:
    for reach in (Window(12, 1), Window(12, 2, 2), Window(12, 1, 3)):
        division = even(12, 3)
        assert halo_traffic(reach, division, follow(reach, division), 8)["forward"] == (Count(0, 0),) * 3


def test_a_halo_longer_than_the_next_strip_comes_from_further_away() -> None:
    reach = Window(5, 7, 1, 3, 3)
    middle = strip(reach, even(5, 5), even(5, 5), 2)
    assert [(part.member, part.rows) for part in middle.receives] == [(0, (0, 1)), (1, (1, 2)), (3, (3, 4)), (4, (4, 5))]
    assert length(middle.interior) == 0
    assert middle.rims == ((2, 3),)


def test_negative_halos_and_strips_of_no_rows() -> None:
    reach = Window(9, 1, 3)  # rows 0, 3 and 6 are needed
    assert strip(reach, ((0, 2), (2, 9)), ((0, 1), (1, 3)), 1).needed == (3, 7)
    elsewhere = strip(reach, ((0, 2), (2, 9)), ((0, 3), (3, 3)), 0)
    assert [(part.member, part.rows) for part in elsewhere.receives] == [(1, (2, 7))]
    idle = strip(reach, ((0, 9), (9, 9)), ((0, 2), (2, 3)), 1)
    assert [(part.member, part.rows) for part in idle.receives] == [(0, (6, 7))]
    assert idle.interior == (3, 3)


def test_uneven_strips_stay_uneven_in_proportion() -> None:
    division: Division = ((0, 60), (60, 80))
    assert follow(Window(80, 3, 2, 1, 1), division) == ((0, 30), (30, 40))
    assert follow(Window(80, 3, 1, 1, 1), division) == division
    assert follow(Transposed(80, 4, 2, 1), division) == ((0, 120), (120, 160))


def test_padding_is_supplied_at_the_edges_only() -> None:
    reach = Window(10, 5, 2, 2, 2)
    assert [reach.padding((row, row + 1)) for row in range(reach.outputs)] == [(2, 0), (0, 0), (0, 0), (0, 0), (0, 1)]
    assert Window(2, 1, 3, 5, 5).padding((0, 1)) == (1, 0)
    assert Window(2, 1, 3, 5, 5).padding((3, 4)) == (0, 1)
    assert Window(2, 7, 1, 3, 3).padding((0, 2)) == (3, 3)


def test_windows_may_stand_out_where_they_may() -> None:
    assert Window(6, 3, 2).outputs == 2
    assert Window(6, 3, 2, ceil=True).outputs == 3
    assert Window(5, 1, 3, 0, 0, ceil=True).outputs == 2, "a third window would begin beyond the image"


def test_traffic_of_the_first_layer_and_of_nothing() -> None:
    reach, division = Window(8, 3, 1, 1, 1), even(8, 2)
    traffic = halo_traffic(reach, division, follow(reach, division), 100, input_gradient=False)
    assert traffic["forward"] == (Count(1, 100), Count(1, 100))
    assert traffic["backward"] == (Count(0, 0), Count(0, 0))
    assert halo_traffic(reach, division, division, 0)["forward"] == (Count(0, 0), Count(0, 0))


def test_what_is_no_division() -> None:
    for division in ((), ((1, 2),), ((0, 2), (3, 4)), ((0, 2), (2, 1))):
        with pytest.raises(UsageError, match="division"):
            checked(division)
    assert checked(((0, 0), (0, 4), (4, 4))) == ((0, 0), (0, 4), (4, 4))


@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_overlap(one: Range, other: Range) -> None:
    common = overlap(one, other)
    assert set(range(*common)) == set(range(*one)) & set(range(*other))
    assert length(common) >= 0
