"""What the page shows, for a terminal: the same figures, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from zmqtrain.observe.dashboard.state import Json
from zmqtrain.observe.terminal import brief, duration, harmless, progress_line
from zmqtrain.words import counted

#: Events where the height is not limited, and the least where it is and has room for them: workers come first.
MOST_EVENTS, LEAST_EVENTS = 10, 3
#: The newest results of a search.
MOST_TRIALS = 5
#: The parts of a step: how each is drawn with a terminal's characters, with plain ones, and its colour.
PARTS = {"compute": ("█", "#", "green"), "exposed": ("▒", "=", "red"), "other": ("░", ".", "yellow")}
#: The width from which on a worker's group, samples/s and health have columns, too.
WIDE = 120
_BAR, _WIDE_BAR = 22, 32
_HEIGHTS, _CURVE = "▁▂▃▄▅▆▇█", 40
_COLOURS = {"running": "green", "done": "blue", "failed": "red", "lost": "red", "halted": "red"}


class Screen:
    """A run's state (`zmqtrain.observe.dashboard.follow.seen`) and its newest events, as wide as the console, and as high at most
    if that has a height."""

    def __init__(self, state: Json, feed: Sequence[Json], *, titled: bool = True) -> None:
        """``titled``: begin with the run's name and what it is."""
        self._state, self._feed, self._titled = state, feed, titled

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = options.ascii_only
        head = Group(*([title(self._state)] if self._titled else []), *_head(self._state, plain=plain))
        wide, workers = options.max_width >= WIDE, self._state["workers"]
        events = MOST_EVENTS
        rows: int | None = None
        if options.height is not None:
            taken = len(console.render_lines(head, options.update(height=None)))
            room = max(0, options.height - taken - (1 if workers else 0) - 1)  # the headings
            least = LEAST_EVENTS if room >= 2 * LEAST_EVENTS else 0
            rows = max(1, min(len(workers), room - least))
            rows = rows - 1 if rows < len(workers) else rows  # a line says how many there are besides
            events = max(0, room - min(len(workers), rows + 1))
        yield head
        if workers:
            yield workers_table(self._state, rows, wide=wide, plain=plain)
        if events:
            yield events_table(self._feed[-events:])


def title(state: Json) -> Text:
    """The run's name, what became of it, and what it is."""
    status = str(state["status"].get("status"))
    return line(str(state["name"]), style="bold").append(f"  {status}", style=_COLOURS.get(status, "")).append(f"  {_about(state)}")


def _head(state: Json, *, plain: bool) -> Iterator[RenderableType]:
    running = state["status"].get("status") == "running"
    if state["workers"] or not state["search"]:  # a search has none while its trials are simulated, and between two of them
        yield progress_line({**state, "left_s": state["left_s"] if running else None})
        yield line("  ".join(figures(state)))
    if not plain and len(state["loss"]["value"]) > 1:
        yield line("loss  ").append(_curve(state["loss"]["value"]), style="cyan")
    for text in _search(state):
        yield line(text)
    for text in alarms(state):
        yield line(text, style="red")
    if others := _others(state):
        yield line(others)


def _about(state: Json) -> str:
    hosts = [str(name) for name in state["hosts"]]
    words = [f"trial {state['trial']}"] if state["trial"] else []
    if isinstance(state["groups"], int) and isinstance(state["group_size"], int):  # a search's is "auto" until it has found one
        words.append(f"{counted(state['groups'], 'group')} of {counted(state['group_size'], 'worker')}")
    if state["exchange"]:
        words.append(str(state["exchange"]))
    if hosts:
        words.append(f"{counted(len(hosts), 'host')}: {', '.join(hosts[:6])}{', ...' if len(hosts) > 6 else ''}")
    if state["reading"]:
        words.append("still reading its events")
    if state["broken"]:
        words.append(f"{counted(state['broken'], 'line')} of its events cannot be read")
    return ", ".join(words)


