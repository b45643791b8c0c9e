"""A run for programs and notebooks: lines of text, HTML, and a picture.

A ``state`` is `RunState.to_dict` with the run's ``name`` and ``status``, as `zmqtrain.observe.dashboard.follow.seen` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from zmqtrain.charts import Bar, Bars, Curve, Curves, draw
from zmqtrain.notebook import paragraph
from zmqtrain.observe.dashboard.screen import alarms, figures
from zmqtrain.observe.dashboard.state import Json
from zmqtrain.observe.terminal import brief, duration
from zmqtrain.svg import Picture
from zmqtrain.topology.rounded import rounded_time

#: A step's parts in pictures, from the bottom up.
PARTS = {"compute": "#0072b2", "exposed communication": "#d55e00", "other waits": "#bbbbbb"}
_NAMES = dict(zip(("compute", "exposed", "other"), PARTS, strict=True))
#: The most workers with a bar, and the most metrics with curves.
MOST_WORKERS, MOST_METRICS = 64, 4


def picture(state: Json) -> Picture:
    """Curves of the loss, the metrics and the parts of a step, and the newest steps of each worker, as far as they are known."""
    panels: list[Bars | Curves] = []
    if state["loss"]["value"]:
        groups = [_curve(f"group {group}", curve) for group, curve in state["group_loss"].items()]
        panels.append(Curves("loss", "step", (_curve("mean", state["loss"]), *groups), brief))
    for name, curve in list(state["eval"].items())[:MOST_METRICS]:
        panels.append(Curves(f"evaluation: {name}", "step", (_curve(name, curve),), brief))
    split = tuple(_curve(_NAMES[name], curve) for name, curve in state["split"].items() if curve["value"])
    if split:
        panels.append(Curves("parts of a step, mean of the workers", "step", split, rounded_time, PARTS, from_zero=True))
    workers = state["workers"][:MOST_WORKERS]
    if workers:
        bars = tuple(Bar(worker["peer"], {_NAMES[name]: worker["means"].get(name, 0.0) for name in _NAMES}) for worker in workers)
        more = len(state["workers"]) - len(workers)
        said = f" (the first {len(workers)} of {len(workers) + more})" if more else ""
        panels.append(Bars(f"the newest steps of each worker{said}", bars, PARTS, rounded_time))
    return draw(str(state["name"]), panels)


def lines(state: Json) -> list[str]:
    """The run in a few lines of text."""
    return [f"{state['name']}: {state['status']['status']}", _progress(state), ", ".join(figures(state)), *alarms(state)]


def html(state: Json, *, said: str = "") -> str:
    """The run with a bar of its progress and its picture. ``said``: its newest lines."""
    (done, _), planned = state["done"] or (0, 0), state["planned"]
    bar = f'<progress max="{planned}" value="{done}" style="width: 24em"></progress>' if planned else ""
    title, *told = lines(state)
    last = f"<pre>{escape(said)}</pre>" if said else ""
    drawn = picture(state) if state["workers"] else ""
    return "".join((paragraph(title, bold=True), bar, *map(paragraph, told), last, drawn))


def _progress(state: Json) -> str:
    low, high = state["done"] or (0, 0)
    steps = f"{low:,}" if low == high else f"{low:,}..{high:,}"
    of = "" if state["planned"] is None else f" of {state['planned']:,}"
    left = f", {duration(state['left_s'])} left" if state["left_s"] else ""
    return f"step {steps}{of}{left}"


def _curve(label: str, curve: Mapping[str, Any]) -> Curve:
    return Curve(label, curve["step"], curve["value"])
