"""``zmqtrain top``: a run on the terminal, while it trains and after; what ``zmqtrain dashboard`` shows in the browser."""

from __future__ import annotations

import io
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live

from zmqtrain.cli.dashboard import Processes
from zmqtrain.observe.dashboard.follow import Followed, seen
from zmqtrain.observe.dashboard.screen import Screen
from zmqtrain.observe.run_directory import find_run

#: Seconds between two looks at the run.
LOOK_S = 1.0
HINT = "q or Ctrl-C ends this view, and not the run"


def run_top(name: str) -> int:
    """Show a run until q or Ctrl-C; without a terminal its state, once. Raises `UsageError` if there is no such run."""
    run, processes = Followed(find_run(name).absolute()), Processes()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # events may have characters that the terminal's encoding lacks
    console = Console()
    if not console.is_terminal:
        state = seen(run, processes.state)
        while state["reading"]:
            state = seen(run, processes.state)
        console.print(Screen(state, run.feed(0)))
        return 0
    with suppress(KeyboardInterrupt), _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        asked = False
        while not asked:
            state = seen(run, processes.state)
            live.update(Screen(state, run.feed(0), hint=HINT), refresh=True)
            asked = "q" in _pressed(keys, 0.0 if state["reading"] else LOOK_S)
    return 0


@contextmanager
def _keys() -> Iterator[int | None]:
    """The terminal's keys, one by one and not shown; ``None`` if standard input is no terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _pressed(keys: int | None, within_s: float) -> str:
    """What was pressed, as soon as something is, or nothing when the time is over."""
    if not select.select([] if keys is None else [keys], [], [], within_s)[0]:
        return ""
    assert keys is not None
    return os.read(keys, 1024).decode(errors="replace") or "q"  # the terminal is gone
