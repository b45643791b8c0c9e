"""Panels of curves; tests/plan/test_alternatives.py has those of bars."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

from zmqtrain.charts import Curve, Curves, draw

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*curves: Curve, from_zero: bool = False) -> list[list[list[float]]]:
    """The points of each line."""
    root = ElementTree.fromstring(draw("a & b", [Curves("panel", "step", curves, str, from_zero=from_zero)]))
    lines = [each.attrib["points"].split() for each in root.iter(f"{SVG}polyline")]
    return [[[float(part) for part in point.split(",")] for point in line] for line in lines]


def test_curves_share_their_axes() -> None:
    first, second = drawn(Curve("a", [0, 10], [1.0, 3.0]), Curve("b", [0, 5, 10], [2.0, math.nan, 3.0]))
    assert first[1] == second[1], "the same point"
    assert (first[0][0], len(second)) == (second[0][0], 2), "a value that is no number is left out"
    assert second[0][1] == (first[0][1] + first[1][1]) / 2, "half way"


def test_few_points_and_none() -> None:
    assert (
        drawn(Curve("flat", [0, 1], [2.0, 2.0]))[0][0][1]
        == drawn(
            Curve(
                "flat",
                [0, 1],
                [0.0, 0.0],
            )
        )[0][0][1]
        - 110
    )
    assert drawn(Curve("one", [3], [2.0])) == []
    assert drawn(Curve("none", [], [])) == drawn() == []
    assert draw("no panel", []).endswith("</svg>\n")


def test_a_picture_is_text_that_notebooks_show(tmp_path: Path) -> None:
    picture = draw("title", [Curves("panel", "step", (), str)])
    picture.save(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text() == picture == picture._repr_svg_()
    assert "<svg" not in repr(picture), "a prompt does not fill with it"
