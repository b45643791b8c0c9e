"""The program on the other side: it looks a host over, starts the host's agent, tells what it prints, and stops it.

It is sent over the channel as text, with `supervisor` and `zmqtrain.processors`, and needs only Python (3.7 or later), as its first
task is to find out what is missing.
Requests come on standard input, one JSON object a line; answers go to standard output, one a line, each behind `MARK`, since a
login shell may print words of its own.

The agent is no child of this program but of a *supervisor*, in a session of its own, which writes down its exit code. So the
channel may break, and this program end, while the agent goes on; another one finds it by what lies in the run's folder::

    agent.json   the supervisor's process, with its start time: process numbers are used again
    agent.log    what the agent itself prints (roles print over the run's own network)
    exit         the agent's exit code, once it has ended
    task/        the copied folder, if any
"""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import select
import shutil
import signal
import socket
import sys
import tarfile
import threading
from contextlib import suppress
from typing import Any

from zmqtrain.launcher.ssh.supervisor import KILLED_S, LOOK_S, alive, began, end_session, keep, open_pidfd, send, wait_until_gone
from zmqtrain.processors import gpus, processors

MARK = "#zmqtrain "
#: Log text in one answer.
LOG_BYTES = 32768
#: A line that has not ended goes on its way when it is so long.
LONGEST_LINE = 8192


class Channel:
    """Standard input and output as requests and answers."""

    def __init__(self) -> None:
        self._rest = b""

    def request(self) -> dict[str, Any] | None:
        """The next request; ``None`` when the other side is gone."""
        while b"\n" not in self._rest:
            if not self._more():
                return None
        line, self._rest = self._rest.split(b"\n", 1)
        value: dict[str, Any] = json.loads(line.decode())
        return value

    def take(self, count: int) -> bytes:
        """So many bytes that follow a request. Raises ``EOFError``."""
        parts, missing = [self._rest[:count]], count - len(self._rest)
        self._rest = self._rest[count:]
        while missing > 0:
            data = os.read(0, min(missing, 1 << 20))
            if not data:
                raise EOFError("the channel closed in the middle of a file")
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def pending(self, patience_s: float, process: int | None) -> bool:
        """Wait so long for a request, the other side's end, or a process's (a pidfd). Whether it is one of the former."""
        if b"\n" in self._rest:
            return True
        ready = select.select([0] if process is None else [0, process], [], [], patience_s)[0]
        return 0 in ready

    def answer(self, value: dict[str, Any]) -> None:
        """Say something. Raises ``OSError`` when the other side is gone."""
        data = (MARK + json.dumps(value) + "\n").encode()
        while data:
            data = data[os.write(1, data) :]

    def _more(self) -> bool:
        data = os.read(0, 65536)
        self._rest += data
        return bool(data)


