"""The page's panels for a terminal, one beside the other on it, or each as a screen of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from zmqtrain.observe.dashboard.places import GONE
from zmqtrain.observe.dashboard.plot import Axis, Plot, Series
from zmqtrain.observe.dashboard.screen import line, trial_words
from zmqtrain.observe.dashboard.state import Json
from zmqtrain.observe.terminal import brief, duration
from zmqtrain.topology.rounded import rounded_amount
from zmqtrain.words import counted

#: The colours of groups and of metrics, in turn.
COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "bright_red", "bright_blue", "bright_black")
#: The parts of a step, as in the workers' bars, and the colours of the same parts of the run beside it.
_PARTS = (
    ("compute", "compute", "green", "cyan"),
    ("exposed", "exposed", "red", "magenta"),
    ("other", "other waits", "yellow", "bright_black"),
)
_ROLES = {"server": "S", "fc": "F"}
#: Members beside the workers, values of staleness, and members with traffic that are shown at most: what is beyond is counted.
MOST_MEMBERS, MOST_VALUES, MOST_LINKS = 40, 24, 64


def curves(state: Json, other: Json | None, axis: Axis) -> Iterator[RenderableType]:
    """All curves of a run, and of another one over them."""
    beside = None if other is None else str(other["name"])
    yield Plot("Loss", _together(state, other, "loss", "group_loss"), axis)
    evaluations = []
    for index, (name, curve) in enumerate(state["eval"].items()):
        evaluations.append(Series(name, curve, COLOURS[index % 8]))
        if other is not None and name in other["eval"]:
            evaluations.append(Series(f"{name}, {beside}", other["eval"][name], COLOURS[(index + 4) % 8]))
    if evaluations:
        yield Plot("Evaluation", evaluations, axis)
    split = [Series(label, state["split"][name], colour) for name, label, colour, _ in _PARTS]
    if other is not None:
        split += [Series(f"{label}, {beside}", other["split"][name], colour) for name, label, _, colour in _PARTS]
    yield Plot("Step time", split, axis, duration)
    yield Plot("Learning rate", _together(state, other, "lr"), axis)
    yield Plot("Staleness", _together(state, other, "stale", "group_stale"), axis)


def _together(state: Json, other: Json | None, name: str, of_groups: str | None = None) -> list[Series]:
    """A figure's mean over the workers with that of another run, or else with its groups."""
    series = [Series("mean", state[name], COLOURS[0])]
    if other is not None:
        return [*series, Series(f"mean, {other['name']}", other[name], COLOURS[1])]
    groups: Mapping[str, Any] = {} if of_groups is None else state[of_groups]
    return [
        *(Series(f"group {group}", curve, COLOURS[(index + 1) % 8]) for index, (group, curve) in enumerate(groups.items())),
        *series,
    ]


def hosts(state: Json) -> Iterator[RenderableType]:
    """The hosts with a tile for each of their members, then those members that are no workers."""
    yield Text("A tile for each worker, in the colour of its group, and for each server (S).\n"
               "✗ lost or failed, ! slow, faint: it has left.", style="dim")  # fmt: skip
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=24)
    grid.add_column()
    for place in state["places"]:
        grid.add_row(
            line(place["host"] + (" (lost)" if place["lost"] else ""), "red" if place["lost"] else ""), _tiles(place["tiles"])
        )
    yield grid
    yield Text()
    workers = {worker["peer"] for worker in state["workers"]}
    others = sorted(
        (member for member in state["members"] if member["peer"] not in workers), key=lambda member: member["state"] not in GONE
    )
    if others:
        table = _table("member", "host", "health", "why")
        for member in others[:MOST_MEMBERS]:
            cells = [line(member[name]) for name in ("peer", "host", "health", "reason")]
            table.add_row(*cells, style="red" if member["state"] in GONE else "")
        yield table
        if len(others) > MOST_MEMBERS:
            yield line(f"and {len(others) - MOST_MEMBERS:,} more", "dim")


def _tiles(tiles: list[Json]) -> Text:
    text = Text()
    for tile in tiles:
        mark = "✗" if tile["state"] in GONE else "!" if tile["slow"] else ""
        colour = "red" if mark == "✗" else "default" if tile["group"] is None else COLOURS[tile["group"] % 8]
        faint = "dim " if tile["state"] in ("left", "ended") else ""
        text.append(f"{_ROLES.get(tile['role'], '')}{tile['rank']}{mark}", style=f"{faint}bold {colour}").append("  ")
    return text


