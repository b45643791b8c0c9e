"""Matrices of tests of which not all combinations run: any two values of different parameters meet in one test at least.

What breaks a combination of three values breaks, nearly always, a pair of them, too; and a matrix of 90 has all pairs in 15.
Where the code asks for three things at once, a test beside the matrix has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def rows(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Combinations of values, as their numbers, in which all pairs occur; the same in each process.

    Args:
        counts: how many values each parameter has.
    """
    left = {
        (one, first, other, second)
        for one, other in combinations(range(len(counts)), 2)
        for first, second in product(range(counts[one]), range(counts[other]))
    }
    found: list[tuple[int, ...]] = []
    while left:
        one, first, other, second = min(left)
        row = {one: first, other: second}
        for parameter in range(len(counts)):
            if parameter not in row:
                row[parameter] = max(range(counts[parameter]), key=lambda value: _new(left, row, parameter, value))
        found.append(tuple(row[parameter] for parameter in range(len(counts))))
        left -= {(one, row[one], other, row[other]) for one, other in combinations(range(len(counts)), 2)}
    return found


def _new(left: set[tuple[int, int, int, int]], row: Mapping[int, int], parameter: int, value: int) -> int:
    """How many pairs that are left a row would have, if the parameter had this value."""
    return sum((min(each, (parameter, value)) + max(each, (parameter, value))) in left for each in row.items())


def pairwise(parameters: Mapping[str, Sequence[Any] | Mapping[str, Any]]) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize` of each, but only as many combinations as all pairs need.

    Args:
        parameters: names, as `parametrize` takes them ("groups, size" takes pairs), and values; of a mapping, the keys name them.
    """
    names = [[name.strip() for name in each.split(",")] for each in parameters]
    values = [
        list(each.items()) if isinstance(each, Mapping) else [(_id(one), one) for one in each] for each in parameters.values()
    ]
    cases = []
    for row in rows([len(each) for each in values]):
        chosen = [values[parameter][value] for parameter, value in enumerate(row)]
        given = [one for (_, value), own in zip(chosen, names, strict=True) for one in (value if len(own) > 1 else [value])]
        cases.append(pytest.param(*given, id="-".join(text for text, _ in chosen)))
    return pytest.mark.parametrize([name for own in names for name in own], cases)


def _id(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
