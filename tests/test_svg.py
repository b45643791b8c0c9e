"""Pictures are well-formed whatever their texts are, and values lie where the frame says."""

from __future__ import annotations

from xml.etree import ElementTree

from zmqtrain import svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_texts_stay_what_they_are() -> None:
    words = 'a < b & "c"'
    parts = [svg.text(1, 2, words), svg.bar(0, 0, 1, 1, words, says=words), svg.colour_key(0, 0, "red", words)]
    root = ElementTree.fromstring(svg.picture(words, 10, 20, parts))
    assert [each.text for each in root.iter(f"{NAMESPACE}title")] == [words]
    assert [each.text for each in root.iter(f"{NAMESPACE}text")] == [words, words]
    assert words in [each.get("fill") for each in root.iter(f"{NAMESPACE}rect")]
    assert (root.get("aria-label"), root.get("viewBox")) == (words, "0 0 10 20")


def test_a_frame_counts_from_the_bottom_left() -> None:
    frame = svg.Frame(10, 20, 110, 220)
    assert (frame.x(0), frame.x(0.5), frame.y(0), frame.y(0.25)) == (10, 60, 220, 170)
    (level,) = frame.levels([(0.25, "a quarter")])
    root = ElementTree.fromstring(svg.picture("levels", 120, 240, [level]))
    (line,) = root.iter(f"{NAMESPACE}line")
    assert (line.get("x1"), line.get("x2"), line.get("y1"), line.get("y2")) == ("10", "110", "170", "170")
    assert root.find(f"{NAMESPACE}text").text == "a quarter"  # type: ignore[union-attr]