def _search(state: Json) -> Iterator[str]:
    """What a search tries, and its newest results."""
    if (search := state["search"]) is None:
        return
    now = search["now"] if state["status"].get("status") == "running" else None
    trying = f", now {trial_words(now)}, {now['updates']} updates" if now else ""
    yield f"search: {counted(search['trials'], 'trial')}{trying}"
    for row in search["rows"][-MOST_TRIALS:]:
        if row["what"] != "trial":
            yield f"  {row['what']}: {row['reason']}"
        else:
            loss = "diverged" if row["loss"] is None else f"loss {brief(row['first'])} to {brief(row['loss'])}"
            yield f"  {trial_words(row)}: {loss} in {row['updates']} updates, {duration(row['seconds'])}"


def trial_words(row: Json) -> str:
    """A trial of a search, with its settings."""
    setting = f"{counted(row['groups'], 'group')}, momentum {brief(row['momentum'])}, learning rate {brief(row['lr'])}"
    return f"trial {row['number']} ({row['phase']}): {setting}"


def figures(state: Json) -> Iterator[str]:
    """The figures of all workers together, in words."""
    if state["loss"]["value"]:
        yield f"loss {brief(_last(state['loss']))}"
    for name, curve in state["eval"].items():
        yield f"eval {name} {brief(_last(curve))}"
    if state["lr"]["value"]:
        yield f"lr {brief(_last(state['lr']))}"
    yield f"{brief(state['samples_per_s'])} samples/s"
    if state["shares"]:
        yield f"exposed communication {100 * state['shares']['exposed']:.0f} %"
    if state["staleness"]["mean"] is not None:
        yield f"staleness {state['staleness']['mean']:.2f}"
    if state["start"] is not None:
        yield f"time {duration(state['newest'] - state['start'])}"
    kept = state["checkpoints"]
    yield "no checkpoint" if kept["newest"] is None else f"checkpoint at step {kept['newest']:,}"
    if kept["failed"]:
        yield f"{counted(kept['failed'], 'checkpoint')} failed"


def _curve(values: Sequence[float]) -> str:
    """Means of neighbouring values, from the first to the last."""
    count = min(_CURVE, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(means), max(means)
    top = len(_HEIGHTS) - 1
    return "".join(_HEIGHTS[round(top * (mean - low) / (high - low)) if high > low else 0] for mean in means)


def alarms(state: Json) -> Iterator[str]:
    """Sentences about members that are slow, lost or failed, and about other things that need attention."""
    for each in state["slow"]:
        yield str(each["reason"] or f"{each['peer']} is slow")
    for member in state["members"]:
        if member["state"] in ("lost", "failed"):
            yield f"{member['peer']} {member['health']}: {member['reason']}"
    for worker in state["workers"]:
        if worker["quiet_s"] and state["status"].get("status") == "running":
            yield f"{worker['peer']} on {worker['host']}: no step for {duration(worker['quiet_s'])}"


def _others(state: Json) -> str:
    """Servers and agents, by what became of them; those that are lost have lines of their own."""
    shown = {worker["peer"] for worker in state["workers"]}
    healths: dict[str, list[str]] = {}
    for member in state["members"]:
        if member["peer"] not in shown and member["state"] not in ("lost", "failed"):
            healths.setdefault(member["health"], []).append(str(member["peer"]))
    said = [
        f"{', '.join(peers[:8])}{', ...' if len(peers) > 8 else ''}: {health if len(peers) == 1 else health.replace('has', 'have')}"
        for health, peers in healths.items()
    ]
    return "; ".join(said)


def workers_table(state: Json, most: int | None, *, wide: bool, plain: bool, wanted: str = "") -> Table:
    """The workers with the parts of their steps.

    Args:
        most: how many; of more those that have trouble come first, and the last line says how many there are besides.
        wanted: a part of the worker's name, its host's, or its group (``group 3``), if only such workers are asked for.
    """
    workers = [worker for worker in state["workers"] if not wanted or _is_meant(worker, wanted)]
    longest = max((worker["seconds"] for worker in state["workers"]), default=0.0)
    shown = workers
    if most is not None and most < len(workers):
        chosen = {worker["peer"] for worker in sorted(workers, key=lambda worker: not worker["trouble"])[:most]}
        shown = [worker for worker in workers if worker["peer"] in chosen]
    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False, expand=wide)
    table.add_column("worker", no_wrap=True, overflow="crop", min_width=max((len(worker["peer"]) for worker in shown), default=0))
    table.add_column("host", no_wrap=True, overflow="crop", max_width=None if wide else 12)
    if wide:
        table.add_column("group", justify="right")
    for name in ("step", "loss", *(["samples/s"] if wide else []), "step time"):
        table.add_column(name, justify="right", no_wrap=True, overflow="crop", min_width=9 if name == "step time" else None)
    width = _WIDE_BAR if wide else _BAR
    table.add_column(_legend(plain=plain), no_wrap=True, overflow="crop", min_width=width)
    if wide:
        table.add_column("health", no_wrap=True, overflow="crop", ratio=1)
    for worker in shown:
        style = "red" if worker["trouble"] else ""
        cells = [line(worker["peer"]), line(worker["host"])]
        if wide:
            cells.append(line(str(worker["group"])))
        cells += [line(f"{worker['step']:,}"), line(brief(worker["loss"]))]
        if wide:
            cells.append(line(brief(worker["samples_per_s"])))
        cells += [line(duration(worker["seconds"])), _bar(worker["means"], longest, width, plain=plain)]
        if wide:
            cells.append(line(worker["health"]))
        table.add_row(*cells, style=style)
    if len(shown) < len(workers):
        table.add_row(line(f"{len(workers) - len(shown)} more", style="dim"))
    return table


