"""Shows a run in progress: a live table on a terminal, plain lines elsewhere, JSON lines for machines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from zmqtrain.observe.progress import Progress
from zmqtrain.observe.slowness import SlowNow
from zmqtrain.observe.summary import Summary, metrics_of
from zmqtrain.observe.sums import SUMS, fields_of, mean_staleness
from zmqtrain.observe.terminal import progress_line
from zmqtrain.strict_json import dumps
from zmqtrain.topology.rounded import rounded_duration, rounded_time
from zmqtrain.words import counted

#: Seconds between plain progress lines.
LINE_EVERY_S = 1.0


class LiveView(Protocol):
    """Shows a run. All methods on the loop's thread."""

    def begin(self, title: str) -> None: ...

    def regroup(self, group_of: Mapping[str, int]) -> None:
        """Set the workers and their groups, if they became known only after the view was made."""

    def note(self, text: str) -> None:
        """Show a line about the run."""

    def event(self, event: Mapping[str, Any], now: float) -> None:
        """Take an event of a role (its line in ``events.jsonl``); ``now`` is the loop's clock."""

    def log(self, peer: str, text: str) -> None:
        """Show lines that a role has printed."""

    def end(self) -> None: ...


class LateView(LiveView, Protocol):
    """Shows a run that had begun before."""

    def past(self, event: Mapping[str, Any], now: float) -> None:
        """Take an event from before the view began: it counts, but is not shown."""


@dataclass(slots=True)
class _GroupRow:
    """One group's row in the table, from its newest steps."""

    step: int = 0
    begun: bool = False
    """Whether it has said where it begins: not at step 0 in a run that was resumed."""
    loss: float | None = None
    samples: int = 0
    rate: float = 0.0
    exposed: float | None = None
    staleness: float | None = None
    since: float | None = None  # the time from which `samples` counts


class TableRows:
    """The table's rows, as a fold of step events."""

    def __init__(self, group_of: Mapping[str, int]) -> None:
        self.eval: dict[str, float] = {}
        self.progress = Progress()
        self._slow = SlowNow()
        self._lost: set[str] = set()
        self.regroup(group_of)

    def regroup(self, group_of: Mapping[str, int]) -> None:
        """Set the workers, before any event."""
        self._group_of = group_of
        self.groups: dict[int, _GroupRow] = {group: _GroupRow() for group in sorted(set(group_of.values()))}

    def add(self, event: Mapping[str, Any], now: float) -> None:
        """Take an event of a role, or a line that stands for many."""
        self.progress.add(event, now)
        event = as_one(event) if event["kind"] == SUMS else event
        values = event["values"]
        if event["kind"] == "eval":
            self.eval.update(metrics_of(values))
        peer = f"{event['role']}/{event['rank']}"
        if event["kind"] == "slow":
            self._slow.add(peer, values)
        elif event["kind"] == "lost":
            self._lost.add(peer)
        elif event["kind"] == "join":  # not its steps, of which the last ones may come late
            self._lost.discard(peer)
        row = self.groups.get(self._group_of.get(peer, -1))
        if row is not None and event["kind"] == "start":
            row.step, row.begun = max(row.step, event["step"] or 0), True
        if event["kind"] != "step" or row is None:
            return
        row.step, row.begun = max(row.step, event["step"] + 1), True
        row.loss = values.get("loss", row.loss)
        seconds = values.get("seconds", 0.0)
        share = values.get("exposed_s", 0.0) / seconds if seconds > 0 else 0.0
        row.exposed = share if row.exposed is None else row.exposed + 0.1 * (share - row.exposed)
        mean = mean_staleness(values)
        if mean is not None:
            row.staleness = mean if row.staleness is None else row.staleness + 0.1 * (mean - row.staleness)
        if row.since is None:
            row.since = now
        else:
            row.samples += values.get("samples", 0)
        if now - row.since >= 1.0:  # about once a second, so that the figure does not flicker
            row.rate, row.samples, row.since = row.samples / (now - row.since), 0, now

    def there(self) -> dict[int, _GroupRow]:
        """The groups of which some worker is there; all, if none is."""
        left = {group for peer, group in self._group_of.items() if peer not in self._lost}
        return {group: row for group, row in self.groups.items() if group in left} or self.groups

    @property
    def rate(self) -> float:
        """Samples per second over all groups."""
        return sum(row.rate for row in self.there().values())

    def line(self) -> str:
        """The whole status in one line."""
        rows = self.there().values()
        losses = [row.loss for row in rows if row.loss is not None]
        steps = [row.step for row in rows if row.begun] or [0]
        step = f"{min(steps)}" if min(steps) == max(steps) else f"{min(steps)}..{max(steps)}"
        parts = [f"step {step}"]
        if losses:
            parts.append(f"loss {sum(losses) / len(losses):.4f}")
        if self.rate:
            parts.append(f"{self.rate:,.0f} samples/s")
        exposed = [row.exposed for row in rows if row.exposed is not None]
        if exposed:
            parts.append(f"exposed communication {100 * sum(exposed) / len(exposed):.0f} %")
        stale = [row.staleness for row in rows if row.staleness is not None]
        if stale:
            parts.append(f"staleness {sum(stale) / len(stale):.2f}")
        parts += [f"{name} {value:.4f}" for name, value in self.eval.items()]
        return "  ".join([*parts, *self.slow_words()])

    def slow_words(self) -> list[str]:
        """A list with one text about all slow members, or an empty list."""
        slow = [f"{each['peer']}'s {each['what']} {each['factor']:.1f} times" for each in self._slow.to_list()]
        return [f"slow: {', '.join(slow)}"] if slow else []


