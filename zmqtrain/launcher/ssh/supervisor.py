"""Processes on the remote host: the agent's supervisor, and functions to watch processes by number. Needs only Python, as `remote`
does."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

from zmqtrain.death import open_pidfd

#: Tells the agent which process it must not outlive (as `zmqtrain.launcher.local.PARENT`, which may not be here).
PARENT = "ZMQTRAIN_PARENT_PID"
#: Seconds between two looks at a process that cannot be waited for.
LOOK_S = 0.1
#: Seconds that killed processes may take to end.
KILLED_S = 5.0


def keep(command: list[str], environ: dict[str, str], folder: str, run: str, tell: int) -> None:
    """Run the supervisor: start the agent, wait for it, end what it has left, and record its exit code. Never returns."""
    try:
        os.setsid()
        # Handlers, not SIG_IGN, which the agent would inherit.
        agents: list[Any] = []
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: [agent.terminate() for agent in agents])
        log = os.open(os.path.join(run, "agent.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        write_whole(os.path.join(run, "agent.json"), json.dumps({"supervisor": os.getpid(), "began": began(os.getpid())}))
        environ[PARENT] = str(os.getpid())
        try:
            agent = subprocess.Popen(command, cwd=folder, env=environ, stdin=subprocess.DEVNULL)
        except OSError as error:
            write_whole(os.path.join(run, "exit"), "127")
            os.write(tell, json.dumps({"error": f"cannot start {command[0]} in {folder}: {error.strerror}"}).encode())
            return
        agents.append(agent)
        os.write(tell, json.dumps({"pid": agent.pid}).encode())
        os.close(tell)
        code = agent.wait()
        end_session(os.getpid(), but=os.getpid())
        write_whole(os.path.join(run, "exit"), str(code))
    finally:
        os._exit(0)


def write_whole(path: str, text: str) -> None:
    """Write a file atomically, so that it is never seen half-written."""
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".tmp", path)


def _stat(process: int) -> list[str]:
    """The fields of a process in ``/proc/PID/stat``, from its state on. Empty if it is gone, or not on Linux."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def began(process: int) -> str:
    """The start of a process, in a form that no other process of the same number on this host has."""
    fields = _stat(process)
    if not fields:
        return ""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return file.read().strip() + " " + fields[19]


def alive(process: int) -> bool:
    fields = _stat(process)
    if fields:
        return fields[0] not in "ZX"  # it has ended, but its exit status was not collected
    if os.path.isdir("/proc/self"):
        return False
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def watch(process: int | None) -> int | None:
    """A file descriptor that becomes readable when a process ends; ``None`` if it has ended, is not known, or cannot be watched."""
    with suppress(ProcessLookupError):
        return None if process is None else open_pidfd(process)
    return None


def send(process: int, number: int) -> None:
    with suppress(OSError):  # it has ended
        os.kill(process, number)


def end_session(session: int, but: int = 0) -> None:
    """Kill all processes of a session except ``but``, until there are none: a process that is being killed may have forked
    another."""
    end = time.monotonic() + KILLED_S
    while time.monotonic() < end:
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
        found = []
        for number in numbers:
            fields = _stat(number)
            if number != but and len(fields) > 3 and fields[3] == str(session) and fields[0] not in "ZX":
                found.append(number)
        if not found:
            return
        for number in found:
            send(number, signal.SIGKILL)
        time.sleep(LOOK_S / 10)


def wait_until_gone(process: int, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    handle = watch(process)
    try:
        while alive(process) and time.monotonic() < end:
            left = max(0.0, end - time.monotonic())
            if handle is None:
                time.sleep(min(left, LOOK_S))
            else:
                select.select([handle], [], [], left)
                if select.select([handle], [], [], 0)[0]:
                    return
    finally:
        if handle is not None:
            os.close(handle)
