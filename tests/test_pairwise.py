"""All pairs of values occur, in few rows."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairwise import pairwise, rows


@pytest.mark.parametrize(
    ("counts", "most"), [((2,) * 3, 6), ((5, 3, 3, 2), 17), ((4, 4, 3), 17), ((3, 3), 9), ((2,) * 8, 10), ((16, 2, 3), 50)]
)
def test_all_pairs_occur_in_few_rows(counts: tuple[int, ...], most: int) -> None:
    found = rows(counts)
    for one, other in combinations(range(len(counts)), 2):
        assert {(row[one], row[other]) for row in found} == set(product(range(counts[one]), range(counts[other])))
    assert len(found) == len(set(found)) <= most


def test_values_and_names_are_those_that_were_given() -> None:
    mark = pairwise({"groups, size": [(1, 2), (3, 4)], "kind": {"a name": {"kind": 1}}, "flag": [True, False]}).mark
    assert mark.args[0] == ["groups", "size", "kind", "flag"]
    assert sorted(case.id for case in mark.args[1]) == [
        "1-2-a name-False",
        "1-2-a name-True",
        "3-4-a name-False",
        "3-4-a name-True",
    ]
    assert all(case.values[2] == {"kind": 1} for case in mark.args[1])
