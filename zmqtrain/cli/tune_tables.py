"""A search as printed lines and tables, or as JSON lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from zmqtrain.cli.table import table_of
from zmqtrain.strict_json import dumps
from zmqtrain.topology.rounded import rounded_time
from zmqtrain.topology.schema import Topology
from zmqtrain.tune.space import Space
from zmqtrain.tune.trial import Outcome, SearchDecision, Trial
from zmqtrain.words import counted


class Shown:
    """Prints the progress of a search."""

    def __init__(self, *, json_lines: bool) -> None:
        self._json = json_lines
        self._console = Console(width=max(140, Console().width), highlight=False)
        self._status: Status | None = None

    def begin(self, topology: Topology, space: Space, folder: Path) -> None:
        """Print what is searched and where its files are."""
        row = {"row": "space", "update_s": {str(groups): space.update_s[groups] for groups in space.groups}, "folder": str(folder)}
        if self._json:
            return self._line(row)
        speeds = ", ".join(f"{groups}: {rounded_time(space.update_s[groups])}" for groups in space.groups)
        numbers = ", ".join(map(str, space.groups)) + (" groups" if max(space.groups) > 1 else " group")
        self._print(f"{topology.job.name}: {counted(topology.compute.workers, 'worker')} as {numbers}")
        return self._print(f"predicted time of an update by groups: {speeds}; all results: {folder}")

    def begins(self, trial: Trial) -> None:
        """Show on a terminal that a trial runs, until it is over: starting its processes takes a while."""
        if not self._json and self._console.is_terminal:
            narrow = Console()  # fit the terminal, so that the line can be removed again
            self._status = narrow.status(f"trial {trial.number}: {trial.phase}, {trial.setting}, {trial.updates} updates")
            self._status.start()

    def ends(self) -> None:
        """Remove the line about the running trial."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def trial(self, name: str, trial: Trial, outcome: Outcome) -> None:
        """Print the result of a trial."""
        if self._json:
            return self._line({"row": "trial", "strategy": name, **trial.to_value(), "outcome": outcome.to_value()})
        loss = "diverged" if outcome.diverged else f"loss {outcome.loss:.4f}"
        setting = trial.setting
        told = f"g {setting.groups:<3d} momentum {setting.momentum:<5.3g} lr {setting.lr:<8.3g}"
        staleness = "" if outcome.staleness is None else f"  staleness {outcome.staleness:.1f}"
        took = f"{outcome.updates:6d} updates in {rounded_time(outcome.seconds):>9s}"
        around = f"  ({rounded_time(outcome.spent_s)} including start and end)" if outcome.around_s > outcome.seconds else ""
        return self._print(f"{trial.number:4d}  {trial.phase:14s} {told} {took}  {loss}{staleness}{around}")

    def decision(self, name: str, decision: SearchDecision) -> None:
        """Print a decision of the search."""
        if self._json:
            return self._line({"row": decision.what, "strategy": name, "reason": decision.reason, **decision.values})
        return self._print(f"      {decision.what}: {decision.reason}")

    def done(self, row: dict[str, Any]) -> None:
        """Print a strategy's result."""
        if self._json:
            self._line({"row": "strategy", **row})

    def compare(self, rows: Sequence[dict[str, Any]]) -> None:
        """All strategies in one table."""
        if self._json or not rows:
            return
        headings = ("strategy", ">groups", ">momentum", ">lr", ">trials", ">searched", ">of the time", ">in all", ">loss", "")
        table = table_of(*headings)
        for row in rows:
            found = [row["groups"], row["momentum"], row["lr"]]
            loss = row["loss"]
            table.add_row(
                row["strategy"],
                *("-" if each is None else f"{each:.3g}" for each in found),
                str(row["trials"]),
                rounded_time(row["search_s"]),
                f"{row['search_share']:.1%}",
                rounded_time(row["seconds"]),
                "-" if loss is None or not math.isfinite(loss) else f"{loss:.4f}",
                row["reason"],
            )
        self._console.print(table)
        for row in rows:
            if row["around_s"] > row["seconds"] / 3:
                spent = f"{rounded_time(row['around_s'])} of the {rounded_time(row['seconds'])} in all"
                self._print(f"{row['strategy']}: {spent} went into starting and ending runs, which matters less for longer jobs")

    def curves(self, rows: Sequence[dict[str, Any]]) -> None:
        """The trade-off over groups."""
        if self._json:
            for row in rows:
                self._line({"row": "curve", **row})
            return
        table = table_of(
            ">groups", ">momentum", ">predicted", ">an update", ">HE", ">updates", ">SE", ">to the target", ">in all", ""
        )
        for row in rows:
            seconds, updates = row["seconds"], row["updates"]
            table.add_row(
                str(row["groups"]),
                f"{row['momentum']:.2f}",
                rounded_time(row["predicted_update_s"]),
                rounded_time(row["update_s"]),
                _times(row["he"]),
                "-" if updates is None else str(updates),
                _times(row["se"]),
                "never" if seconds is None else rounded_time(seconds),
                _times(row["total"]),
                "the soonest" if row["total"] == 1.0 else "",
            )
        self._console.print(table)

    def note(self, text: str) -> None:
        """Print a line of text for people; nothing is printed with ``--json``."""
        if not self._json:
            self._print(text)

    def _line(self, row: dict[str, Any]) -> None:
        print(dumps(row), flush=True)

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
