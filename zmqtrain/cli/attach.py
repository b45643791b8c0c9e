"""``zmqtrain attach RUN``: show a run that was launched in another terminal, or detached."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zmqtrain.cli.runs import LOOK_S, launcher_of, lives, run_status, summary_of
from zmqtrain.errors import HostLostError, SshError
from zmqtrain.launcher.ssh.leftovers import inspect_hosts
from zmqtrain.observe.live import LateView, make_view
from zmqtrain.observe.run_directory import find_run
from zmqtrain.observe.tail import Tail
from zmqtrain.topology.load import load_topology
from zmqtrain.topology.placement import place
from zmqtrain.topology.rounded import rounded_duration
from zmqtrain.words import counted


class Follower:
    """Passes everything that a run adds to its files to a view."""

    def __init__(self, path: Path, view: LateView) -> None:
        """Follow the run from now on. What was before is not shown, but counts: where each worker is, and who is lost."""
        self._path, self._view = path, view
        self._tail = Tail(self._logs())
        for line in self._tail.new_lines(self._events):
            event = json.loads(line)
            view.past(event, float(event["time"]))

    def look(self) -> None:
        """Show what the run's event and log files have got since the last call."""
        for line in self._tail.new_lines(self._events):
            self._show(json.loads(line))
        for file in self._logs():
            if lines := self._tail.new_lines(file):
                self._view.log(file.stem.replace("-", "/", 1), "\n".join(lines))

    def _show(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "note":
            self._view.note(str(event["values"]["text"]))
        else:
            self._view.event(event, float(event["time"]))

    @property
    def _events(self) -> Path:
        return self._path / "events.jsonl"

    def _logs(self) -> list[Path]:
        return sorted((self._path / "logs").glob("*.log"))


def run_attach(name: str, *, json_lines: bool = False) -> int:
    """Show a run until it ends, or until Ctrl-C, which leaves the run alone. Returns the run's exit code, or 0.

    Raises `UsageError` if there is no such run, and `HostLostError` if its launcher is gone.
    """
    path = find_run(name)
    launcher = launcher_of(path)
    if launcher is None:
        return _without_launcher(path, json_lines)
    topology = load_topology(path / "topology.toml")
    groups = {role.peer: role.group for role in place(topology).workers}
    view = make_view(groups, json_lines=json_lines, every_steps=topology.observe.progress_every)
    if not json_lines:
        run_status(str(path))
    follower = Follower(path, view)
    view.begin(f"attached to {path}: Ctrl-C detaches, zmqtrain stop {path} stops the run")
    try:
        while lives(launcher):
            follower.look()
            time.sleep(LOOK_S)
        follower.look()
    except KeyboardInterrupt:
        view.end()
        print(f"detached; the run continues ({path})", file=sys.stderr)
        return 0
    view.end()
    return _without_launcher(path, json_lines)


def _without_launcher(path: Path, json_lines: bool) -> int:
    """The result of a run that has ended. Raises `HostLostError`, with the state of its agents, if it has lost its launcher."""
    values = summary_of(path / "summary.json")
    if values is not None:
        said = f"{values['status']} after {rounded_duration(values['seconds'])}, {counted(values['steps'], 'step')}: {path}"
        print(said, file=sys.stderr if json_lines else sys.stdout)
        return int(values["exit_code"])
    lines = [f"the launcher of {path} has ended without finishing the run"]
    job = load_topology(path / "topology.toml").job
    for host, state in asyncio.run(inspect_hosts(path)).items():
        if isinstance(state, SshError):
            lines.append(f"  {state}")
        elif state["agent"] == "running":
            most_s = job.timeout + job.alone
            lines.append(
                f"  {host}: its agent is still running; it ends at most {rounded_duration(most_s)} after its last contact "
                "with the launcher"
            )
        else:
            code = f" (exit code {state['exit']})" if "exit" in state else ""
            lines.append(f"  {host}: its agent has ended{code}")
    lines.append(
        f"zmqtrain launch --continue {path} takes it over while its agents run; zmqtrain stop {path} ends what is left; zmqtrain "
        f"launch FILE --resume {path} continues from the last checkpoint, if there is one"
    )
    raise HostLostError("\n".join(lines))
