"""Runs one job with many seeds, each with another order of events and, if asked for, faults of its own, to find violations."""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from zmqtrain.errors import SimulationError
from zmqtrain.run.faults import Fault
from zmqtrain.simulate.faults import departures, launcher_deaths, random_faults
from zmqtrain.simulate.run import Options, Result, simulate
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology

#: Where faults come from: the file's schedule, the seed, or none.
FaultSource = Literal["file", "random", "none"]


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one seed."""

    seed: int
    status: str
    error: str
    """What ended the run, if it ended badly; that alone is no violation."""
    seconds: float
    faults: tuple[str, ...]
    broken: tuple[str, ...]


def horizon_of(topology: Topology) -> float:
    """How long the job takes without faults, in virtual seconds, which is when random faults should occur."""
    return simulate(topology, options=Options(faults=())).seconds


def faults_for(topology: Topology, seed: int, source: FaultSource, horizon_s: float) -> Sequence[Fault] | None:
    """The schedule of this seed; ``None``: the file's."""
    if source == "file":
        return None
    if source == "none":
        return ()
    draw = random.Random(f"{seed}/faults")
    elastic, moves = topology.elastic, topology.moves_shards
    placement = place(topology)
    faults = random_faults(placement, topology.job.timeouts, horizon_s, draw, elastic=elastic, moves_shards=moves)
    if elastic and not moves:
        faults = (*faults, *departures(placement, horizon_s, random.Random(f"{seed}/departures")))
    return (*faults, *launcher_deaths(topology.job.timeouts, horizon_s, random.Random(f"{seed}/launcher")))


def try_seed(seed: int, topology: Topology, source: FaultSource, horizon_s: float) -> Trial:
    """Run the job once with this seed."""
    faults = faults_for(topology, seed, source, horizon_s)
    try:
        result = simulate(topology, seed=seed, options=Options(faults=faults, usual_s=horizon_s or None, compare_model=True))
    except SimulationError as error:
        return Trial(seed, "stuck", "", getattr(error, "now_s", 0.0), tuple(map(str, faults or ())), (str(error),))
    return trial_of(seed, result)


def trial_of(seed: int, result: Result) -> Trial:
    """A result in brief."""
    error = result.ending.error or {}
    text = f"{error.get('type', '')}: {error.get('message', '')}" if error else ""
    faults = tuple(map(str, result.faults))
    return Trial(seed, result.ending.status, text, result.seconds, faults, tuple(result.broken))


def explore(topology: Topology, seeds: Sequence[int], *, faults: FaultSource, jobs: int = 1) -> Iterator[Trial]:
    """Try all seeds, in order, in ``jobs`` processes at a time."""
    horizon_s = horizon_of(topology) if faults == "random" else 0.0
    attempt = partial(try_seed, topology=topology, source=faults, horizon_s=horizon_s)
    if jobs <= 1:
        yield from map(attempt, seeds)
        return
    # Not forked from here: this process may have threads (torch's), whose locks a fork would copy. One process without any imports
    # torch, and the others are forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            yield from pool.map(attempt, seeds, chunksize=max(1, min(20, len(seeds) // (4 * jobs))))
        except BaseException:  # Ctrl-C, or the caller stops iterating: running trials are not waited for
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
