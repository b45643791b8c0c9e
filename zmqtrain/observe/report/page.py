"""Draws the report: one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

from zmqtrain.observe.report.figures import Json

_MARK = "/*RUNS*/"


def page(runs: Sequence[Json]) -> str:
    """The page about one run, or several beside each other. The data is in it as JSON, the drawing is done by the browser."""
    template = files("zmqtrain.observe.report").joinpath("page.html").read_text(encoding="utf-8")
    # Inside a script element only the end tag could end the data, and JSON lets it be written otherwise.
    data = json.dumps(list(runs), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    assert template.count(_MARK) == 1
    return template.replace(_MARK, data)
