"""Pictures as self-contained SVG: elements, the frame of a plot, and keys of a legend. Coordinates are pixels, from the top left.

The report draws in the browser, with its page's own script, because a reader moves about in its plots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TypeAlias

Attributes: TypeAlias = dict[str, float | str | None]

#: Okabe and Ito's, which the colour-blind can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
#: Levels of a vertical axis, as shares of its height.
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Picture(str):
    """A picture: the text of its SVG. Notebooks show it, and `save` writes it to a file."""

    def save(self, file: str | PathLike[str]) -> None:
        """Write it to a file, whose name should end in ``.svg``."""
        Path(file).write_text(self, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"<picture, {len(self):,} characters of SVG: notebooks show it, and .save('picture.svg') writes it>"


@dataclass(frozen=True, slots=True)
class Frame:
    """The edges of the rectangle in which a plot's values lie."""

    left: float
    top: float
    right: float
    bottom: float

    def x(self, share: float) -> float:
        """``share`` of the width, from the left."""
        return self.left + share * (self.right - self.left)

    def y(self, share: float) -> float:
        """``share`` of the height, from the bottom."""
        return self.bottom - share * (self.bottom - self.top)

    def levels(self, labels: Iterable[tuple[float, str]]) -> list[str]:
        """The vertical axis: a line across the frame at each (share of the height, label)."""
        heights = [(self.y(share), label) for share, label in labels]
        return [line(self.left, y, self.right, y, "#dddddd", 1) + text(self.left - 6, y + 4, label, "end") for y, label in heights]


def picture(title: str, width: float, height: float, parts: Iterable[str], *, font_size: int = 12) -> Picture:
    """The document: the parts on white, in their order. ``title``: for those who cannot see it; it is not drawn."""
    content = "\n".join(["", bar(0, 0, width, height, "white"), *parts, ""])
    size: Attributes = {"viewBox": f"0 0 {_number(width)} {_number(height)}", "width": width, "font-size": font_size}
    names = {
        "xmlns": "http://www.w3.org/2000/svg",
        "role": "img",
        "aria-label": title,
        "font-family": "sans-serif",
        "fill": "#333333",
    }
    return Picture(_element("svg", content, **names, **size) + "\n")


def text(
    x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False, size: int | None = None, turned: int = 0
) -> str:
    """Words whose ``anchor`` (start, middle or end) is at (x, y), on the base line, ``turned`` clockwise by these degrees."""
    turn = f"rotate({turned} {_number(x)} {_number(y)})" if turned else None
    more: Attributes = {"font-weight": "bold" if bold else None, "font-size": size, "transform": turn}
    return _element("text", escape(words), x=x, y=y, **{"text-anchor": anchor}, **more)


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 2) -> str:
    """The SVG element of a straight line."""
    return _element("line", "", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, **{"stroke-width": width})


def curve(points: Iterable[tuple[float, float]], colour: str) -> str:
    """Straight lines from each (x, y) to the next."""
    along = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return _element("polyline", "", points=along, fill="none", stroke=colour, **{"stroke-width": 2})


def dot(x: float, y: float, colour: str, radius: float = 3.5) -> str:
    """The SVG element of a filled circle."""
    return _element("circle", "", cx=x, cy=y, r=radius, fill=colour)


def bar(x: float, y: float, width: float, height: float, fill: str, *, says: str = "", edge: str | None = None) -> str:
    """A rectangle, paler inside where it has an ``edge``. ``says`` is shown where the mouse is over it."""
    title = _element("title", escape(says)) if says else ""
    look: Attributes = {"fill": fill, "fill-opacity": 0.6 if edge else None, "stroke": edge}
    return _element("rect", title, x=x, y=y, width=width, height=height, **look)


def colour_key(x: float, y: float, colour: str, words: str) -> str:
    """An entry of a legend: a coloured square, and words on the base line ``y``."""
    return bar(x, y - 9, 10, 10, colour) + text(x + 14, y, words)


def line_key(x: float, y: float, colour: str, words: str) -> str:
    """An entry of a legend: a short coloured line at ``y``, and words."""
    return line(x, y, x + 20, y, colour) + text(x + 26, y + 4, words)


def _element(tag: str, content: str, /, **attributes: float | str | None) -> str:
    """``content`` is SVG already. Attributes that are None are left out."""
    given = {name: _number(value) if isinstance(value, int | float) else value for name, value in attributes.items()}
    named = "".join(f' {name}="{escape(value)}"' for name, value in given.items() if value is not None)
    return f"<{tag}{named}>{content}</{tag}>" if content else f"<{tag}{named}/>"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
