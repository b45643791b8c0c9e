"""The remote program: it checks a host, starts the host's agent, sends its output, and stops it.

It is sent over the channel as text, with `supervisor` and `zmqtrain.processors`, and needs only Python (3.7 or later), since its
first task is to find out what is missing. Requests come on standard input, one JSON object a line; answers go to standard output,
one a line, each behind `MARK`, since a login shell may print text of its own.

The agent is not a child of this program but of a *supervisor*, in a session of its own, which records its exit code. So the channel
may break, and this program may end, while the agent continues; another one finds it by the files in the run's folder::

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

from zmqtrain.launcher.ssh.supervisor import KILLED_S, LOOK_S, alive, began, end_session, keep, send, wait_until_gone, watch
from zmqtrain.processors import gpus, processors

MARK = "#zmqtrain "
#: The most log text in one answer.
LOG_BYTES = 32768
#: A longer line that has not ended yet is sent in pieces.
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
        """Read ``count`` bytes that follow a request. Raises ``EOFError``."""
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
        """Wait up to ``patience_s`` for a request, for the end of the channel, or for the end of a process (a pidfd). Returns
        whether it was one of the first two."""
        if b"\n" in self._rest:
            return True
        ready = select.select([0] if process is None else [0, process], [], [], patience_s)[0]
        return 0 in ready

    def answer(self, value: dict[str, Any]) -> None:
        """Send an answer. Raises ``OSError`` when the other side is gone."""
        data = (MARK + json.dumps(value) + "\n").encode()
        while data:
            data = data[os.write(1, data) :]

    def _more(self) -> bool:
        data = os.read(0, 65536)
        self._rest += data
        return bool(data)


class HostSide:
    """This host's part of one run."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._folder = ""
        self._environment: dict[str, str] = {}
        self._listeners: list[socket.socket] = []

    # What is asked --------------------------------------------------------------------------------------------------------------

    def begin(self, run: str, host: str, environment: dict[str, str]) -> dict[str, Any]:
        """Request: say which run this is. Answers with the run's folder, and the state of its agent: none, running or ended."""
        os.environ.update(environment)
        sys.path[:0] = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
        state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
        self._folder = os.path.join(os.path.expanduser(state), "zmqtrain", "runs", run, host)
        self._environment = environment
        return {"folder": self._folder, **self.state()}

    def state(self) -> dict[str, Any]:
        """The state of the agent."""
        code = self._exit_code()
        if code is not None:
            return {"agent": "ended", "exit": code}
        return {"agent": "running" if self._supervisor() is not None else "none"}

    def check(self, packages: list[str], folder: str | None, files: list[str]) -> dict[str, Any]:
        """Request: the versions of Python and packages, and what the folder lacks (``None``: it will be copied)."""
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
        """Request: the processors and GPUs that may be used here."""
        return {"processors": processors(), "gpus": gpus()}

    def unpack(self, size: int) -> dict[str, Any]:
        """Request: receive a folder, as a tar file that follows. Answers with its path."""
        data = self._channel.take(size)
        target = os.path.join(self._folder, "task")
        os.makedirs(target, mode=0o700, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for member in archive.getmembers():
                parts = member.name.split("/")
                if member.name.startswith("/") or ".." in parts or not (member.isfile() or member.isdir()):
                    raise ValueError(f"{member.name} must not be in a copied folder")
            if hasattr(tarfile, "data_filter"):
                archive.extractall(target, filter="data")
            else:
                archive.extractall(target)  # releases before 3.12; names were checked above
        return {"folder": target}

    def listen(self, address: str, ports: list[int] | None) -> dict[str, Any]:
        """Request: open a port, in a range if one is given, for others to `reach`, until the agent starts."""
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
        """Request: connect to each target (name, address, port). Answers with the error for those that cannot be reached."""
        failed: dict[str, str] = {}
        threads = [threading.Thread(target=_connect, args=(*target, patience_s, failed)) for target in targets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"failed": failed}

    def start(self, command: list[str], environ: dict[str, str], folder: str) -> dict[str, Any]:
        """Request: start the agent. ``environ`` contains secrets: it goes into the agent's environment and nowhere else."""
        if self._supervisor() is not None:
            raise ValueError("the agent of this run is already running")
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        told, tell = os.pipe()
        variables = {**os.environ, **self._environment, **environ}
        if os.fork() == 0:
            # Not a child of this program: init, or a subreaper, collects the supervisor when it ends.
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
        """Request: send the agent's output, from an offset in its log, until it ends or until the next request."""
        supervisor = self._supervisor()
        process = watch(supervisor)
        try:
            while True:
                # Test for the end first, and read the log then: so the last output is complete.
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
        """Request: end the agent and all that it started: ask it, and kill it after the grace time. Answers with the exit code."""
        supervisor = self._supervisor()
        if supervisor is not None:
            if grace_s > 0:
                send(supervisor, signal.SIGTERM)  # the supervisor passes the signal on
                wait_until_gone(supervisor, grace_s)
            if alive(supervisor):
                end_session(supervisor, but=supervisor)
                wait_until_gone(supervisor, KILLED_S)
            if alive(supervisor):
                send(supervisor, signal.SIGKILL)
                wait_until_gone(supervisor, KILLED_S)
        known = self._written()
        if known is not None and not alive(known[0]):
            end_session(known[0])  # processes that are left if the supervisor was killed
        offset = self._tell_log(offset, whole=True)
        return {"stopped": self._exit_code(), "at": offset}

    def remove(self) -> dict[str, Any]:
        """Request: remove the run's folder. Its agent must have ended."""
        if self._supervisor() is not None:
            raise ValueError(f"the agent is still running, so {self._folder} was not removed")
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):
            os.rmdir(os.path.dirname(self._folder))  # other hosts may have their folders in it, on a shared file system
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
        """The supervisor's process, if it is running and is not another process with the same number."""
        written = self._written()
        if written is None or not alive(written[0]) or began(written[0]) != written[1]:
            return None
        return written[0]

    def _exit_code(self) -> int | None:
        """The agent's exit code; ``None`` while it runs, or if there was no agent."""
        running = self._supervisor() is not None
        try:
            with open(os.path.join(self._folder, "exit"), encoding="utf-8") as file:
                return int(file.read())
        except (OSError, ValueError):
            # It was not recorded: the supervisor was killed, and the agent with it.
            return None if running or self._written() is None else -int(signal.SIGKILL)

    def _tell_log(self, offset: int, *, whole: bool) -> int:
        """Send what is new in the log; ``whole``: including a line that has not ended. Returns the offset up to which it was
        sent."""
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
    """A package's version; ``None`` if it is not installed. The package is not imported."""
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
    raise OSError(errno.EADDRINUSE, f"all ports from {first} to {last} are in use: widen the range [job] ports")


def _connect(name: str, address: str, port: int, patience_s: float, failed: dict[str, str]) -> None:
    try:
        there = str(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][4][0])
        if there != address and (there.startswith("127.") or there == "::1"):
            failed[name] = (
                f"{address} resolves to {there} there, its own loopback address: correct its /etc/hosts, or give an IP address"
            )
            return
        socket.create_connection((address, port), timeout=patience_s).close()
    except OSError as error:
        failed[name] = str(error.strerror or error)


def serve(channel: Channel, host: HostSide) -> None:
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
            except Exception as error:  # noqa: BLE001 - sent as the answer
                answer = {"error": str(getattr(error, "strerror", None) or error), "kind": type(error).__name__}
            if answer is not None:
                channel.answer({**answer, "number": number})
    except (BrokenPipeError, ConnectionError):
        return


def main() -> None:
    """The entry point of the program."""
    channel = Channel()
    serve(channel, HostSide(channel))
