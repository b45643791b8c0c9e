"""``zmqtrain plan FILE``: the best way to divide a compute group's layers, what it costs, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zmqtrain.charts import draw
from zmqtrain.cli.overrides import load_with
from zmqtrain.cli.plan_tables import Tables
from zmqtrain.errors import UsageError
from zmqtrain.plan.bars import panels
from zmqtrain.plan.compressed import compressed, compressed_rows, in_words
from zmqtrain.plan.decided import read_plan, with_plan
from zmqtrain.plan.efficiency import efficiencies
from zmqtrain.plan.group_step import variants
from zmqtrain.plan.planner import Planned, plan
from zmqtrain.plan.price import price
from zmqtrain.plan.problem import Problem, main_grid, placed_of
from zmqtrain.plan.rows import efficiency_rows, layer_rows, link_row, sweep_row, total_rows
from zmqtrain.plan.setup import Source, link_source, problem_of, source_of
from zmqtrain.plan.sweep import powers_up_to, sweep
from zmqtrain.strict_json import dumps
from zmqtrain.topology.schema import Topology


def run_plan(
    file: Path,
    *,
    json_lines: bool = False,
    plot: Path | None = None,
    sweep_it: bool = False,
    batches: str | None = None,
    processes: str | None = None,
    given: Path | None = None,
    save: Path | None = None,
    measure: bool = False,
    verify: bool = False,
    data: str | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Plan for a topology file and print the plan. Returns the exit code.

    ``batches``, ``processes``: numbers separated by commas, instead of the file's. ``given``: a plan to price instead of planning.
    ``save``: where to write the plan, as JSON. ``measure``: whether to run it in the simulated world, too.
    ``verify``: whether to compare the task's model, divided so, with the ordinary one.

    Raises `UsageError` if an option cannot be used, and `TaskError` if the task's own code fails.
    """
    topology = load_with(file, settings)
    sizes = _numbers(processes, "--processes") or list(topology.plan.processes) or [topology.compute.group_size]
    samples = _numbers(batches, "--batch") or [topology.compute.batch_size]
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot {plot}: charts are written as SVG; give a file that ends in .svg")
    for option, target in (("--plot", plot), ("--save", save)):
        if target is not None and not target.absolute().parent.is_dir():
            raise UsageError(f"{option} {target} cannot be written: there is no folder {target.absolute().parent}")
    if (given is not None or save is not None or measure) and len(sizes) * len(samples) > 1:
        raise UsageError("a plan is for one group size and one batch: give one of each with --processes and --batch")
    if verify and (sweep_it or sizes != [topology.compute.group_size] or len(samples) > 1 or topology.job.task is None):
        raise UsageError("--verify compares the model of [job] task, divided over the file's own group size, and with one batch")
    source = source_of(topology, data)
    tables = None if json_lines else Tables()
    problems = [problem_of(topology, source.stages, processes=size, batch=batch) for size in sizes for batch in samples]
    _head(tables, source, problems[0], link_source(topology))
    if sweep_it:
        _sweep(topology, source, sizes, samples, tables)
        planned = []
    else:
        planned = [_one(problem, given, tables, why=len(problems) == 1) for problem in problems]
    if topology.compute.workers > 1 and given is None and not sweep_it:
        _groups(topology, source, tables)
        _compression(topology, source, tables)
    if measure and planned:
        _measure(topology, planned[0], data, tables)
    if verify:
        _verify(topology, planned[0], data, tables)
    if save is not None and planned:
        _write(save, json.dumps(planned[0].plan.values(), indent=1) + "\n", "--save")
    if plot is not None:
        shown = planned or [plan(problem) for problem in problems]
        _write(plot, draw(f"{topology.job.name}: {source.what}", panels(shown)), "--plot")
    return 0


def _head(tables: Tables | None, source: Source, problem: Problem, network: str) -> None:
    row = link_row(source.what, problem, network)
    if tables is None:
        print(dumps(row))
    else:
        tables.head(row)


def _one(problem: Problem, given: Path | None, tables: Tables | None, *, why: bool) -> Planned:
    """The best plan, or the price of the given one."""
    if given is None:
        planned = plan(problem)
    else:
        placed = placed_of(problem, read_plan(given, "--price"))
        options = tuple(problem.options(stage) for stage in problem.layers)
        problem = problem.put_by(main_grid(placed))
        planned = Planned(problem, tuple(placed), price(problem, placed), options)
    layers, totals = list(layer_rows(planned)), total_rows(planned, "given" if given else "planned")
    if tables is None:
        for row in [*layers, *totals]:
            print(dumps(row))
    else:
        tables.plan(problem, layers, totals, given=given is not None, why=why)
    return planned


def _measure(topology: Topology, planned: Planned, data: str | None, tables: Tables | None) -> None:
    from zmqtrain.experiment.measured_plan import measured_rows

    rows = measured_rows(topology, planned, data)
    if tables is None:
        for row in rows:
            print(dumps(row))
    else:
        tables.measured(rows[:-1], rows[-1])


def _verify(topology: Topology, planned: Planned, data: str | None, tables: Tables | None) -> None:
    """Raises `DifferentModelError` if the divided model is another one."""
    from zmqtrain.cli.plan_verify import verify_plan

    row = verify_plan(with_plan(topology, planned.plan), data)
    if tables is None:
        print(dumps(row))
    else:
        tables.verified(row)


def _sweep(topology: Topology, source: Source, sizes: Sequence[int], batches: Sequence[int], tables: Tables | None) -> None:
    def make(processes: int, batch: int) -> Problem:
        return problem_of(topology, source.stages, processes=processes, batch=batch)

    processes = list(sizes) if len(sizes) > 1 else powers_up_to(sizes[0])
    part = max(1, batches[0] // max(processes))
    rows: list[dict[str, Any]] = []
    for point in sweep(make, processes, batches, part=part):
        rows.append(sweep_row(point))
        if tables is None:
            print(dumps(rows[-1]), flush=True)
    if tables is not None:
        tables.sweep(rows)


def _groups(topology: Topology, source: Source, tables: Tables | None) -> None:
    """Print how fast the file's workers would be with other numbers of groups."""
    rows: list[dict[str, Any]] = []
    for name, model in variants(topology, source.layers).items():
        rows += efficiency_rows(name, efficiencies(model))
    if tables is None:
        for row in rows:
            print(dumps(row))
    else:
        tables.groups(topology.compute.batch_size, rows)


def _compression(topology: Topology, source: Source, tables: Tables | None) -> None:
    """Print what compressed gradients would make of a step."""
    rows = list(compressed_rows(topology, source.layers))
    if tables is None:
        for row in rows:
            print(dumps(row))
    elif rows:
        tables.compression(rows, in_words(compressed(topology, source.layers)))


def _numbers(text: str | None, option: str) -> list[int]:
    if text is None:
        return []
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if any(number < 1 or number > 2**31 for number in numbers):
        raise UsageError(f"{option} {text}: write whole numbers from 1 on, separated by commas, like 8,32,128")
    return numbers


def _write(file: Path, text: str, option: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {file} cannot be written: {error}") from error
