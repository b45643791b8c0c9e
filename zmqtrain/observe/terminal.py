"""Pieces of which views on a terminal consist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zmqtrain.topology.rounded import rounded_duration


def progress_line(progress: Mapping[str, Any]) -> Table | Text:
    """A run's steps, of all, with a bar and the time left. ``progress``: `zmqtrain.observe.progress.Progress.to_dict`."""
    planned, done, left_s = progress["planned"], progress["done"], progress["left_s"]
    low, high = done or (0, 0)
    steps = f"step {low:,}" if low == high else f"step {low:,}..{high:,}"
    if planned is None:
        return Text(steps)
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    share = min(1.0, low / planned) if planned else 1.0
    left = f"  {duration(left_s)} left" if left_s else ""
    line.add_row(f"{steps} of {planned:,}", ProgressBar(total=1.0, completed=share), f"{int(100 * share)} %{left}")
    return line


def duration(seconds: float | None) -> str:
    """Seconds as people say them; unknown ones are ``"-"``."""
    if seconds is None:
        return "-"
    return rounded_duration(seconds)


def brief(value: float | None) -> str:
    """A figure with four digits."""
    if value is None:
        return "-"
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def harmless(text: str) -> str:
    """Text of others in one line, without what a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)
