"""A plan as printed tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zmqtrain.cli.table import table_of
from zmqtrain.plan.problem import Problem
from zmqtrain.topology.rounded import rounded_rate, rounded_size, rounded_time

TERMS = (
    *(("all-gather", "all_gather"), ("dX", "dx"), ("dW", "dw")),
    *(("halo", "halo"), ("redist.", "redistribute"), ("stat.", "statistics")),
)
#: The most layers in a table; there may be hundreds.
MOST_LAYERS = 60
#: Columns of text: a narrower terminal breaks the lines itself, which is easier to read than folded cells.
LEAST_WIDTH = 200
_SCALINGS = {
    "strong": "Strong scaling: more processes for the same batch",
    "weak": "Weak scaling: the batch grows with the processes",
    "beyond": "Beyond the batch size: more processes than samples",
}
_VARIANTS = {
    "as it is": "asynchronous, as the file has it",
    "unmerged": "without an FC server",
    "merged": "with the fully connected phase on a server of its own",
    "pipelined": "the same, while the FC server works on other groups' batches",
}


class Tables:
    """Prints rows of `zmqtrain.plan.rows`."""

    def __init__(self) -> None:
        self._console = Console(width=max(LEAST_WIDTH, Console().width))

    def head(self, row: dict[str, Any]) -> None:
        """Print what the plan is for."""
        ours = f"what this runtime sends, with {row['per_host']} of the group's processes on each host"
        by = "the paper's equations" if row["pricing"] == "paper" else ours
        overlap = {0.0: "no overlap", 1.0: "perfect overlap"}.get(
            row["overlap"], f"{row['overlap']:.0%} of compute hides communication"
        )
        speed = (
            f"{row['flops'] / 1e9:g} GFLOP/s per process, assumed and not measured, for layers without a profiled time"
            if row["flops"]
            else "communication alone"
        )
        self._print(f"[bold]{escape(row['layers'])}[/]: {row['weights']:,} weights")
        network = f"{rounded_time(row['alpha_s'])} per message, {rounded_rate(row['bandwidth'])} ({escape(row['network'])})"
        limit = f"; at most {rounded_size(row['memory'])} per process" if row["memory"] else ""
        self._print(f"priced by {by}: {network}; {overlap}; {speed}{limit}")

    def plan(
        self, problem: Problem, layers: Sequence[dict[str, Any]], totals: Sequence[dict[str, Any]], *, given: bool, why: bool
    ) -> None:
        """Print layers and totals, and with ``why`` the alternatives to each layer."""
        verb = "The given plan" if given else "Plan"
        if problem.processes == 1 and not given:
            step, memory = _time(totals[0]["step_s"]), rounded_size(totals[0]["memory_bytes"])
            self._print(f"\n[bold]One process computes all layers: {step} a step of {problem.batch} samples, in {memory}[/]")
            return
        processes = "1 process" if problem.processes == 1 else f"{problem.processes} processes"
        self._print(f"\n[bold]{verb} for {processes} and a batch of {problem.batch}[/]")
        self._layers(problem, layers)
        if why:
            self._print("\nWhat each layer would cost with another choice (its neighbours as planned, without overlap)")
            self._alternatives(layers)
        self._totals(totals)

    def _layers(self, problem: Problem, layers: Sequence[dict[str, Any]]) -> None:
        used = _used([row["terms"] for row in layers])
        table = table_of(
            "layer", "choice", "grid", *(f">{name}" for name, _ in used), ">compute", ">memory", "what would change the choice"
        )
        for row in layers[:MOST_LAYERS]:
            terms = [_term(row["terms"], key) for _, key in used]
            flip = _flip(row["flip"], row["batch"], 8 / problem.link.byte_s)
            cells = (
                row["layer"],
                row["choice"],
                _grid(row),
                *terms,
                _time(row["compute_s"]),
                rounded_size(row["memory_bytes"]),
                flip,
            )
            table.add_row(*map(escape, cells))
        self._show(table, len(layers))

    def _alternatives(self, layers: Sequence[dict[str, Any]]) -> None:
        used = _used([each["terms"] for row in layers for each in row["alternatives"]])
        table = table_of("layer", "choice", "grid", *(f">{name}" for name, _ in used), ">total", "")
        for row in layers[:MOST_LAYERS]:
            name = row["layer"]
            for each in row["alternatives"]:
                chosen = (each["choice"], _grid(each)) == (row["choice"], _grid(row))
                terms = [_term(each["terms"], key) for _, key in used]
                cells = (name, each["choice"], _grid(each), *terms, _time(each["seconds"]), "planned" if chosen else "")
                table.add_row(*map(escape, cells), style="bold" if chosen else None)
                name = ""
            reasons = {what: why for what, why in row["excluded"].items() if " " not in what}
            for what, why in reasons.items():
                table.add_row(escape(name), f"[dim]{what}[/]", "-", *[""] * len(used), "", f"[dim]{escape(why)}[/]")
                name = ""
        self._show(table, len(layers))

    def _totals(self, totals: Sequence[dict[str, Any]]) -> None:
        headings = (">messages", ">sent", ">latency", ">volume", ">exposed", ">compute", ">step", ">unoverlapped")
        table = table_of("", *headings, ">memory", ">gain", "")
        for row in totals:
            times = [_time(row[f"{key}_s"]) for key in ("latency", "volume", "exposed", "compute", "step", "step_without_overlap")]
            note = f"not possible: {row['obstacle']}" if row["obstacle"] else ""
            cells = (row["plan"], f"{row['messages']:,.0f}", rounded_size(row["bytes"]), *times, rounded_size(row["memory_bytes"]))
            table.add_row(*map(escape, cells), f"{row['gain']:.2f}x", f"[dim]{escape(note)}[/]")
        self._print("\nA step of one process, compared with dividing only the batch or only the model")
        self._console.print(table)

    def measured(self, rows: Sequence[dict[str, Any]], total: dict[str, Any]) -> None:
        """Print predicted, counted and measured costs."""
        self._print("\n[bold]Predicted, counted and measured[/]: for the process that sends most; steps in the simulated world")
        headings = (">messages", ">counted", ">bytes", ">counted", ">waited")
        table = table_of("layer", "choice", "grid", "what", "pass", *headings, "")
        names, layer = {key: name for name, key in TERMS}, ""
        for row in rows:
            place = ("", "", "") if row["layer"] == layer else (row["layer"], row["choice"], row["grid"])
            layer = row["layer"]
            messages = (row["predicted_messages"], row["counted_messages"])
            nbytes = (row["predicted_bytes"], row["counted_bytes"])
            note = "" if messages[0] == messages[1] and nbytes[0] == nbytes[1] else "differs"
            figures = [f"{each:,}" for each in (*messages, *nbytes)]
            table.add_row(*map(escape, place), names[row["term"]], row["phase"], *figures, _time(row["waited_s"]), note)
        self._console.print(table)
        table = table_of("", ">predicted", ">measured")
        for what in ("compute", "exposed", "step"):
            table.add_row(what, _time(total[f"predicted_{what}_s"]), _time(total[f"measured_{what}_s"]))
        self._console.print(table)

    def verified(self, row: dict[str, Any]) -> None:
        """Print that the divided model is the ordinary one."""
        what = "outputs, loss, gradients, buffers and the optimizer's step"
        images = f" ({row['images']} of each image)" if row["images"] else ""
        self._print(f"\n[bold]Verified[/] on {row['samples']} samples{images} in {row['precision']}, divided over {row['grid']}: "
                    f"{what} are the ordinary model's")  # fmt: skip

    def sweep(self, rows: Sequence[dict[str, Any]]) -> None:
        """Steps over processes and batches."""
        for scaling, title in _SCALINGS.items():
            headings = (">pure batch", ">pure model", ">images by domain", ">planned", ">exposed", ">samples/s")
            table = table_of(">P", ">batch", *headings, "plan")
            for row in rows:
                if row["scaling"] == scaling:
                    seconds = row["planned_s"]
                    speed = f"{row['batch'] / seconds:,.0f}" if seconds else "-"
                    times = [_time(row[f"{key}_s"]) for key in ("pure_batch", "pure_model", "domain", "planned", "exposed")]
                    table.add_row(str(row["processes"]), str(row["batch"]), *times, speed, escape(row["plan"]))
            self._print(f"\n[bold]{title}[/]")
            self._console.print(table)

    def groups(self, batch: int, rows: Sequence[dict[str, Any]]) -> None:
        """Print the hardware efficiency for each number of groups, one table for each variant."""
        for name in dict.fromkeys(row["variant"] for row in rows):
            mine = [row for row in rows if row["variant"] == name]
            table = table_of(
                *(">groups", ">workers each", ">an update", ">relative to best"),
                *(">a group's step", ">computes", ">network", ">others"),
                *(">staleness", ">implicit momentum", "limited by", ""),
            )
            for row in mine:
                table.add_row(
                    str(row["groups"]),
                    str(row["group_size"]),
                    _time(row["update_s"]),
                    f"{row['penalty']:.2f}x",
                    _time(row["group_step_s"]),
                    *(_time(row[key]) for key in ("compute_s", "exposed_s", "wait_s")),
                    f"{row['staleness']:g}",
                    f"{row['implicit_momentum']:.2f}",
                    row["bottleneck"],
                    "g*: more groups are not faster" if row["saturation"] else "",
                )
            self._print(f"\n[bold]{_who(mine[0])}, each with batches of {batch}: {_VARIANTS.get(name, name)}[/]")
            self._console.print(table)

    def compression(self, rows: Sequence[dict[str, Any]], advice: str) -> None:
        """Print what each way to compress would make of a step's exchange."""
        table = table_of("compression", ">of the busiest host", ">network", ">its arithmetic", ">computes", ">a step", ">steps", "")
        for row in rows:
            times = [_time(row[f"{key}_s"]) for key in ("network", "arithmetic", "compute", "step")]
            note = "recommended" if row["recommended"] else ""
            table.add_row(row["compression"], rounded_size(int(row["bytes"])), *times, f"{row['steps']:g}x", note)
        self._print(f"\n[bold]Gradients compressed, with {row['exchange']}[/] (float32; steps as two small models needed)")
        self._console.print(table)
        self._print(escape(advice))

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)

    def _show(self, table: Table, layers: int) -> None:
        self._console.print(table)
        if layers > MOST_LAYERS:
            self._print(f"and {layers - MOST_LAYERS} more layers (all with --json)")


