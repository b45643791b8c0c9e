"""What a run leaves behind: events, logs and trace as they arrive, and the summary at the end. The same in every world."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from zmqtrain.errors import RunDirectoryError
from zmqtrain.exchange.momentum import gradients_of
from zmqtrain.membership.description import RunDescription
from zmqtrain.membership.environment import COORDINATOR
from zmqtrain.net.endpoint import PeerId
from zmqtrain.observe.account import SampleAccount, account_lines
from zmqtrain.observe.line import line_of
from zmqtrain.observe.live import LiveView, closing_lines
from zmqtrain.observe.run_directory import RunDirectory
from zmqtrain.observe.sinks.base import RunFacts
from zmqtrain.observe.sinks.fan_out import FanOut
from zmqtrain.observe.slowness import Slowness
from zmqtrain.observe.summary import Summary
from zmqtrain.observe.sums import EventSums
from zmqtrain.run.again import Again
from zmqtrain.run.ending import Ending
from zmqtrain.run.report import LOG, headline
from zmqtrain.topology.placement import Placement
from zmqtrain.topology.rounded import rounded_duration
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.model_file import model_lines
from zmqtrain.versions import versions
from zmqtrain.words import counted

#: A worker whose own error ends the run has closed its endpoint before its agent reports the error, which is the one thing to say.
_REPORTED_WITHIN_S = 1.0


class RunRecord:
    """Takes the reports about a run, writes them to the run directory and shows them."""

    def __init__(
        self,
        description: RunDescription,
        directory: RunDirectory,
        view: LiveView,
        *,
        world: Literal["real", "emulated", "simulated"],
        clock: Callable[[], float] | None = None,
        sinks: FanOut | None = None,
        lasting: bool = False,
    ) -> None:
        """``clock``: the clock for the view; by default the loop's. ``sinks``: where figures go, too; they have begun, or begin
        before the first event of a worker. ``lasting``: another launcher may go on with the record, so that nothing is held back
        of what its sender counts as arrived."""
        self._topology, self._placement = description.topology, description.placement
        self._resumed, self._script = description.resume, bool(description.script)
        self._directory, self._view, self._world = directory, view, world
        directory.on_failure = view.note
        self.summary = Summary()
        self._account = SampleAccount(0 if self._resumed is None else None)
        self._slowness = Slowness()
        self._sums = EventSums(description.topology.observe.most_single_events)
        self.quiet = False
        """Do not show that roles fail or stop, because the user asked to stop."""
        self.stopped_at: int | None = None
        """The step before which all workers have stopped on request."""
        self.newest_s = 0.0
        """The time of the newest event."""
        self._clock, self._lasting = clock, lasting
        self._sinks = FanOut() if sinks is None else sinks
        self._unkept: list[int] = []  # the steps of checkpoints that could not be written
        self._losses: list[str] = []  # reasons of losses after which the run continued
        self._held: list[str] = []  # what is shown of them if none turns out to be the run's end
        self.restarts = 0
        """How often the run has begun again."""
        self._host_of = {role.peer: role.host for role in (*self._placement.roles, *self._placement.spares)}

    def take_up(self) -> None:
        """Take up what another launcher has recorded of this run, from its events."""
        with (self._directory.path / "events.jsonl").open(encoding="utf-8") as events:
            for text in events:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue  # a line that a lost machine has left
                role, rank = line["role"], line["rank"]
                peer = role if role == COORDINATOR else f"{role}/{line['host'] if rank is None else rank}"
                if line["kind"] == "stopped":
                    self.stopped_at = line["step"]
                elif line["kind"] == "lost" and self._topology.elastic:
                    self._losses.append(str(line["values"]["reason"]))
                elif line["kind"] == "restart":
                    self._count_restart(line["values"])
                self.summary.add(peer, line)
                self._account.add(peer, line)

    def begins_again(self, again: Again, ending: Ending, step: int | None) -> None:
        """The run begins again after this ending, from the checkpoint of this step; ``None``: it has kept none, and begins as it
        did before."""
        assert ending.error is not None
        self._write(self._sums.rest())
        self._slowness = Slowness()
        self.stopped_at = None
        for role in self._placement.everyone:
            self._directory.trace.again(role.peer)
        reason, most = headline(ending.error), self._topology.job.restarts
        values = {"number": again.number, "counts": again.counts, "reason": reason, "without": list(again.without)}
        kept = None if step is None else self._account.before(step, self._topology)
        self.event(COORDINATOR, {"kind": "restart", "step": step, "values": {**values, "samples": kept}})
        self._count_restart(values)
        none = "a script goes on from what it has saved itself" if self._script else "no checkpoint was kept"
        where = f"from the beginning: {none}" if step is None else f"from the checkpoint of step {step}"
        without = f", without {', '.join(again.without)}" if again.without else ""
        self._view.note(f"{reason}\nthe run begins again {where}{without} (restart {again.number} of {most})")
        self._place(again.topology, again.placement)
        self._directory.flush()

    def _count_restart(self, values: Mapping[str, Any]) -> None:
        self.restarts = int(values["number"])
        if values["counts"]:
            self._losses.append(str(values["reason"]))

    def settle(self, description: RunDescription) -> None:
        """Set the description, once the hosts and the placement are known."""
        self._place(description.topology, description.placement)

    def _place(self, topology: Topology, placement: Placement) -> None:
        self._topology, self._placement = topology, placement
        self._host_of = {role.peer: role.host for role in (*self._placement.roles, *self._placement.spares)}
        self._view.regroup({role.peer: role.group for role in self._placement.everyone})

    def membership_event(self, kind: str, values: dict[str, Any]) -> None:
        """Take an event of the coordinator (`zmqtrain.membership.coordinator.EventCallback`)."""
        peer = str(values.get("peer", COORDINATOR))
        self.event(peer, {"kind": kind, "time": None, "step": None, "values": values})
        self._directory.flush()
        if kind == "running":
            self._show(str(values["reason"]))
        elif kind == "lost" and self._topology.elastic:
            self._losses.append(str(values["reason"]))
            self._hold(f"continuing without {peer}: {values['reason']}")
        elif kind == "no workers":
            self._hold(str(values["reason"]))
        elif kind == "backup" and values.get("alone"):
            self._show(f"warning: {values['reason']}")
        elif kind == "join" and values.get("late"):
            self._directory.trace.again(peer)
            came = {f"agent/{spare.host}" for spare in self._placement.spares} | {spare.peer for spare in self._placement.spares}
            self._show(f"{peer} has joined the run" if peer in came else f"{peer} is back")
        elif kind == "failed":
            self._held.clear()
        if kind in ("failed", "halt") and not self.quiet:  # the reason is shown once, at the end, after all reports
            self._show(f"stopping: {peer} {'failed' if kind == 'failed' else 'asks for it'}")

    def _show(self, text: str) -> None:
        self._show_held()
        self._view.note(text)

    def _hold(self, text: str) -> None:
        self._held.append(text)
        if len(self._held) == 1:
            asyncio.get_running_loop().call_later(_REPORTED_WITHIN_S, self._show_held)

    def _show_held(self) -> None:
        held, self._held = self._held, []
        for text in held:
            self._view.note(text)

    def checkpoint_event(self, kind: str, values: dict[str, Any]) -> None:
        """Take an event about a checkpoint (`zmqtrain.train.checkpoint.collector.OnEvent`)."""
        self.event(COORDINATOR, {"kind": kind, "step": values["step"], "values": values})
        self._directory.flush()
        if kind in ("checkpoint failed", "model failed") and "cannot be written" in str(values["reason"]):
            self._unkept.append(values["step"])
            if len(self._unkept) > 1:
                return  # said once, and counted at the end
        if kind != "checkpoint complete":
            self._view.note(f"warning: {values['reason']}")

    def report(self, peer: PeerId, events: list[dict[str, Any]]) -> None:
        """Take the reports of a role (`zmqtrain.membership.coordinator.ReportCallback`)."""
        for event in events:
            kind = event.get("kind")
            if kind == LOG:
                self._directory.log(str(event["peer"]), str(event["text"]))
                if not event.get("quiet"):
                    self._view.log(str(event["peer"]), str(event["text"]))
            elif kind == "span":
                self._directory.trace.add(peer, event)
            else:
                self.event(peer, event)
        self._write(self._sums.rest() if self._lasting else self._sums.due())
        self._directory.flush()

    def note(self, text: str) -> None:
        """Show a line to the user, and record it."""
        self.event(COORDINATOR, {"kind": "note", "values": {"text": text}})
        self._directory.flush()
        self._view.note(text)

    def agent_log(self, host: str, text: str) -> None:
        """Take the output of an agent on another machine."""
        self.report(COORDINATOR, [{"kind": LOG, "peer": f"agent/{host}", "text": text}])

    def event(self, peer: PeerId, event: Mapping[str, Any]) -> None:
        """Record an event of a role in the files, the summary and the sinks."""
        line = line_of(peer, event, self._host_of)
        if line["kind"] == "stopped":
            self.stopped_at = event["step"]
        self.newest_s = max(self.newest_s, line["time"])
        self._write(self._sums.add(line))
        self.summary.add(peer, line)
        self._account.add(peer, line)
        self._sinks.take(line)
        while (text := self._sinks.said()) is not None:
            self.note(text)
        values = dict(event.get("values") or {})
        if line["kind"] == "view" and values.get("members") == [peer] and self._topology.exchange.kind == "gossip":
            self.note(f"warning: {peer} is alone from step {line['step']} on: it has no other worker to gossip with")
        if line["kind"] == "warning":
            self._view.note(f"warning: {peer}: {values.get('text')}")
        if line["kind"] == "slow":
            self._view.note(str(values["reason"]))
        self._view.event(line, (self._clock or asyncio.get_running_loop().time)())

        for slow in self._slowness.add(peer, line):
            self.event(slow.peer, {"kind": "slow", "time": line["time"], "step": line["step"], "values": slow.values()})

    def _write(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            self._directory.event(line)

    def facts(self) -> RunFacts:
        """The facts about the run that sinks get before its events."""
        return RunFacts(self._topology.job.name, self._directory.path, self._world, self._topology.to_dict())

    def title(self) -> str:
        """The run in one line."""
        placement, exchange = self._placement, self._topology.exchange
        grid = f", {_divided(self._topology)}" if self._topology.divided else ""
        servers = (
            f", {counted(placement.servers, 'model server')} ({exchange.policy})" if placement.servers else f", {exchange.kind}"
        )
        if placement.fc_servers:
            servers += ", FC server" if placement.fc_servers == 1 else f", {placement.fc_servers} FC servers"
        workers = f"{counted(placement.groups, 'group')} of {counted(placement.group_size, 'worker')}"
        if self._topology.hosts_open and self._topology.hosts_decide:
            workers = "one worker for each device or host"
        return (
            f"{self._topology.job.name}: {workers}{grid}{servers} on {_hosts(self._topology)}; run directory {self._directory.path}"
        )

    def write_up(self, ending: Ending, seconds: float, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write and show how the run ended, and close its directory. ``more`` is added to the summary, which is returned."""
        self._show_held()
        directory = self._directory
        # A script's batches are its own.
        account = None if self._script else self._account.to_dict(self._topology, done=ending.status == "done")
        summary = {
            "name": self._topology.job.name,
            "status": ending.status,
            "exit_code": ending.exit_code,
            "world": self._world,
            "seconds": seconds,
            **self.summary.to_dict(),
            "hosts": [host.name for host in self._topology.hosts],
            "roles": {
                "worker": self._placement.world_size,
                "server": self._placement.servers,
                **({"fc": self._placement.fc_servers} if self._placement.fc_servers else {}),
            },
            "groups": self._placement.groups,
            "group_size": self._placement.group_size,
            "grid": self._topology.compute.grid or f"1x{self._placement.group_size}",
            "gradients": gradients_of(self._topology),
            "losses": self._losses,
            "restarts": self.restarts,
            "account": account,
            "versions": versions(),
            **(more or {}),
        }
        self._write(self._sums.rest())
        for text in self._sinks.end(ending.status, summary):
            self.note(text)
        directory.leave("summary.json", summary)
        if ending.error is not None:
            directory.leave("error.json", ending.error)
        directory.close()
        if ending.status == "done":
            for line in closing_lines(self.summary, seconds, "" if directory.gone else str(directory.path)):
                self._view.note(line)
            for line in account_lines(account):
                self._view.note(line)
            if self._losses:
                self._view.note(f"lost during the run: {'; '.join(self._losses)}")
        elif ending.error is not None:
            print(_failure_text(ending.error, None if directory.gone else directory.path), file=sys.stderr, flush=True)
        elif ending.status == "preempted":
            self._view.note(f"preempted after step {self.stopped_at} ({rounded_duration(seconds)}): {self._how_to_go_on()}")
        elif self.stopped_at is not None:
            self._view.note(f"{ending.status} after step {self.stopped_at} ({rounded_duration(seconds)}): {self._how_to_go_on()}")
        else:
            self._view.note(
                f"{ending.status} after {rounded_duration(seconds)}{'' if directory.gone else f'; its files: {directory.path}'}"
            )
        for line in [*model_lines(directory.path, self.summary.steps), *self._unwritten_lines()]:
            self._view.note(line)
        return summary

    def exit_code(self, ending: Ending) -> int:
        """The exit code of a run that ended like this, once it is written up: also where all went well, but not all was kept."""
        return ending.exit_code or (RunDirectoryError.exit_code if self._unwritten_lines() else 0)

    def _unwritten_lines(self) -> list[str]:
        missing = self._directory.unwritten
        if self._unkept and not self._directory.gone:
            steps = f"of step {self._unkept[0]}" if len(self._unkept) == 1 else f"from step {self._unkept[0]} to {self._unkept[-1]}"
            missing.append(f"{len(self._unkept)} checkpoint{'s' * (len(self._unkept) > 1)} {steps}")
        return [f"not kept: {'; '.join(missing)}"] if missing else []

    def _how_to_go_on(self) -> str:
        """How to continue a run that was asked to stop with a checkpoint."""
        if self._script:
            return "a script continues from what it has saved itself"
        newest = self.summary.newest_checkpoint
        if newest is not None and newest == self.stopped_at:
            return f"--resume {self._directory.path} continues"
        if newest is not None:
            return f"no checkpoint of that step was kept; --resume {self._directory.path} continues from step {newest}"
        return "no checkpoint was kept" if self._resumed is None else f"nothing was trained; --resume {self._resumed} continues"


def _failure_text(error: dict[str, Any], directory: Path | None) -> str:
    """``directory``: where to read more; ``None``: nowhere."""
    if "type" not in error:
        return f"stopped: {error.get('message')}" + (f"\nsee {directory}" if directory else "")
    trace = f"{error['shown'].rstrip()}\n\n" if error.get("shown") else ""
    return f"\n{trace}{headline(error)}" + (f"\nsee {directory} (error.json, logs/)" if directory else "")


def _hosts(topology: Topology) -> str:
    if topology.hosts_open:
        return "the hosts that join"
    return counted(len(topology.hosts), "host")


def _divided(topology: Topology) -> str:
    """How a group divides its model, in words."""
    counts = Counter(each.choice for each in topology.parallel.layers)
    layers = f" ({', '.join(f'{count} {choice}' for choice, count in counts.items())} layers)" if counts else ""
    return f"grid {topology.compute.grid or f'1x{topology.compute.group_size}'}{layers}"
