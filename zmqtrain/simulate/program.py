"""Simulated runs for programs and notebooks::

run = zmqtrain.simulate("cluster.toml", groups=8)
run.seconds                                     # virtual ones
run.summary["step_s"]["median"]
run.plot()                                      # shown by a notebook; .save("run.svg") elsewhere
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from zmqtrain.errors import UsageError
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.endpoint import PeerId
from zmqtrain.observe.card import html, lines, picture
from zmqtrain.observe.fold import Fold
from zmqtrain.plan.decided import decided
from zmqtrain.run.report import LOG
from zmqtrain.simulate.run import Options, Result
from zmqtrain.simulate.run import simulate as simulated
from zmqtrain.svg import Picture
from zmqtrain.topology.find_task import find_task
from zmqtrain.topology.placement import place
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.target import Target, job_of

T = TypeVar("T")


@dataclass(slots=True, repr=False)
class SimulatedRun(Result):
    """A run on virtual time. Made by `simulate`; notebooks show its figures and its picture."""

    topology: Topology = field(kw_only=True)
    summary: dict[str, Any] = field(kw_only=True)
    """Steps, samples, times and metrics, as in ``summary.json``."""
    state: dict[str, Any] = field(kw_only=True)
    """Curves and workers, as the dashboard shows them."""

    def plot(self) -> Picture:
        """Curves of the loss, the metrics and the parts of a step, and a bar for each worker."""
        return picture(self.state)

    def __repr__(self) -> str:
        return "\n".join((*lines(self.state), *self._ending()))

    def _repr_html_(self) -> str:
        return html(self.state, said="\n".join(self._ending()))

    def _ending(self) -> list[str]:
        error = [f"{self.ending.status}: {self.ending.error['message']}"] if self.ending.error else []
        faults = [f"fault: {fault}" for fault in self.faults]
        return [f"{self.seconds:.6g} virtual seconds", *faults, *error, *(f"broken: {text}" for text in self.broken)]


def simulate(
    target: Target,
    *,
    seed: int | None = None,
    options: Options | None = None,
    data: str | os.PathLike[str] | None = None,
    set: Mapping[str, Any] | None = None,
    **settings: Any,
) -> SimulatedRun:
    """Run a job on virtual time. The same job, seed and options give the same run.

    It returns when the run has ended, also within an event loop or a notebook, which wait meanwhile.

    Args:
        target: the job, as for `launch`: a topology file, a `Topology`, a mapping, a task or its function. It needs ``[network]``,
            and modelled devices (``[compute] device = "modelled"``) unless torch is to train in simulated time.
        seed: of everything random; by default the job's.
        options: faults, a task, folders, callbacks (`zmqtrain.testing.Options`).
        data: where the task finds its data.
        set: other values that replace those of the target, by ``section.key``.
        settings: keys of ``[job]`` and ``[compute]``, and whole sections, as for `launch`.

    Raises:
        UsageError: the job cannot be simulated.
        DeadlockError: the run has not ended, but nothing can happen any more.
        TimeLimitError: it takes longer than ``[simulation] time_limit``.
    """
    job, options = job_of(target, settings, set or {}, caller="simulate"), options or Options()
    if data is not None:
        options = replace(options, data_path=os.fspath(data))
    topology = decided(_possible(job.topology, options), job.file.parent, options.data_path)
    placement = place(topology)
    fold = Fold({role.peer: role.host for role in (*placement.roles, *placement.spares)}, group_size=placement.group_size)
    gone = threading.Event()
    result = _beside_a_loop(lambda: simulated(topology, seed=seed, options=_watched(options, fold, gone)), gone)
    state = {**fold.state.to_dict(), "name": topology.job.name, "status": {"status": result.ending.status}}
    return SimulatedRun(
        result.ending,
        result.seconds,
        result.callbacks,
        result.faults,
        result.broken,
        result.launchers,
        result.records,
        topology=topology,
        summary={"status": result.ending.status, "seconds": result.seconds, **fold.summary.to_dict()},
        state=state,
    )


def _possible(topology: Topology, options: Options) -> Topology:
    """The topology. Raises `UsageError` if it is none that can be simulated."""
    if topology.compute.auto_groups:
        raise UsageError('simulate() cannot search for groups = "auto": give a number, or use zmqtrain tune --simulate')
    if options.task is not None:
        return topology
    if topology.job.task is None and topology.compute.device != "modelled":
        raise UsageError(
            f'{topology.job.name} has no task: give simulate() task="module:function", or device="modelled" and profile="resnet50"'
        )
    if topology.trains:
        assert topology.job.task is not None
        find_task(topology.job.task, topology.job.folders())
    return topology


def _watched(options: Options, fold: Fold, gone: threading.Event) -> Options:
    """The options, with callbacks by which ``fold`` learns what happens, too. ``gone``: nobody waits for the run any more."""

    def take(peer: PeerId, kind: str, event: Mapping[str, Any]) -> None:
        if gone.is_set():
            raise KeyboardInterrupt  # ends the loop, as Ctrl-C does
        if kind not in (LOG, "span"):
            fold.event(peer, event)

    def on_event(kind: str, values: dict[str, Any]) -> None:
        take(str(values.get("peer", COORDINATOR)), kind, {"kind": kind, "values": values})
        if options.on_event is not None:
            options.on_event(kind, values)

    def on_report(peer: PeerId, events: list[dict[str, Any]]) -> None:
        for event in events:
            take(peer, str(event.get("kind")), event)
        if options.on_report is not None:
            options.on_report(peer, events)

    def on_checkpoint(kind: str, values: dict[str, Any]) -> None:
        take(COORDINATOR, kind, {"kind": kind, "step": values["step"], "values": values})
        if options.on_checkpoint is not None:
            options.on_checkpoint(kind, values)

    return replace(options, on_event=on_event, on_report=on_report, on_checkpoint=on_checkpoint)


def _beside_a_loop(call: Callable[[], T], gone: threading.Event) -> T:
    """What the call returns. It has an event loop of its own, so that it gets a thread of its own where one runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1, "zmqtrain simulate") as pool:
        made = pool.submit(call)
        try:
            return made.result()
        except KeyboardInterrupt:
            gone.set()
            raise
