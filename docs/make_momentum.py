"""Momentum kept or compensated among asynchronous groups: updates to a loss, simulated, with models that really learn.

Compensated in two ways: so that it adds up to 0.9 with the implicit momentum, and so that both together act like 0.9.

    python docs/make_momentum.py lenet FOLDER --data DIR
    python docs/make_momentum.py cifarnet FOLDER --data DIR

Rows of Markdown go to the standard output, one a number of groups and learning rate. The network is fast, so that each group of one
machine goes at its own pace.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from make_tuning import file_of

from zmqtrain.exchange.momentum import compensated, implicit_momentum
from zmqtrain.experiment.runs import Folders, SimulatedRuns
from zmqtrain.topology.load import load_topology
from zmqtrain.tune.trial import Outcome, Setting, Trial

MOMENTUM = 0.9
TARGETS = {"lenet": 0.35, "cifarnet": 1.9, "lstm": 2.6}


def shown(outcome: Outcome) -> str:
    """When it reached the target, or where it ended."""
    if outcome.diverged:
        return "diverged"
    return f"never ({outcome.loss:.2f})" if outcome.reached_updates is None else str(outcome.reached_updates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TARGETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--updates", type=int, default=1500)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = given.folder.resolve()
    topology = load_topology(file_of(given.name, folder, given.data, network="1 Gbit/s"))
    tune = topology.tune.model_copy(update={"target_loss": TARGETS[given.name], "smooth": 20})
    number = 0
    for groups in (4, 8):
        implicit = implicit_momentum(groups - 1)
        momenta = (MOMENTUM, max(0.0, MOMENTUM - implicit), compensated(MOMENTUM, implicit))
        for rate in given.rates:
            for seed in given.seeds:
                job = topology.model_copy(update={"job": topology.job.model_copy(update={"seed": seed}), "tune": tune})
                found = []
                for momentum in momenta:
                    runs = SimulatedRuns(job, Folders(folder / "runs" / given.name), given.data)
                    number += 1
                    setting = Setting(groups, momentum, rate)
                    trial = Trial(number, setting, given.updates, "train", "momentum", "kept or compensated", None, 20.0)
                    found.append(f"{momentum:.3g}: {shown(runs.run(trial))}")
                print(f"| {given.name} | {groups} | {rate:g} | {seed} | {' | '.join(found)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
