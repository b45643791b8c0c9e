"""``zmqtrain status``, ``runs``, ``stop`` and ``logs``: follow and control a run from another terminal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from zmqtrain.cli.table import table_of
from zmqtrain.errors import CheckpointError, HostLostError, SshError, UsageError
from zmqtrain.launcher.continued import Left
from zmqtrain.launcher.slurm.submit import cancel, job_of, state_of
from zmqtrain.launcher.ssh.leftovers import stop_hosts
from zmqtrain.membership.journal import NAME
from zmqtrain.observe.run_directory import began, find_run, log_name, runs_of, training_of
from zmqtrain.observe.sums import SUMS
from zmqtrain.observe.tail import Tail
from zmqtrain.observe.terminal import duration
from zmqtrain.train.checkpoint.folder import find_checkpoints, step_of
from zmqtrain.words import counted

#: Seconds between two looks at what a run has printed.
LOOK_S = 0.2
#: How often, and how many seconds apart, a cancelled job is checked: Slurm's default KillWait is half a minute.
JOB_LOOK_S, MOST_LOOKS = 1.0, 300
#: States of a Slurm job in which it may compute, now or later.
_LIVE = {"pending", "configuring", "running", "completing", "suspended", "stopped", "requeued", "requeue_hold", "signaling"}


def run_status(name: str, *, json_lines: bool = False) -> int:
    """Print the state of a run. Raises `UsageError` if there is no such run."""
    status = state_of_run(find_run(name))
    if json_lines:
        print(json.dumps(status))
    else:
        print("  ".join([*_words(status), *(f"{key} {_short(value)}" for key, value in _results(status).items())]))
    return 0


def _words(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is known of a run's state, as words for people."""
    yield f"{state['run']}  {state['status']}"
    if state.get("pid") is not None:
        yield f"process {state['pid']}"
    if state.get("job") is not None:
        yield f"Slurm job {state['job']}"
    if state.get("steps") is not None:
        yield counted(state["steps"], "step")
    if state.get("samples") is not None:
        yield counted(state["samples"], "sample")
    if state.get("seconds") is not None:
        yield duration(state["seconds"])


def _results(state: Mapping[str, Any]) -> Mapping[str, object]:
    """The newest evaluation, or without one the newest loss."""
    return state.get("eval") or ({"loss": state["loss"]} if state.get("loss") is not None else {})


def state_of_run(path: Path) -> dict[str, Any]:
    """The state of a run, and its results if there are any: the row of ``zmqtrain status --json``."""
    process = launcher_of(path)
    summary = path / "summary.json"
    status: dict[str, Any] = {
        "run": str(path),
        "status": "running" if process else "lost",
        "pid": process.pid if process else None,
    }
    if (values := summary_of(summary)) is not None:
        status |= {key: values.get(key) for key in ("status", "steps", "samples", "seconds", "eval")}
        if process is not None:  # it continues what has ended before
            status["status"] = "running"
    elif (last := _last_step(training_of(path))) is not None:
        status |= last
    if process is None and status["status"] in ("lost", "preempted") and (job := job_of(path)) is not None:
        # The launcher runs in the job, on another machine; a job that was preempted runs again.
        status |= {"status": state_of(job) or status["status"], "job": job}
    return status


