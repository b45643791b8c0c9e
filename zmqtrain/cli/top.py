"""``zmqtrain top``: runs on the terminal, while they train and after; what ``zmqtrain dashboard`` shows in the browser."""

from __future__ import annotations

import io
import sys

from rich.console import Console

from zmqtrain.cli.dashboard import Processes, folder_of
from zmqtrain.errors import UsageError
from zmqtrain.observe.dashboard.follow import Followed, seen
from zmqtrain.observe.dashboard.screen import Screen
from zmqtrain.observe.run_directory import latest_run


def run_top(name: str) -> int:
    """Show a run, or the newest of a folder, until q or Ctrl-C; without a terminal its state, once. Raises `UsageError` if there
    is no such run."""
    folder, run = folder_of(name)
    path = folder / run if run else latest_run(folder)
    if path is None:
        raise UsageError(f"{folder} contains no runs")
    if sys.stdin.isatty() and sys.stdout.isatty():
        from zmqtrain.observe.dashboard.app import Top

        Top(folder, run, Processes()).run()
        return 0
    processes = Processes()
    followed = Followed(path)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # events may have characters that the terminal's encoding lacks
    state = seen(followed, processes.state)
    while state["reading"]:
        state = seen(followed, processes.state)
    Console().print(Screen(state, followed.feed(0)))
    return 0
