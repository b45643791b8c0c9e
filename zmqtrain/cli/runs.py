"""``zmqtrain status``, ``stop`` and ``logs``: follow and control a run from another terminal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from zmqtrain.errors import CheckpointError, HostLostError, SshError, UsageError
from zmqtrain.launcher.slurm.submit import cancel, job_of, state_of
from zmqtrain.launcher.ssh.leftovers import stop_hosts
from zmqtrain.observe.run_directory import find_run, log_name, training_of
from zmqtrain.train.checkpoint.folder import find_checkpoints

#: How often, and how many seconds apart, a cancelled job is checked: Slurm's default KillWait is half a minute.
LOOK_S, MOST_LOOKS = 1.0, 300
#: States of a Slurm job in which it may compute, now or later.
_LIVE = {"pending", "configuring", "running", "completing", "suspended", "stopped", "requeued", "requeue_hold", "signaling"}


def run_status(name: str, *, json_lines: bool = False) -> int:
    """Print the state of a run. Raises `UsageError` if there is no such run."""
    path = find_run(name)
    process = launcher_of(path)
    summary = path / "summary.json"
    status = {"run": str(path), "status": "running" if process else "lost", "pid": process.pid if process else None}
    if summary.exists():
        values = json.loads(summary.read_text(encoding="utf-8"))
        status |= {key: values.get(key) for key in ("status", "steps", "samples", "seconds", "eval")}
    elif (last := _last_step(training_of(path))) is not None:
        status |= last
    if process is None and status["status"] in ("lost", "preempted") and (job := job_of(path)) is not None:
        # The launcher runs in the job, on another machine; a job that was preempted runs again.
        status |= {"status": state_of(job) or status["status"], "job": job}
    if json_lines:
        print(json.dumps(status))
    else:
        print("  ".join(f"{key} {value}" for key, value in status.items() if value is not None))
    return 0


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
        process.send_signal(signal.SIGINT)
        _wait_for_end(process)
    hosts = asyncio.run(stop_hosts(path))
    if process is None and not hosts:
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


def _wait_for_end(process: psutil.Process) -> None:
    """Wait for a process to end, even if it is still listed because its exit status was not collected."""
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            with suppress(psutil.TimeoutExpired):
                process.wait(timeout=0.2)
                return


def _require_checkpoint(path: Path) -> None:
    """Print which checkpoint was kept of a run that has been stopped. Raises `CheckpointError` if it is not of the last step."""
    training = training_of(path)
    kept, last = find_checkpoints(training / "checkpoints"), _last_step(training)
    step = 0 if last is None else int(str(last["steps"]))
    newest = int(kept[-1].name.removeprefix("step-")) if kept else None
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
        time.sleep(LOOK_S)
    raise HostLostError(f"Slurm job {job} was cancelled, but is still {state_of(job)} after {MOST_LOOKS * LOOK_S:g} s: see squeue")


def run_logs(name: str, role: str | None = None) -> int:
    """Print the output of all roles, or of one (``worker/3``). Raises `UsageError`."""
    path = training_of(find_run(name))
    files = sorted((path / "logs").glob("*.log"))
    if role is not None:
        files = [file for file in files if file.stem == log_name(role)]
        if not files:
            raise UsageError(f"{path} has no log of {role}: the role has printed nothing, or there is no such role")
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                print(f"{file.stem} | {line}" if role is None else line, end="")
    return 0


def launcher_of(path: Path) -> psutil.Process | None:
    """The launcher process of this run, if it is still running."""
    try:
        number, created = (path / "pid").read_text(encoding="utf-8").split()
        process = psutil.Process(int(number))
        return process if abs(process.create_time() - float(created)) < 1.0 else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
        return None


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
            if event["kind"] == "step":
                return {"steps": event["step"] + 1, "loss": event["values"].get("loss")}
    return None
