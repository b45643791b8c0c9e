"""Which layer's grid is the main one of a plan, for topology files, the planner and models alike."""

from __future__ import annotations


def divides(choice: str, rows: int) -> bool:
    """Whether the rows of a grid compute a layer together.

    The grid of the first such layer is the plan's main one: its columns say which samples each worker has, and its rows are put on
    hosts one after another.

    Args:
        choice: how the layer is divided, ``model``, ``domain``, ``whole`` or ``batch``.
        rows: of its grid.
    """
    return choice != "batch" and rows > 1
