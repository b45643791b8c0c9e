"""The search on tasks that it was not made on, beside the best of the grid; the table is in tuning.md.

    python docs/make_new_tasks.py FOLDER --draw 1        # ten tasks; again: go on after an interruption
    python docs/make_new_tasks.py FOLDER --draw 1 --table

A draw is a seed: model, its width, noise, scale of the inputs, batch, workers, their speed and their network follow from it, and
the target, which is what the best of six settings comes to in one process after a drawn number of updates, and 5 % more. The
search gets the default `[tune]` and that target. The best of the grid is the soonest of all groups, momenta and learning rates that
it may choose from, each from the beginning with a setting that stays. Both are made of plain PyTorch loops (`plain_runs.py`), in
the time that the planner predicts; with `--simulate` the search is made of simulated runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from plain_runs import PlainRuns
from torch.utils.data import DataLoader

from zmqtrain.cli.tune import How, run_tune
from zmqtrain.cli.tune_tables import Shown
from zmqtrain.exchange.momentum import compensated, implicit_momentum
from zmqtrain.experiment.tuning import Tuning, searched
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.topology.load import load_topology
from zmqtrain.train.task import load_task
from zmqtrain.tune.trial import Outcome, Setting, Smoothed, Trial

HERE = Path(__file__).resolve().parent
COUNT = 10
KINDS = ("cnn", "mlp", "lstm", "transformer", "linear", "factors", "autoencoder", "logistic")
#: Those of `[tune]`.
RATES, MOMENTA = (1e-4, 1e-3, 1e-2, 1e-1), (0.0, 0.3, 0.6, 0.9)
#: Learning rates and momenta of which the target is.
IN_ONE_PROCESS = ((0.1, 0.9), (0.1, 0.6), (0.1, 0.0), (0.01, 0.9), (0.01, 0.6), (0.001, 0.9))
#: Of the best of the grid's time: after which part a setting is given up that has come less than half as far.
EARLY, HALF = 0.3, 0.5

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


def draw(seed: int) -> list[Drawn]:
    """Ten of them. Every kind once before any comes twice."""
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
            updates=round(between(150, 400)),
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
    """All settings, the likeliest first, so that the others can be given up sooner."""
    groups = [each for each in range(1, workers + 1) if workers % each == 0]
    settings = []
    for each in groups:
        momenta = {*MOMENTA, round(compensated(max(MOMENTA), implicit_momentum(each - 1)), 3)}
        settings += [Setting(each, momentum, rate) for momentum, rate in itertools.product(sorted(momenta), RATES)]

    def unlikely(setting: Setting) -> float:
        pace = setting.lr * setting.groups / (1 - setting.momentum)
        return abs(math.log(pace / 0.2)) + 0.1 * setting.groups

    yield from sorted(settings, key=unlikely)


class Grid:
    """The soonest of all settings."""

    def __init__(self, runs: PlainRuns, update_s: Mapping[int, float], most: int) -> None:
        """``most``: updates, as long as no setting has reached the target."""
        self._runs, self._update_s, self._most = runs, update_s, most

    def best(self) -> dict[str, Any]:
        """The setting and its seconds, and those of all others that were not given up."""
        found: dict[Setting, Outcome] = {}
        slow: set[Setting] = set()
        best_s, far = math.inf, 0.0  # how far the furthest had come after a part of the time
        for setting in grid_of(max(self._update_s)):
            if replace(setting, lr=float(f"{10 * setting.lr:g}")) in slow:
                slow.add(setting)
                continue
            if math.isfinite(best_s):
                early = self._run(setting, EARLY * best_s)
                come = 0.0 if early.diverged else early.first - early.loss
                if early.diverged or come < HALF * far:
                    if come > 0:  # it learned, so a lower rate is slower still
                        slow.add(setting)
                    continue
                far = max(far, come)
            outcome = self._run(setting, best_s)
            if outcome.reached is not None:
                found[setting] = outcome
                best_s = min(best_s, outcome.reached)
        setting = min(found, key=lambda each: found[each].reached or math.inf)
        seconds = {str(each): outcome.reached for each, outcome in found.items()}
        return {"setting": str(setting), "seconds": best_s, "updates": found[setting].reached_updates, "others": seconds}

    def _run(self, setting: Setting, seconds: float) -> Outcome:
        updates = self._most if math.isinf(seconds) else math.ceil(1.05 * seconds / self._update_s[setting.groups])
        return self._runs.run(Trial(0, setting, updates, "probe", "grid", "each setting from the beginning", keeps=True))


def run(drawn: Drawn, folder: Path, *, simulate: bool) -> None:
    """The search and the grid of a task, as far as they are not there. ``simulate``: the search with the whole runtime."""
    file = file_of(drawn, folder)
    topology = load_topology(file)
    task = load_task(f"{HERE}/new_tasks.py:task", args_of(drawn), None)
    space = searched(topology, None, measured=False)
    searched_in = folder / f"{drawn.name}-search"
    if not (searched_in / "summary.json").exists():
        if simulate:
            run_tune(file, How(simulate=True, resume=searched_in if searched_in.exists() else None), run_dir=searched_in)
        else:
            directory = RunDirectory.create(drawn.name, exact=searched_in)
            shown = Shown(json_lines=False)
            shown.begin(topology, space, directory.path)
            tuning = Tuning(topology, space, directory, shown)
            tuning.strategy("omnivore", PlainRuns(topology, task, space.update_s))
            tuning.compare()
            directory.close()
    best = folder / f"{drawn.name}-grid.json"
    if not best.exists():
        found = Grid(PlainRuns(topology, task, space.update_s), space.update_s, 4 * drawn.updates).best()
        best.write_text(json.dumps(found, indent=1))


def table(drawn: list[Drawn], folder: Path) -> None:
    """Rows of Markdown."""
    print("| model, width | noise, inputs | batch, workers | a batch, network | target | best of the grid | search | searched | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for each in drawn:
        search, grid = folder / f"{each.name}-search" / "summary.json", folder / f"{each.name}-grid.json"
        if not search.exists() or not grid.exists():
            continue
        [row], best = json.loads(search.read_text())["strategies"], json.loads(grid.read_text())
        target = load_topology(folder / f"{each.name}.toml").tune.target_loss
        ratio = f"{row['seconds'] / best['seconds']:.2f}" if row["reached"] else f"not in {row['seconds']:.3g} s"
        found = "-" if row["groups"] is None else f"{row['groups']}, {row['momentum']:g}, {row['lr']:g}"
        grid_setting = best["setting"].replace(" group(s)", "").replace("momentum ", "").replace("learning rate ", "")
        print(
            f"| {each.kind}, {each.width} | {each.noise:g}, x {each.scale:g} | {each.batch}, {each.workers} "
            f"| {1000 * each.batch_s:g} ms, {each.bandwidth} Mbit/s, {each.latency} us | {target:g} "
            f"| {best['seconds']:.3g} s ({grid_setting}) | {row['seconds']:.3g} s ({found}) | {row['search_s']:.2g} s | {ratio} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draw", type=int, required=True)
    parser.add_argument("--only", type=int, action="append", help="these of the ten")
    parser.add_argument("--simulate", action="store_true", help="search with the whole runtime, not with plain loops")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    drawn = draw(given.draw)
    if not given.table:
        for number in range(COUNT) if given.only is None else given.only:
            run(drawn[number], folder, simulate=given.simulate)
    table(drawn, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
