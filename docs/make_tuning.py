"""The figures of tuning.md: ways to tune, on a simulated cluster of eight machines, with three small models that really learn.

    python docs/make_tuning.py runs lenet FOLDER --data DIR       # all strategies; again: go on after an interruption
    python docs/make_tuning.py runs lenet FOLDER --data DIR --groups      # to the target with all numbers of groups
    python docs/make_tuning.py table FOLDER

The machines are so slow, and their network so narrow, that a training takes about an hour of simulated time, and that an update of
the small model takes the time that one of a large one takes on an ordinary network.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from zmqtrain.cli.tune import How, names_of, run_tune
from zmqtrain.train.task import load_task

HERE = Path(__file__).parent
#: The loss to reach.
TARGETS = {"lenet": 0.06, "cifarnet": 1.6, "lstm": 1.95}
#: Learning rates to choose from.
RATES = {"lenet": [0.001, 0.003, 0.01, 0.03], "cifarnet": [0.001, 0.003, 0.01], "lstm": [0.03, 0.1, 0.3, 1.0]}
BATCH = 32
#: Seconds of a machine for a group's whole batch, and for sending the model once.
COMPUTE_S, SEND_S = 5.2, 0.2

FILE = """
[job]
name = "{name}"
task = "{folder}/tuning_tasks.py:{name}"
timeout = "600 s"
seed = {seed}
[[hosts]]
name = "node[1-9]"
slots = 1
[compute]
groups = 8
batch_size = {batch}
device = "modelled"
profile = "{profile}"
noise = {{ kind = "normal", spread = 0.2 }}
[network]
bandwidth = "{network}"
latency = "1 ms"
[simulation]
payload = "real"
time_limit = "240 h"
[observe]
trace_steps = 0
[optimizer]
look_ahead = "none"     # as when the figures were measured
[tune]
target_loss = {target}
smooth = 100
probe = 28
cold = 100
period = 6000
beyond = 1.25
learning_rates = {rates}
time_limit = "1 h"
"""


def file_of(name: str, folder: Path, data: str, *, network: str | None = None, seed: int = 1) -> Path:
    """The topology file of a task, and its profile. ``network``: its bandwidth, instead of the narrow one."""
    folder.mkdir(parents=True, exist_ok=True)
    task = load_task(f"{HERE}/tuning_tasks.py:{name}", {}, data, folders=(str(HERE.parent),))
    torch.manual_seed(1)
    model = task.model()
    layers = [
        (each, sum(parameter.numel() for parameter in module.parameters(recurse=False))) for each, module in model.named_modules()
    ]
    sizes = {each: numel for each, numel in layers if numel}
    part_s = COMPUTE_S / len(sizes)
    described = [{"name": each, "numel": sizes[each], "forward_s": part_s / 3, "backward_s": part_s * 2 / 3} for each in sizes]
    profile = folder / f"{name}.json"
    profile.write_text(json.dumps({"layers": described, "batch_size": BATCH}, indent=1))
    file = folder / f"{name}.toml"
    network = network or f"{sum(sizes.values()) * 32 / SEND_S / 1000:.0f} kbit/s"
    values = {"batch": BATCH, "profile": profile, "network": network, "target": TARGETS[name], "rates": RATES[name], "seed": seed}
    file.write_text(FILE.format(name=name, folder=HERE, **values))
    return file


def runs(name: str, folder: Path, data: str, *, groups: bool, only: list[str], seed: int) -> int:
    """Run, or go on."""
    torch.set_num_threads(1)
    path = folder / f"{name}-{'groups' if groups else 'strategies'}"
    file = file_of(name, folder, data, seed=seed)
    begun = (path / "topology.toml").exists()
    how = How(simulate=True, curves=groups, strategies=names_of(only or ["all"]), resume=path if begun else None)
    return run_tune(file, how, data=data, run_dir=None if begun else path)


def table(folder: Path) -> int:
    """What came of it, as rows of Markdown."""
    for name in TARGETS:
        found = folder / f"{name}-groups" / "summary.json"
        curves = json.loads(found.read_text())["curves"] if found.exists() else []
        for row in curves:
            took = "not within 1.25 times the best" if row["seconds"] is None else f"{row['seconds']:.0f} s"
            print(f"| {name} | {row['groups']} groups, momentum {row['momentum']}, lr {row['lr']:g} | | {took} |")
        best = min((row["seconds"] for row in curves if row["seconds"]), default=None)
        found = folder / f"{name}-strategies" / "summary.json"
        for row in json.loads(found.read_text())["strategies"] if found.exists() else []:
            ratio = f"{row['seconds'] / best:.2f}" if best and row["reached"] else "-"
            setting = "-" if row["groups"] is None else f"{row['groups']} groups, momentum {row['momentum']:.2f}, lr {row['lr']:g}"
            took = f"{row['seconds']:.0f} s" if row["reached"] else f"not in {row['seconds']:.0f} s (loss {row['loss']:.3f})"
            searched = f"{row['search_s']:.0f} s, {row['search_share']:.0%}"
            print(f"| {name} | {row['strategy']} | {setting} | {took} | {searched} | {ratio} |")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    run = what.add_parser("runs")
    run.add_argument("name", choices=TARGETS)
    run.add_argument("folder", type=Path)
    run.add_argument("--data", required=True)
    run.add_argument("--groups", action="store_true")
    run.add_argument("--only", action="append", default=[], help="one of the strategies")
    run.add_argument("--seed", type=int, default=1)
    what.add_parser("table").add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.what == "table":
        return table(given.folder)
    return runs(given.name, given.folder.resolve(), given.data, groups=given.groups, only=given.only, seed=given.seed)


if __name__ == "__main__":
    sys.exit(main())
