"""Tables as all commands print them."""

from __future__ import annotations

from typing import Literal

from rich.table import Table


def table_of(*headings: str, overflow: Literal["fold", "ellipsis"] = "fold") -> Table:
    """A table with these headings and no rows. ``>`` before a heading aligns its column to the right, for numbers. ``overflow``:
    what to do with text that is too long."""
    made = Table(box=None, header_style="dim")
    for heading in headings:
        made.add_column(heading.lstrip(">"), justify="right" if heading.startswith(">") else "left", overflow=overflow)
    return made
