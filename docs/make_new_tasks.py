"""The search on tasks that it was not made on, beside the best of the grid; the table is in tuning.md.

    python docs/make_new_tasks.py FOLDER --draw 1        # ten tasks; again: go on after an interruption
    python docs/make_new_tasks.py FOLDER --draw 1 --table
    python docs/make_new_tasks.py FOLDER --draw 1 --orders 3 --updates 150 2000
    python docs/make_new_tasks.py FOLDER --draw 1 --orders 3 --parts

A draw is a seed: model, its width, noise, scale of the inputs, batch, workers, their speed and their network follow from it, and
the target, which is what the best of six settings comes to in one process after a drawn number of updates, and 5 % more. The
search gets the default `[tune]` and that target. The best of the grid is the soonest of all groups, momenta and learning rates that
it may choose from, each from the beginning with a setting that stays. Both are made of plain PyTorch loops (`plain_runs.py`,
`plain_grid.py`), in the time that the planner predicts; with `--simulate` the search is made of simulated runs.

One order of the data favours one of so many settings by chance. With ``--orders N`` the search is made with N orders, and the best
of the grid is the setting with the lowest median of its times with them: the last column is the ratio of the two medians, and the
one before it that of the first order alone, with the best of the grid of that order. ``--updates`` says from which numbers of
updates the target is drawn; what else a seed draws is the same. ``--parts`` prints what a ratio consists of: probes, training,
how many times training began without momentum, and what the best setting of one and of two groups would take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from plain_grid import Reached, SideBySide
from plain_runs import ORDERS_APART, PlainRuns
from torch.utils.data import DataLoader

from zmqtrain.cli.tune import How, run_tune
from zmqtrain.cli.tune_tables import Shown
from zmqtrain.exchange.momentum import compensated, implicit_momentum
from zmqtrain.experiment.tuning import Tuning, searched
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.topology.load import load_topology
from zmqtrain.train.task import load_task
from zmqtrain.tune.trial import Setting, Smoothed

HERE = Path(__file__).resolve().parent
COUNT = 10
KINDS = ("cnn", "mlp", "lstm", "transformer", "linear", "factors", "autoencoder", "logistic")
#: Those of `[tune]`.
RATES, MOMENTA = (1e-4, 1e-3, 1e-2, 1e-1), (0.0, 0.3, 0.6, 0.9)
#: Learning rates and momenta of which the target is.
IN_ONE_PROCESS = ((0.1, 0.9), (0.1, 0.6), (0.1, 0.0), (0.01, 0.9), (0.01, 0.6), (0.001, 0.9))
#: After how many updates in one process the target is reached, at least and at most.
UPDATES = (150.0, 400.0)
FILE = """
[job]
name = "{name}"
task = "{folder}/new_tasks.py:task"
args = {{ kind = "{kind}", seed = {seed}, noise = {noise}, width = {width}, scale = {scale} }}
timeout = "600 s"
seed = {seed}
[[hosts]]
name = "h[1-{hosts}]"
slots = 1
[compute]
groups = {workers}
batch_size = {batch}
device = "modelled"
profile = "{profile}"
noise = {{ kind = "normal", spread = 0.1 }}
[network]
bandwidth = "{bandwidth} Mbit/s"
latency = "{latency} us"
[simulation]
payload = "real"
time_limit = "240 h"
[observe]
trace_steps = 0
[tune]
target_loss = {target}
"""


@dataclass(frozen=True)
class Drawn:
    """A task, as it was drawn."""

    name: str
    kind: str
    seed: int
    noise: float
    width: int
    scale: float
    batch: int
    workers: int
    batch_s: float
    """A worker's time for a group's whole batch."""
    bandwidth: int
    latency: int
    updates: int
    """After which the target is reached."""


def draw(seed: int, updates: tuple[float, float] = UPDATES) -> list[Drawn]:
    """Ten of them. Every kind once before any comes twice. ``updates``: the range of those after which targets are reached."""
    random_ = random.Random(seed)
    kinds = random_.sample(KINDS, len(KINDS)) + random_.sample(KINDS, len(KINDS))

    def between(low: float, high: float) -> float:
        return float(f"{math.exp(random_.uniform(math.log(low), math.log(high))):.2g}")

    return [
        Drawn(
            f"{seed}-{number}-{kind}",
            kind,
            1000 * seed + number,
            noise=between(0.5, 3.0),
            width=random_.choice((16, 24, 32)),
            scale=between(0.5, 2.0),
            batch=random_.choice((16, 32, 64)),
            workers=random_.choice((2, 4, 4)),
            batch_s=between(0.01, 0.2),
            bandwidth=round(between(20, 1000)),
            latency=round(between(50, 2000)),
            updates=round(between(*updates)),
        )
        for number, kind in enumerate(kinds[:COUNT])
    ]


def args_of(drawn: Drawn) -> dict[str, Any]:
    return {name: getattr(drawn, name) for name in ("kind", "seed", "noise", "width", "scale")}


def target_of(drawn: Drawn) -> float:
    """The lowest smoothed loss of six settings in one process after so many updates, and 5 % more."""
    task = load_task(f"{HERE}/new_tasks.py:task", args_of(drawn), None)
    lowest = math.inf
    for rate, momentum in IN_ONE_PROCESS:
        torch.manual_seed(drawn.seed)
        model, smoothed = task.model(), Smoothed(20)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        loader = DataLoader(task.train_data, drawn.batch, shuffle=True, drop_last=True)
        for inputs, target in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), drawn.updates):
            optimizer.zero_grad()
            loss = task.loss(model(inputs), target)
            loss.backward()
            optimizer.step()
            smoothed.add(loss.item())
        if math.isfinite(smoothed.value):
            lowest = min(lowest, smoothed.value)
    return float(f"{1.05 * lowest:.3g}")


def file_of(drawn: Drawn, folder: Path) -> Path:
    """The topology file of a task, and its profile."""
    file = folder / f"{drawn.name}.toml"
    if file.exists():
        return file
    task = load_task(f"{HERE}/new_tasks.py:task", args_of(drawn), None)
    named = ((each, sum(p.numel() for p in module.parameters(recurse=False))) for each, module in task.model().named_modules())
    sizes = {each: numel for each, numel in named if numel}
    part_s = drawn.batch_s / len(sizes)
    layers = [{"name": each, "numel": sizes[each], "forward_s": part_s / 3, "backward_s": part_s * 2 / 3} for each in sizes]
    profile = folder / f"{drawn.name}-profile.json"
    profile.write_text(json.dumps({"layers": layers, "batch_size": drawn.batch}))
    values = {"hosts": drawn.workers + 1, "profile": profile, "target": target_of(drawn), "folder": HERE}
    file.write_text(FILE.format(**{name: getattr(drawn, name) for name in Drawn.__dataclass_fields__}, **values))
    return file


def grid_of(workers: int) -> Iterator[Setting]:
    """All settings."""
    for groups in [each for each in range(1, workers + 1) if workers % each == 0]:
        momenta = {*MOMENTA, round(compensated(max(MOMENTA), implicit_momentum(groups - 1)), 3)}
        yield from (Setting(groups, momentum, rate) for momentum, rate in itertools.product(sorted(momenta), RATES))


def run(drawn: Drawn, folder: Path, *, orders: int, simulate: bool) -> None:
    """The searches and the grid of a task, as far as they are not there. ``simulate``: the search with the whole runtime."""
    file = file_of(drawn, folder)
    topology = load_topology(file)
    task = load_task(f"{HERE}/new_tasks.py:task", args_of(drawn), None)
    space = searched(topology, None, measured=False)
    for order in range(orders):
        searched_in = search_of(drawn, folder, order)
        if (searched_in / "summary.json").exists():
            continue
        if simulate:
            run_tune(file, How(simulate=True, resume=searched_in if searched_in.exists() else None), run_dir=searched_in)
        else:
            directory = RunDirectory.create(drawn.name, exact=searched_in)
            shown = Shown(json_lines=False)
            shown.begin(topology, space, directory.path)
            tuning = Tuning(topology, space, directory, shown)
            tuning.strategy("omnivore", PlainRuns(topology, task, space.update_s, order))
            tuning.compare()
            directory.close()
    best = grid_file_of(drawn, folder, orders)
    if not best.exists():
        seeds = [topology.job.seed + ORDERS_APART * order for order in range(orders)]
        grid = SideBySide(task, drawn.batch, topology.job.seed, space.update_s, seeds)
        tune, settings = topology.tune, list(grid_of(drawn.workers))
        assert tune.target_loss is not None
        found = grid.reach(settings, tune.target_loss, tune.smooth, drawn.updates, 4 * drawn.updates)
        best.write_text(json.dumps(best_of(found), indent=1))


def best_of(found: Mapping[Setting, Reached]) -> dict[str, Any]:
    """The setting with the lowest median of its seconds, and the seconds of all, order by order (none: not as soon as that)."""
    setting = min(found, key=lambda each: median(found[each].seconds))
    others = {str(each): [_finite(seconds) for seconds in reached.seconds] for each, reached in found.items()}
    updates = _finite(median(found[setting].updates))
    return {"setting": str(setting), "seconds": median(found[setting].seconds), "updates": updates, "others": others}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def search_of(drawn: Drawn, folder: Path, order: int) -> Path:
    """The folder of a search."""
    return folder / (f"{drawn.name}-search" if order == 0 else f"{drawn.name}-search-{order}")


def grid_file_of(drawn: Drawn, folder: Path, orders: int) -> Path:
    """The file of the best of the grid."""
    return folder / (f"{drawn.name}-grid.json" if orders == 1 else f"{drawn.name}-grid-{orders}.json")


def table(drawn: list[Drawn], folder: Path, orders: int) -> None:
    """Rows of Markdown."""
    print(
        "| model, width | noise, inputs | batch, workers | a batch, network | target | best of the grid | search | searched | |",
        end="",
    )
    print(" of medians |" if orders > 1 else "")
    print("|---|---|---|---|---|---|---|---|---|" + ("---|" if orders > 1 else ""))
    for each in drawn:
        searches = [search_of(each, folder, order) / "summary.json" for order in range(orders)]
        grid = grid_file_of(each, folder, orders)
        if not all(file.exists() for file in (*searches, grid)):
            continue
        rows, best = [json.loads(file.read_text())["strategies"][0] for file in searches], json.loads(grid.read_text())
        target = load_topology(folder / f"{each.name}.toml").tune.target_loss
        row, seconds = rows[0], [row["seconds"] if row["reached"] else math.inf for row in rows]
        soonest = min(with_orders[0] or math.inf for with_orders in best["others"].values())
        ratio = f"{row['seconds'] / soonest:.2f}" if row["reached"] else f"not in {row['seconds']:.3g} s"
        found = "-" if row["groups"] is None else f"{row['groups']}, {row['momentum']:g}, {row['lr']:g}"
        grid_setting = re.sub(r" groups?|momentum |learning rate ", "", best["setting"])
        all_s = ", ".join(f"{each_s:.3g}" for each_s in seconds)
        print(
            f"| {each.kind}, {each.width} | {each.noise:g}, x {each.scale:g} | {each.batch}, {each.workers} "
            f"| {1000 * each.batch_s:g} ms, {each.bandwidth} Mbit/s, {each.latency} us | {target:g} "
            f"| {best['seconds']:.3g} s, {best['updates']} updates ({grid_setting}) | {all_s} s ({found}) "
            f"| {median(row['search_s'] for row in rows):.2g} s | {ratio} |"
            + (f" {median(seconds) / best['seconds']:.2f} |" if orders > 1 else "")
        )


def parts(drawn: list[Drawn], folder: Path, orders: int) -> None:
    """Rows of Markdown: medians of the orders, divided by the time of the best of the grid."""
    print("| task | in all | probes | training | parts of it | one group | two groups | training, by the best of its groups |")
    print("|---|---|---|---|---|---|---|---|")
    for each in drawn:
        searches = [search_of(each, folder, order) for order in range(orders)]
        grid = grid_file_of(each, folder, orders)
        if not all((search / "summary.json").exists() for search in searches) or not grid.exists():
            continue
        best = json.loads(grid.read_text())
        rows = [json.loads((search / "summary.json").read_text())["strategies"][0] for search in searches]
        begun = [_trials_of_training(search) for search in searches]
        whole = [row["seconds"] / best["seconds"] if row["reached"] else math.inf for row in rows]
        probes = median(row["search_s"] for row in rows) / best["seconds"]
        training = median((row["seconds"] - row["search_s"]) / best["seconds"] for row in rows)
        of_groups = {groups: _best_with(groups, best) for groups in (1, 2)}
        own = median((row["seconds"] - row["search_s"]) / best["seconds"] / _best_with(row["groups"], best) for row in rows)
        print(
            f"| {each.name} | {median(whole):.2f} | {probes:.2f} | {training:.2f} | {median(begun):g} "
            f"| {of_groups[1]:.2f} | {of_groups[2]:.2f} | {own:.2f} |"
        )


def _trials_of_training(search: Path) -> int:
    """How many trials, one after another, its training consists of: each begins without momentum."""
    events = [json.loads(line) for line in (search / "events.jsonl").read_text().splitlines()]
    starts = {event["values"]["number"]: event["values"]["start"] for event in events if event["kind"] == "trial"}
    count, at = 0, max(starts)
    while at is not None:
        count, at = count + 1, starts[at]
    return count


def _best_with(groups: int, best: Mapping[str, Any]) -> float:
    """What the best setting with so many groups takes, divided by what the best of all does."""
    of_them = [seconds for setting, seconds in best["others"].items() if setting.startswith(f"{groups} ")]
    return min((median(each or math.inf for each in seconds) for seconds in of_them), default=math.inf) / best["seconds"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draw", type=int, required=True)
    parser.add_argument("--only", type=int, action="append", help="these of the ten")
    parser.add_argument("--orders", type=int, default=1, help="of the data, of which medians are compared")
    parser.add_argument("--updates", type=float, nargs=2, default=UPDATES, help="between which the target's are drawn")
    parser.add_argument("--simulate", action="store_true", help="search with the whole runtime, not with plain loops")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--parts", action="store_true", help="print what the ratios consist of, of what is there")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    drawn = draw(given.draw, tuple(given.updates))
    if given.parts:
        parts(drawn, folder, given.orders)
        return 0
    if not given.table:
        for number in range(COUNT) if given.only is None else given.only:
            run(drawn[number], folder, orders=given.orders, simulate=given.simulate)
    table(drawn, folder, given.orders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