def run_list(folder: Path, *, json_lines: bool = False) -> int:
    """Print the runs of a folder, in the order in which they have begun. Raises `UsageError` if there is no such folder."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder.absolute()}: runs are in the folder runs of where they were launched")
    paths = sorted(runs_of(folder), key=began)
    states = [state_of_run(path) for path in paths]
    if json_lines:
        for state in states:
            print(json.dumps(state))
        return 0
    if not states:
        print(f"{folder.absolute()} contains no runs")
        return 0
    table = table_of("run", "status", ">steps", ">samples", ">time", "evaluation")
    for path, state in zip(paths, states, strict=True):
        numbers = [f"{state[key]:,.0f}" if state.get(key) is not None else "" for key in ("steps", "samples")]
        numbers.append(duration(state["seconds"]) if state.get("seconds") is not None else "")
        results = "  ".join(f"{key} {_short(value)}" for key, value in _results(state).items())
        table.add_row(path.name, str(state["status"]), *numbers, results)
    Console().print(table)
    return 0


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_stop(name: str, *, checkpoint: bool = False) -> int:
    """Stop a run as Ctrl-C would; if its launcher is gone, stop what is left of the run on its hosts.

    Raises `UsageError` if nothing of it is running, `HostLostError` if hosts cannot be reached, and `CheckpointError` if a
    ``checkpoint`` of the last step was asked for and not kept.
    """
    path = find_run(name)
    if (job := job_of(path)) is not None:
        _stop_job(path, job)
    else:
        _stop_launcher(path)
    if checkpoint:
        _require_checkpoint(path)
    return 0


def _stop_launcher(path: Path) -> None:
    process = launcher_of(path)
    if process is not None:
        print(f"stopping {path}: its launcher (process {process.pid}) ends it with a checkpoint where it can", flush=True)
        process.send_signal(signal.SIGINT)
        _wait_for_end(process)
    here = Left.of(path).stop() if process is None else 0
    if here:
        print(f"{path}: its launcher was gone; stopped {counted(here, 'agent')} on this machine, with all roles")
    hosts = asyncio.run(stop_hosts(path))
    if process is None:
        (path / NAME).unlink(missing_ok=True)
    if process is None and not hosts and not here:
        raise UsageError(f"{path} is not running on this machine, and has nothing left on other hosts")
    missed = [str(result) for result in hosts.values() if isinstance(result, SshError)]
    for host, result in hosts.items():
        if not isinstance(result, SshError):
            print(f"{host}: stopped; nothing is left running there")
    if missed:
        lines = "\n  ".join(missed)
        raise HostLostError(
            f"the run could not be stopped on these hosts; run this command again when they can be reached:\n  {lines}"
        )
    if process is not None:
        state = state_of_run(path)
        after = f" after {counted(state['steps'], 'step')}" if state.get("steps") is not None else ""
        kept = find_checkpoints(training_of(path) / "checkpoints")
        print(f"{path}: {state['status']}{after}; " + (f"its newest checkpoint is {kept[-1]}" if kept else "it has no checkpoint"))


def _wait_for_end(process: psutil.Process) -> None:
    """Wait for a process to end, even if it is still listed because its exit status was not collected."""
    while lives(process):
        with suppress(psutil.TimeoutExpired):
            process.wait(timeout=0.2)


def _require_checkpoint(path: Path) -> None:
    """Print which checkpoint was kept of a run that has been stopped. Raises `CheckpointError` if it is not of the last step."""
    training = training_of(path)
    kept, last = find_checkpoints(training / "checkpoints"), _last_step(training)
    step = 0 if last is None else int(str(last["steps"]))
    newest = step_of(kept[-1]) if kept else None
    if newest is None or newest < step:
        found = "there are none" if newest is None else f"the newest one is from step {newest}"
        raise CheckpointError(f"{path} has stopped after step {step}, but no checkpoint of that step was kept: {found}")
    print(f"stopped after step {step}; the checkpoint is {kept[-1]}")


def _stop_job(path: Path, job: str) -> None:
    """End a run that was submitted to Slurm, and wait until its nodes are free."""
    if (state := state_of(job)) is None or state not in _LIVE:
        raise UsageError(f"{path} is not running any more: Slurm job {job} is {state or 'unknown here'}")
    cancel(job)
    for _ in range(MOST_LOOKS):
        if state_of(job) not in _LIVE:
            print(f"Slurm job {job}: cancelled")
            return
        time.sleep(JOB_LOOK_S)
    raise HostLostError(
        f"Slurm job {job} was cancelled, but is still {state_of(job)} after {MOST_LOOKS * JOB_LOOK_S:g} s: see squeue"
    )


def run_logs(name: str, role: str | None = None, *, follow: bool = False) -> int:
    """Print the output of all roles, or of one (``worker/3``). ``follow``: until the run ends, or Ctrl-C. Raises `UsageError`."""
    path = find_run(name)
    training = training_of(path)

    def files() -> list[Path]:
        found = sorted((training / "logs").glob("*.log"))
        return found if role is None else [file for file in found if file.stem == log_name(role)]

    launcher = launcher_of(path) if follow else None
    if role is not None and not files() and launcher is None:
        raise UsageError(f"{training} has no log of {role}: the role has printed nothing, or there is no such role")
    tail = Tail()
    try:
        while True:
            last = launcher is None or not lives(launcher)  # looked at before the files: what it wrote at its end is there, too
            for file in files():
                for line in tail.new_lines(file, whole=last):
                    print(f"{file.stem} | {line}" if role is None else line, flush=follow)
            if last:
                if not any(file.stat().st_size for file in files()):
                    print(f"the roles of {training} have printed nothing", file=sys.stderr)
                return 0
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        print(f"the run continues ({path})", file=sys.stderr)
        return 0


def launcher_of(path: Path) -> psutil.Process | None:
    """The launcher process of this run, if it is still running."""
    try:
        number, created = (path / "pid").read_text(encoding="utf-8").split()
        process = psutil.Process(int(number))
        return process if abs(process.create_time() - float(created)) < 1.0 else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None


def require_launcher(path: Path) -> psutil.Process:
    """The same. Raises `UsageError` if it is not running."""
    launcher = launcher_of(path)
    if launcher is None:
        if (status := _status_at_its_end(path)) is not None:
            raise UsageError(f"{path.name} has ended ({status})")
        raise UsageError(f"{path.name} is not running on this machine; zmqtrain stop {path} ends what may be left on other hosts")
    return launcher


def summary_of(file: Path) -> dict[str, Any] | None:
    """What a ``summary.json`` says; ``None``: the run has not ended, or has written none that can be read."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and "status" in values else None


def _status_at_its_end(path: Path) -> str | None:
    """The status in ``summary.json``; ``None``: the run has not ended, or has written none."""
    values = summary_of(training_of(path) / "summary.json")
    return None if values is None else str(values["status"])


def lives(process: psutil.Process) -> bool:
    """Whether a process runs: it has not ended, collected or not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _last_step(path: Path) -> dict[str, object] | None:
    """The values of the last step event, read from the end of the file."""
    with (path / "events.jsonl").open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - 65536)
        file.seek(start)
        lines = file.read().splitlines()
        for line in reversed(lines[1:] if start else lines):  # the first line may be incomplete
            try:
                event = json.loads(line)
            except ValueError:
                continue
            values = event["values"]
            if event["kind"] == SUMS and values["of"] == "step":
                return {"steps": event["step"] + 1, "loss": values["last"].get("loss")}
            if event["kind"] == "step":
                return {"steps": event["step"] + 1, "loss": values.get("loss")}
    return None