def traffic(state: Json) -> Iterator[RenderableType]:
    """How busy the servers are, how stale reads were, and what goes over each link."""
    if state["servers"]:
        yield Text("Load of servers, of the newest two seconds with work", style="bold")
        table = _table("server", ">messages/s", ">received/s", ">waiting", ">busy", "")
        for server in state["servers"]:
            waiting = f"{server['waiting']:.1f} (at most {server['waiting_most']:g})"
            rates = brief(server["messages_per_s"]), rounded_amount(server["bytes_per_s"])
            bar = Text("█" * round(20 * server["busy"]), style="green")
            table.add_row(line(server["peer"]), *map(line, (*rates, waiting, f"{100 * server['busy']:.0f} %")), bar)
        yield table
        yield Text()
    yield from _staleness(state["staleness"])
    yield from _links(state["traffic"])


def _staleness(found: Json) -> Iterator[RenderableType]:
    yield Text("Staleness", style="bold")
    counts = found["counts"]
    if not (total := sum(count for _, count in counts)):
        yield Text("nothing is stale: no asynchronous reads have been counted\n", style="dim")
        return
    yield line(
        f"updates between a worker's read and its write, as {found['by']} counted them: {found['mean']:.2f} in the mean", "dim"
    )
    most = max(count for _, count in counts)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for value, count in counts[:MOST_VALUES]:
        bar = Text("█" * max(1, round(30 * count / most)), style="green")
        table.add_row(str(value), bar, f"{brief(count)} ({100 * count / total:.0f} %)")
    yield table
    if len(counts) > MOST_VALUES:
        yield line(f"and {counted(len(counts) - MOST_VALUES, 'larger value')}", "dim")
    yield Text()


def _links(matrix: Json | None) -> Iterator[RenderableType]:
    yield Text("Traffic by link", style="bold")
    if matrix is None:
        yield Text("nothing has been reported", style="dim")
        return
    yield Text("of large messages while a member is in the run, and of everything once it has left", style="dim")
    links = [(sent, name, peer) for name, row in zip(matrix["rows"], matrix["bytes"], strict=True)
             for peer, sent in zip(matrix["peers"], row, strict=True) if sent]  # fmt: skip
    links.sort(key=lambda link: -link[0])  # the busiest first: a matrix of many members is wider than any terminal
    table = _table("from", "to", ">bytes", "")
    for sent, name, peer in links[:MOST_LINKS]:
        bar = Text("█" * max(1, round(30 * sent / links[0][0])), style="blue")
        table.add_row(line(name), line(peer), rounded_amount(sent), bar)
    yield table
    if len(links) > MOST_LINKS:
        yield line(f"and {counted(len(links) - MOST_LINKS, 'link')} with less", "dim")


def search(state: Json) -> Iterator[RenderableType]:
    """What a search has tried and decided, the newest first."""
    found = state["search"]
    if found is None:
        yield Text('this run has searched for nothing: groups = "auto" and zmqtrain tune do', style="dim")
        return
    done = f"{counted(found['trials'], 'trial')} so far"
    now = found["now"] if state["status"].get("status") == "running" else None
    yield line(f"now {trial_words(now)}, {now['updates']} updates; {done}" if now else done)
    table = _table(">trial", "phase", ">groups", ">momentum", ">rate", ">updates", ">took", ">loss", "why")
    for row in reversed(found["rows"]):
        if row["what"] != "trial":
            table.add_row("", line(row["what"]), "", "", "", "", "", "", line(row["reason"]), style="dim")
            continue
        loss = "diverged" if row["loss"] is None else f"{brief(row['first'])} to {brief(row['loss'])}"
        figures = brief(row["groups"]), brief(row["momentum"]), brief(row["lr"]), brief(row["updates"]), duration(row["seconds"])
        table.add_row(str(row["number"]), line(row["phase"]), *figures, loss, line(row["reason"]))
    yield table


def _table(*names: str) -> Table:
    """A table without lines. Names with ``>`` are columns of figures."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table