class Host:
    """This host's part of one run."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._folder = ""
        self._environment: dict[str, str] = {}
        self._listeners: list[socket.socket] = []

    # What is asked --------------------------------------------------------------------------------------------------------------

    def begin(self, run: str, host: str, environment: dict[str, str]) -> dict[str, Any]:
        """Which run this is about. Says where its folder is, and how its agent is: none, running or ended."""
        os.environ.update(environment)
        sys.path[:0] = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
        state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
        self._folder = os.path.join(os.path.expanduser(state), "zmqtrain", "runs", run, host)
        self._environment = environment
        return {"folder": self._folder, **self.state()}

    def state(self) -> dict[str, Any]:
        """How the agent is."""
        code = self._exit_code()
        if code is not None:
            return {"agent": "ended", "exit": code}
        return {"agent": "running" if self._supervisor() is not None else "none"}

    def check(self, packages: list[str], folder: str | None, files: list[str]) -> dict[str, Any]:
        """What is here: versions of Python and packages, and what the folder lacks (``None``: it will be copied)."""
        faults = []
        if folder is not None:
            folder = os.path.expanduser(folder)
            if not os.path.isdir(folder):
                faults.append((f"no folder {folder}", "set sync = true in [engine] to copy yours, or folder in [[hosts]]"))
            else:
                sys.path.insert(0, folder)
                missing = [name for name in files if not os.path.exists(os.path.join(folder, name))]
                faults += [(f"no {name} in {folder}", "set sync = true in [engine] to copy yours") for name in missing]
        return {"python": platform.python_version(), "packages": {name: _version(name) for name in packages}, "faults": faults}

    def room(self) -> dict[str, Any]:
        """How much may compute here."""
        return {"processors": processors(), "gpus": gpus()}

    def unpack(self, size: int) -> dict[str, Any]:
        """Take a folder, as a tar file that follows. Says where it is now."""
        data = self._channel.take(size)
        target = os.path.join(self._folder, "task")
        os.makedirs(target, mode=0o700, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for member in archive.getmembers():
                parts = member.name.split("/")
                if member.name.startswith("/") or ".." in parts or not (member.isfile() or member.isdir()):
                    raise ValueError(f"{member.name} does not belong into a copied folder")
            if hasattr(tarfile, "data_filter"):
                archive.extractall(target, filter="data")
            else:
                archive.extractall(target)  # releases before 3.12; names were looked at above
        return {"folder": target}

    def listen(self, address: str, ports: list[int] | None) -> dict[str, Any]:
        """Open a port at an address, in a range if one is given, for others to `reach`, until the agent starts."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        self._listeners.append(listener)
        if family == socket.AF_INET6 and address == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if ports is None:
            listener.bind((address, 0))
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the run's own processes do
            _bind_within(listener, address, ports[0], ports[1])
        listener.listen(256)
        return {"port": listener.getsockname()[1]}

    def reach(self, targets: list[tuple[str, str, int]], patience_s: float) -> dict[str, Any]:
        """Connect to each target (name, address, port); says why, for those that cannot be reached."""
        failed: dict[str, str] = {}
        threads = [threading.Thread(target=_connect, args=(*target, patience_s, failed)) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"failed": failed}

    def start(self, command: list[str], environ: dict[str, str], folder: str) -> dict[str, Any]:
        """Start the agent. ``environ`` holds secrets: it goes into the agent's environment and nowhere else."""
        if self._supervisor() is not None:
            raise ValueError("the agent of this run is there already")
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        told, tell = os.pipe()
        variables = {**os.environ, **self._environment, **environ}
        if os.fork() == 0:
            # Not a child of this program: whoever adopts orphans collects the supervisor when it ends.
            if os.fork() == 0:
                os.close(told)
                keep(command, variables, os.path.expanduser(folder), self._folder, tell)
            os._exit(0)
        os.wait()
        os.close(tell)
        with os.fdopen(told) as file:
            answer: dict[str, Any] = json.loads(file.read() or '{"error": "the agent could not be started"}')
        return answer

    def follow(self, offset: int) -> dict[str, Any] | None:
        """Tell what the agent prints, from a place in its log on, until it ends or something else is asked for."""
        supervisor = self._supervisor()
        process = open_pidfd(supervisor)
        try:
            while True:
                # First this, then the log: what it printed last is there when its end is.
                code = self._exit_code()
                offset = self._tell_log(offset, whole=code is not None)
                if code is not None:
                    return {"exit": code, "at": offset}
                if self._channel.pending(LOOK_S, process):
                    return None
        finally:
            if process is not None:
                os.close(process)

    def stop(self, grace_s: float, offset: int) -> dict[str, Any]:
        """End the agent and all that it started: ask, and force after the grace time. Says how it ended, once it has."""
        supervisor = self._supervisor()
        if supervisor is not None:
            if grace_s > 0:
                send(supervisor, signal.SIGTERM)  # it hands this on
                wait_until_gone(supervisor, grace_s)
            if alive(supervisor):
                end_session(supervisor, but=supervisor)
                wait_until_gone(supervisor, KILLED_S)
            if alive(supervisor):
                send(supervisor, signal.SIGKILL)
                wait_until_gone(supervisor, KILLED_S)
        known = self._written()
        if known is not None and not alive(known[0]):
            end_session(known[0])  # what the supervisor has left if it was killed
        offset = self._tell_log(offset, whole=True)
        return {"stopped": self._exit_code(), "at": offset}

    def remove(self) -> dict[str, Any]:
        """Remove the run's folder. Its agent must have ended."""
        if self._supervisor() is not None:
            raise ValueError(f"the agent still runs, so {self._folder} stays")
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            os.rmdir(os.path.dirname(self._folder))  # other hosts may have theirs in it, on a file system that they share
        return {}

    # What is known ------------------------------------------------------------------------------------------------------------

    def _written(self) -> tuple[int, str] | None:
        try:
            with open(os.path.join(self._folder, "agent.json"), encoding="utf-8") as file:
                value = json.load(file)
        except (OSError, ValueError):
            return None
        return int(value["supervisor"]), str(value["began"])

    def _supervisor(self) -> int | None:
        """The supervisor's process, if it lives and is not another one that has got its number."""
        written = self._written()
        if written is None or not alive(written[0]) or began(written[0]) != written[1]:
            return None
        return written[0]

    def _exit_code(self) -> int | None:
        """The agent's exit code; ``None`` while it runs, or where there was none."""
        running = self._supervisor() is not None
        try:
            with open(os.path.join(self._folder, "exit"), encoding="utf-8") as file:
                return int(file.read())
        except (OSError, ValueError):
            # Nobody has written it down: the supervisor was killed, and the agent with it.
            return None if running or self._written() is None else -int(signal.SIGKILL)

    def _tell_log(self, offset: int, *, whole: bool) -> int:
        """Tell what is new in the log; ``whole``: also a line that has not ended. Returns how far it is told."""
        try:
            file = open(os.path.join(self._folder, "agent.log"), "rb")  # noqa: SIM115 - closed below
        except OSError:
            return offset
        with file:
            while True:
                file.seek(offset)
                data = file.read(LOG_BYTES)
                end = len(data) if whole or len(data) > LONGEST_LINE else data.rfind(b"\n") + 1
                if end == 0:
                    return offset
                offset += end
                self._channel.answer({"log": data[:end].decode(errors="replace"), "at": offset})