def _who(row: dict[str, Any]) -> str:
    """The subject of a table of groups, from any of its rows."""
    pipeline = row["pipeline"]
    slots = row["groups"] // pipeline * row["group_size"]
    if pipeline == 1:
        return f"{slots} workers in groups"
    return f"{slots} slots, {pipeline} groups on each that take turns (pipeline = {pipeline})"


def _used(terms: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The headings and keys of the terms that some layer has: a column of dashes says nothing, and tables are wide."""
    return [(name, key) for name, key in TERMS if any(_term(each, key) != "-" for each in terms)]


def _term(terms: Mapping[str, Any], key: str) -> str:
    return _time(terms[key]["seconds"]) if key in terms else "-"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else rounded_time(seconds)


def _flip(flip: dict[str, Any] | None, batch: int, bandwidth: float) -> str:
    if flip is None:
        return "no alternative"
    parts = []
    if flip["batch"] is not None:
        parts.append(f"B {'>=' if flip['batch'] > batch else '<='} {flip['batch']:,}")
    if flip["bandwidth"] is not None:
        parts.append(f"network {'>=' if flip['bandwidth'] > bandwidth else '<='} {rounded_rate(flip['bandwidth'])}")
    return f"{flip['to']}, where {' or '.join(parts)}" if parts else f"nothing ({flip['to']} is next best)"


def _grid(row: dict[str, Any]) -> str:
    """The grid, and how images are divided where it is not by their height."""
    return f"{row['grid']} {row['strips']}" if "strips" in row else str(row["grid"])
