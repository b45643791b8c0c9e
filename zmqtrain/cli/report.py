"""``zmqtrain report RUN``: one page about a run, or about several runs for comparison."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from zmqtrain.errors import UsageError
from zmqtrain.observe.report.page import page
from zmqtrain.observe.report.read import read_run
from zmqtrain.observe.run_directory import find_run, training_of
from zmqtrain.strict_json import dumps
from zmqtrain.topology.rounded import rounded_size


def run_report(names: Sequence[str], *, output: Path | None = None, json_lines: bool = False, open_it: bool = False) -> int:
    """Write the page, by default ``report.html`` in the first run's directory; with ``json_lines`` print its data instead.
    ``open_it``: show it in a browser. Raises `UsageError` if the page cannot be written."""
    paths = [find_run(name) for name in names]
    runs = [{**read_run(training_of(path)), "name": path.name} for path in paths]
    if json_lines:
        for run in runs:
            print(dumps(run))
        return 0
    target = output or paths[0] / "report.html"
    try:
        target.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error}. Choose another file with --output") from error
    for run in runs:
        for note in run["notes"]:
            print(f"{run['name']}: {note}", file=sys.stderr)
    if open_it and webbrowser.open(target.absolute().as_uri()):
        print(f"opened {target.absolute()} in a browser")
        return 0
    print(f"open {target.absolute()} in a browser ({rounded_size(target.stat().st_size)}; it needs nothing else)")
    return 0