# The machine ------------------------------------------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    """A package's version; ``None`` where it is not here. Imports nothing of it."""
    import importlib.util

    if importlib.util.find_spec(package) is None:
        return None
    try:
        from importlib import metadata

        return metadata.version(package)
    except Exception:  # noqa: BLE001 - it is here, but not by an installer
        return "unknown"


def _bind_within(listener: socket.socket, address: str, first: int, last: int) -> None:
    for port in range(first, last + 1):
        try:
            listener.bind((address, port))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"all ports from {first} to {last} are in use: give [job] ports a longer range")


def _connect(name: str, address: str, port: int, patience_s: float, failed: dict[str, str]) -> None:
    try:
        there = str(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0])
        if there != address and (there.startswith("127.") or there == "::1"):
            failed[name] = f"{address} means {there} there, the host itself: mend its /etc/hosts, or give an IP address"
            return
        socket.create_connection((address, port), timeout=patience_s).close()
    except OSError as error:
        failed[name] = str(error.strerror or error)


def serve(channel: Channel, host: Host) -> None:
    """Answer requests until the other side is gone."""
    try:
        channel.answer({"hello": platform.python_version()})
        while True:
            request = channel.request()
            if request is None:
                return
            number = request.pop("number")
            try:
                answer = getattr(host, request.pop("do"))(**request)
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                answer = {"error": str(getattr(error, "strerror", None) or error), "kind": type(error).__name__}
            if answer is not None:
                channel.answer({**answer, "number": number})
    except (BrokenPipeError, ConnectionError):
        return


def main() -> None:
    """The program."""
    channel = Channel()
    serve(channel, Host(channel))
