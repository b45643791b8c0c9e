"""The launcher: one run from the topology to its summary."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zmqtrain.errors import HostLostError, ZmqTrainError
from zmqtrain.launcher.agent import LOG
from zmqtrain.launcher.engine import Engine, Handle, make_engine
from zmqtrain.launcher.report import headline, report_of
from zmqtrain.membership.actions import Failure, Outcome
from zmqtrain.membership.client import COORDINATOR
from zmqtrain.membership.coordinator import Coordinator
from zmqtrain.membership.description import RunDescription, serve_description
from zmqtrain.membership.environment import RoleEnvironment, net_settings
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.zeromq import open_zeromq
from zmqtrain.observe.live import View, closing_lines
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.observe.summary import Summary
from zmqtrain.topology.timeouts import Ladder
from zmqtrain.train.checkpoint_collector import CheckpointCollector

INTERRUPTED = 128 + signal.SIGINT
#: What roles need in equal versions; written into the summary.
PACKAGES = ("zmqtrain", "torch", "pyzmq", "msgpack", "numpy")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a launch ended."""

    status: str
    exit_code: int
    error: dict[str, Any] | None = None


class Launch:
    """One run. Make it, then ``exit_code = await launch.run()``."""

    def __init__(self, description: RunDescription, directory: RunDirectory, view: View) -> None:
        self._description, self._directory, self._view = description, directory, view
        self._topology, self._placement = description.topology, description.placement
        self._ladder = Ladder.of(self._topology.job.timeout_s)
        self._summary = Summary()
        self._host_of = {role.peer: role.host for role in self._placement.roles}
        self._token = secrets.token_hex(16)
        self._interrupts = 0
        self._coordinator: Coordinator | None = None
        self._life: asyncio.Task[Ending] | None = None

    async def run(self) -> int:
        """Start everything, wait until it has ended, and write the run directory. Returns the exit code."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._view.begin(self._title())
        with self._signals(loop):
            self._life = asyncio.create_task(self._live(), name="run")
            try:
                ending = await self._life
            except asyncio.CancelledError:
                ending = Ending("interrupted", INTERRUPTED)
            except (ZmqTrainError, ExceptionGroup) as error:
                report = report_of(error, "launcher")
                ending = Ending("failed", report["exit_code"], report)
        self._view.end()
        self._write_up(ending, loop.time() - began)
        return ending.exit_code

    async def _live(self) -> Ending:
        async with AsyncExitStack() as stack:
            settings = net_settings(self._ladder, self._token, port=self._topology.job.port)
            endpoint = await open_zeromq(COORDINATOR, settings=settings)
            stack.push_async_callback(endpoint.close)
            coordinator = Coordinator(
                endpoint, self._placement, self._ladder, on_event=self._membership_event, on_report=self._report
            )
            self._coordinator = coordinator
            serve_description(endpoint, self._description)
            collector = CheckpointCollector.of(
                endpoint,
                self._directory.checkpoints,
                self._topology,
                self._placement,
                resume=None if self._description.resume is None else Path(self._description.resume),
            )
            engine = make_engine(self._topology.engine.kind)
            async with asyncio.TaskGroup() as group:
                collecting = group.create_task(collector.run(), name="collect checkpoints")
                handles = await self._start_agents(stack, engine, endpoint.address)
                # Whatever is left of them is ended before the endpoint closes.
                outcome = await self._watch(coordinator, handles)
                collecting.cancel()
            return self._ending(outcome)

    async def _start_agents(self, stack: AsyncExitStack, engine: Engine, address: str) -> dict[str, Handle]:
        handles: dict[str, Handle] = {}
        stack.push_async_callback(self._stop_agents, engine, handles)
        command = (sys.executable, "-m", "zmqtrain", "agent")
        for host in self._topology.hosts:
            if not self._placement.of_host(host.name):
                continue
            environment = RoleEnvironment(f"agent/{host.name}", address, self._token, timeout_s=self._topology.job.timeout_s)
            handles[host.name] = await engine.start(host, command, environment.to_environ())
        return handles

    async def _stop_agents(self, engine: Engine, handles: dict[str, Handle]) -> None:
        """End what is left of them, all at once; without any patience when the person has none."""
        grace_s = self._ladder.grace_s if self._interrupts < 2 else 0.0
        await asyncio.gather(*(engine.stop(handle, grace_s) for handle in handles.values()))

    async def _watch(self, coordinator: Coordinator, handles: dict[str, Handle]) -> Outcome:
        """The run's outcome. An agent that ends before its time is a lost host: its roles have died with it."""
        running = asyncio.create_task(coordinator.run(), name="coordinator")
        ends = {asyncio.create_task(handle.wait(), name=f"agent of {host}"): host for host, handle in handles.items()}
        try:
            while not running.done():
                done, _ = await asyncio.wait([running, *ends], return_when=asyncio.FIRST_COMPLETED)
                if running in done:
                    break
                for task in done:
                    host = ends.pop(task)  # type: ignore[arg-type]
                    left = f"agent/{host}" not in coordinator.view.members
                    if not (left and coordinator.running.is_set()):
                        coordinator.host_ended(host, f"its agent ended with code {task.result()}")
            return running.result()
        finally:
            for task in [running, *ends]:
                task.cancel()
            await asyncio.wait([running, *ends])

    # What happens -------------------------------------------------------------------------------------------------------------

    def _membership_event(self, kind: str, values: dict[str, Any]) -> None:
        peer = str(values.get("peer", COORDINATOR))
        self._record(peer, {"kind": kind, "time": None, "step": None, "values": values})
        if kind == "running":
            self._view.note(str(values["reason"]))
        elif kind in ("failed", "halt") and not self._interrupts:  # why comes at the end, once, when all have had their say
            self._view.note(f"stopping: {peer} {'failed' if kind == 'failed' else 'asks for it'}")

    def _report(self, peer: PeerId, events: list[dict[str, Any]]) -> None:
        for event in events:
            kind = event.get("kind")
            if kind == LOG:
                self._directory.log(str(event["peer"]), str(event["text"]))
                if not event.get("quiet"):
                    self._view.log(str(event["peer"]), str(event["text"]))
            elif kind == "span":
                self._directory.trace.add(peer, event)
            else:
                self._record(peer, event)
        self._directory.flush()

    def _record(self, peer: PeerId, event: dict[str, Any]) -> None:
        role, _, rank = peer.partition("/")
        line = {
            "time": event.get("time") or time.time(),
            "host": self._host_of.get(peer, rank if role == "agent" else ""),
            "role": role,
            "rank": int(rank) if rank.isdigit() else None,
            "step": event.get("step"),
            "kind": str(event.get("kind")),
            "values": event.get("values") or {},
        }
        self._directory.event(line)
        self._summary.add(peer, line)
        self._view.event(line, asyncio.get_running_loop().time())

    # Signals ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._interrupt)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        """The first time the run is stopped in good order, the second time at once."""
        self._interrupts += 1
        if self._coordinator is not None and self._interrupts == 1:
            self._view.note("stopping (once more to stop at once)")
            self._coordinator.halt({"kind": "interrupted", "message": "the run was interrupted"})
        elif self._life is not None:
            self._life.cancel()

    # The end ------------------------------------------------------------------------------------------------------------------

    def _ending(self, outcome: Outcome) -> Ending:
        if self._interrupts:
            return Ending("interrupted", INTERRUPTED)
        if outcome.status == "done":
            return Ending("done", 0)
        cause = outcome.cause
        if cause is not None and not (cause.consequence and outcome.halt):
            report = _report_of_failure(cause)
            return Ending("failed", int(report["exit_code"]), report)
        report = dict(outcome.halt or {"message": outcome.reason})
        report.setdefault("exit_code", 64)
        return Ending("halted", int(report["exit_code"]), report)

    def _write_up(self, ending: Ending, seconds: float) -> None:
        directory = self._directory
        values = self._summary.to_dict()
        directory.write_json(
            "summary.json",
            {
                "name": self._topology.job.name,
                "status": ending.status,
                "exit_code": ending.exit_code,
                "world": "real",
                "seconds": seconds,
                **values,
                "hosts": [host.name for host in self._topology.hosts],
                "roles": {"worker": self._placement.world_size, "server": self._placement.servers},
                "groups": self._placement.groups,
                "group_size": self._placement.group_size,
                "versions": {"python": platform.python_version(), **_versions()},
            },
        )
        if ending.error is not None:
            directory.write_json("error.json", ending.error)
        directory.close()
        (directory.path / "pid").unlink(missing_ok=True)
        if ending.status == "done":
            for line in closing_lines(self._summary, seconds, str(directory.path)):
                self._view.note(line)
        elif ending.error is not None:
            print(_failure_text(ending.error, directory.path), file=sys.stderr, flush=True)
        else:
            self._view.note(f"{ending.status} after {seconds:.1f} s; what there is of it: {directory.path}")

    def _title(self) -> str:
        placement, exchange = self._placement, self._topology.exchange
        servers = f", {placement.servers} model servers ({exchange.policy})" if placement.servers else f", {exchange.kind}"
        return (
            f"{self._topology.job.name}: {placement.groups} group(s) of {placement.group_size} worker(s){servers} "
            f"on {len(placement.hosts)} host(s); run directory {self._directory.path}"
        )


def _report_of_failure(failure: Failure) -> dict[str, Any]:
    if failure.report is not None:
        return dict(failure.report)
    error = failure.error
    report = report_of(error, failure.peer)
    if isinstance(error, HostLostError) and failure.exit_code is not None and failure.exit_code < 0:
        report["exit_code"] = 128 - failure.exit_code
    return {**report, "host": failure.host, "traceback": ""}


def _failure_text(error: dict[str, Any], directory: Path) -> str:
    if "type" not in error:
        return f"stopped: {error.get('message')}\neverything about it: {directory}"
    trace = f"{error['shown'].rstrip()}\n\n" if error.get("shown") else ""
    return f"\n{trace}{headline(error)}\neverything about it: {directory} (error.json, logs/)"


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_pid(directory: RunDirectory) -> None:
    """Leave what ``zmqtrain status`` and ``stop`` look for: this process, by number and start time (numbers are used again)."""
    import psutil

    directory.write("pid", f"{os.getpid()} {psutil.Process().create_time()}\n")
