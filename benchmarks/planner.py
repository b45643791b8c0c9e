"""``python -m benchmarks planner``: how long it takes to plan for many layers and many processes.

Seconds of one processor, and the paths that the search has looked at. Nothing is trained or sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.case import Case, case_of
from zmqtrain.plan.layers import Stage, stages
from zmqtrain.plan.link import Link
from zmqtrain.plan.ours import Ours
from zmqtrain.plan.planner import plan
from zmqtrain.plan.problem import Problem
from zmqtrain.plan.shipped import Alexnet

#: 1 Gbit/s, as this runtime sees it.
LINK = Link(350e-6, 8e-9, 1 / 20e9)
FLOPS = 1e12
#: Numbers of layers and processes: AlexNet's layers over and over. The last two numbers have as many divisors as any below them.
SIZES = ((150, 4096), (8, 5040), (8, 720_720))


def bench_planner(sizes: Sequence[tuple[int, int]] = SIZES) -> Iterator[Case]:
    """Cases for each number of layers and processes, with overlap and without."""
    for count, processes in sizes:
        for overlap in (0.0, 1.0):
            problem = Problem(repeated(count), 2 * processes, processes, LINK, Ours(), overlap=overlap, flops_per_s=FLOPS)
            began = time.process_time()
            found = plan(problem)
            seconds = time.process_time() - began
            what = f"{count} layers, {processes:,} processes, {'perfect overlap' if overlap else 'no overlap'}"
            yield case_of("planner", what, seconds, "s of a processor", digits=3)
            yield case_of("planner", f"{what}: paths", found.ways, "paths")


def repeated(count: int) -> tuple[Stage, ...]:
    """The first ``count`` layers of AlexNet after AlexNet, without pools."""
    layers = [stage.head for stage in stages(Alexnet().layers())]
    names = (replace(layers[number % len(layers)], name=f"layer {number}") for number in range(count))
    return stages(tuple(names))