def as_one(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line that stands for many events, as one event: the last one's values, but the sums of times and samples."""
    values = line["values"]
    sums = {name: each.total for name, each in fields_of(values).items() if name in ("seconds", "exposed_s", "samples")}
    return {**line, "kind": values["of"], "values": {**values["last"], **sums}}


class TableView:
    """A bar and a table that are updated in place, for terminals. Log lines scroll above them."""

    def __init__(self, group_of: Mapping[str, int], console: Console) -> None:
        self._rows = TableRows(group_of)
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=False)

    def begin(self, title: str) -> None:
        self._console.print(title, highlight=False, markup=False)
        self._live.start()

    def regroup(self, group_of: Mapping[str, int]) -> None:
        self._rows.regroup(group_of)

    def note(self, text: str) -> None:
        self._live.console.print(text, style="dim", highlight=False, markup=False)

    def past(self, event: Mapping[str, Any], now: float) -> None:
        self._rows.add(event, now)

    def event(self, event: Mapping[str, Any], now: float) -> None:
        self._rows.add(event, now)

    def log(self, peer: str, text: str) -> None:
        for line in text.splitlines():
            self._live.console.print(f"[cyan]{escape(peer)}[/cyan] | {escape(line)}", highlight=False)

    def end(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        table = Table("group", "step", "loss", "samples/s", "exposed", "staleness", box=None, header_style="bold")
        for number, row in self._rows.there().items():
            table.add_row(
                str(number),
                str(row.step),
                "" if row.loss is None else f"{row.loss:.4f}",
                f"{row.rate:,.0f}",
                "" if row.exposed is None else f"{100 * row.exposed:.0f} %",
                "" if row.staleness is None else f"{row.staleness:.2f}",
            )
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in self._rows.eval.items())
        progress = self._rows.progress.to_dict()
        above = [] if progress["planned"] is None else [progress_line(progress)]
        return Group(*above, table, metrics, *self._rows.slow_words())


class PlainView:
    """About one line per second, for pipes and log files."""

    def __init__(self, group_of: Mapping[str, int], *, every_steps: int = 0) -> None:
        self._rows = TableRows(group_of)
        self._every_steps = every_steps
        self._next = 0.0
        self._shown_step = 0

    def begin(self, title: str) -> None:
        print(title, flush=True)

    def regroup(self, group_of: Mapping[str, int]) -> None:
        self._rows.regroup(group_of)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def past(self, event: Mapping[str, Any], now: float) -> None:
        self._rows.add(event, now)

    def event(self, event: Mapping[str, Any], now: float) -> None:
        self._rows.add(event, now)
        event = as_one(event) if event["kind"] == SUMS else event
        if event["kind"] == "eval":
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in metrics_of(event["values"]).items())
            print(f"evaluation at step {event['step']}: {metrics}", flush=True)
        elif event["kind"] == "step" and self._due(event["step"], now):
            print(self._rows.line(), flush=True)

    def _due(self, step: int, now: float) -> bool:
        if self._every_steps:
            due = step >= self._shown_step + self._every_steps
            self._shown_step = step if due else self._shown_step
            return due
        due = now >= self._next
        if due:
            self._next = now + LINE_EVERY_S
        return due

    def log(self, peer: str, text: str) -> None:
        for line in text.splitlines():
            print(f"{peer} | {line}", flush=True)

    def end(self) -> None:
        return None


