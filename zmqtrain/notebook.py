"""What notebooks show: tables, and an output that changes. IPython is used if the program has imported it, and never imported."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Protocol


class Card(Protocol):
    """Something that notebooks can show."""

    def __repr__(self) -> str: ...

    def _repr_html_(self) -> str: ...


def in_notebook() -> bool:
    """Whether this program is the kernel of a notebook."""
    shell = _shell()
    return shell is not None and getattr(shell, "kernel", None) is not None


class Output:
    """A place in the notebook, below the cell that is running, whose content can be replaced from any thread."""

    def __init__(self, card: Card) -> None:
        """``card``: what it shows first. Only if `in_notebook`."""
        from IPython.display import display

        self._handle: Any = display(card, display_id=True)

    def show(self, card: Card) -> None:
        """Replace the displayed card."""
        self._handle.update(card)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of text."""
    head = "".join(f"<th>{escape(each)}</th>" for each in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def paragraph(text: str, *, bold: bool = False) -> str:
    """An HTML paragraph of text."""
    return f"<p><b>{escape(text)}</b></p>" if bold else f"<p>{escape(text)}</p>"


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
