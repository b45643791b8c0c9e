"""Draws the report: one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

from zmqtrain.observe.report.figures import Json

_MARK = "/*RUNS*/"


def page(runs: Sequence[Json]) -> str:
    """The page about one run, or about several for comparison. It contains the data as JSON, and the browser draws it."""
    template = files("zmqtrain.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    # Inside a script element only the end tag could end the data, and JSON allows to escape it.
    data = json.dumps(list(runs), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    assert template.count(_MARK) == 1
    return template.replace(_MARK, data)