class JsonView:
    """Events as JSON lines on standard output, and nothing else; what roles print goes to standard error."""

    def begin(self, title: str) -> None:
        return None

    def regroup(self, group_of: Mapping[str, int]) -> None:
        return None

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def past(self, event: Mapping[str, Any], now: float) -> None:
        return None

    def event(self, event: Mapping[str, Any], now: float) -> None:
        print(dumps(event), flush=True)

    def log(self, peer: str, text: str) -> None:
        for line in text.splitlines():
            print(f"{peer} | {line}", file=sys.stderr, flush=True)

    def end(self) -> None:
        return None


def make_view(group_of: Mapping[str, int], *, json_lines: bool, every_steps: int = 0) -> LateView:
    """The view that suits standard output."""
    if json_lines:
        return JsonView()
    console = Console()
    return TableView(group_of, console) if console.is_terminal else PlainView(group_of, every_steps=every_steps)


def _trained(values: Mapping[str, Any]) -> str:
    """What a run has trained, of a summary: those of a resumed run's steps that are its own."""
    last, before = values["steps"], values["resumed_at"]
    if before is None:
        steps = counted(last, "step")
    elif last <= before:
        return f"nothing was left to train after step {before:,}"
    else:
        steps = f"step {last:,}" if last == before + 1 else f"steps {before + 1:,} to {last:,}"
    rate = "" if values["samples_per_s"] is None else f", {values['samples_per_s']:,.0f} samples/s while training"
    return f"{steps}, {counted(values['samples'], 'sample')}{rate}"


def closing_lines(summary: Summary, seconds: float, directory: str) -> list[str]:
    """The lines that are printed when a run is done. ``directory``: where its results are; empty: nowhere."""
    values = summary.to_dict()
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in values["eval"].items())
    step, exposed = values["step_s"]["median"], values["exposed_communication_s"]["median"]
    lines = [f"done in {rounded_duration(seconds)}: {_trained(values)}"]
    if step is not None:
        lines.append(f"step {rounded_time(step)} (median), of which {rounded_time(exposed)} waiting for the network")
    if values["staleness"]["histogram"]:
        lines.append(f"staleness {values['staleness']['mean']:.2f} (mean), {values['staleness']['max']} (max)")
    momentum = values["momentum"]
    ahead = None if momentum is None else momentum.get("look_ahead")
    factor = f", learning rate times {ahead['lr_factor']:.3g}" if ahead and ahead["lr_factor"] != 1 else ""
    if factor and ahead:
        rise = [f"rising over the first {ahead['rise']:g} updates"] if ahead.get("rise") else []
        recovery = [f"up to {ahead['recovery']:.3g} times that where steps are too small"] if ahead.get("recovery") else []
        factor += f" ({'; '.join([*rise, *recovery])})" if rise or recovery else ""
    if ahead and ahead.get("norm_limit"):
        factor += f", gradients up to {ahead['norm_limit']:g} times their running mean"
    if momentum is not None and ahead and ahead["steps"]:
        spread = f", {momentum['total']:.2f} an update of each group" if momentum["compensated"] else ""
        adapted = f"momentum {momentum['explicit']:.3f} an update{spread}{factor}; looked {ahead['updates']:g} updates ahead"
        lines.append(f"adapted to asynchronous groups: {adapted}")
    elif momentum is not None and momentum["explicit"] is not None and momentum["implicit"]:
        how = f" (lowered from {momentum['target']:.3g})" if momentum["explicit"] != momentum["target"] else ""
        fitted = "" if momentum["fitted"] is None else f"; fitted {momentum['fitted']:.2f}"
        total = f"by asynchrony {momentum['implicit']:.2f}, together like {momentum['total']:.2f}"
        lines.append(f"momentum {momentum['explicit']:.2f}{how}, {total}{fitted}{factor}")
    elif factor:
        lines.append(factor.removeprefix(", "))
    if metrics:
        lines.append(metrics)
    return [*lines, f"all results: {directory}"] if directory else lines