def _is_meant(worker: Json, wanted: str) -> bool:
    return any(wanted in text for text in (worker["peer"], worker["host"], f"group {worker['group']}"))


def _legend(*, plain: bool) -> Text:
    legend = Text()
    for (mark, simple, colour), word in zip(PARTS.values(), ("compute", "exposed", "wait"), strict=True):
        legend.append(simple if plain else mark, style=colour).append(word + " ", style="dim")
    return legend


def _bar(means: dict[str, float], longest: float, width: int, *, plain: bool) -> Text:
    """A step's parts, as long as its share of the longest step. Each ends at a whole character, so that their sum is right."""
    bar, end, total = Text(), 0, 0.0
    for name, (mark, simple, colour) in PARTS.items():
        total += means.get(name, 0.0)
        begin, end = end, round(width * total / longest) if longest else 0
        bar.append((simple if plain else mark) * (end - begin), style=colour)
    return bar


def events_table(feed: Sequence[Json], *, whole: bool = False) -> Table:
    """Events, the newest first. ``whole``: with all that they say, in as many lines as that takes."""
    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False, expand=True)
    for name in ("time", "event", "member", "step"):
        table.add_column(name, no_wrap=True, justify="right" if name == "step" else "left")
    table.add_column("what", no_wrap=not whole, ratio=1, overflow="fold" if whole else "crop")
    for item in reversed(feed):
        time = item["time"]
        when = f"{datetime.fromtimestamp(time):%H:%M:%S}" if time > 1e9 else duration(time)  # virtual seconds
        step = "" if item["step"] is None else str(item["step"])
        cells = [line(str(text)) for text in (when, item["kind"], item["peer"], step, item["text"])]
        table.add_row(*cells, style="red" if item["alarm"] else "")
    return table


def _last(curve: Json) -> float | None:
    return curve["value"][-1] if curve["value"] else None


def line(text: Any, style: str = "") -> Text:
    """Text of the run, which is never markup, and tells the terminal nothing."""
    return Text(harmless(str(text)), style=style, overflow="fold")
