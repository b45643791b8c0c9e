"""``zmqtrain dashboard``: a page in the browser about the runs of a folder, while they train and after."""

from __future__ import annotations

import errno
import getpass
import json
import secrets
import signal
import socket
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any

from zmqtrain.cli.drain import drained
from zmqtrain.cli.runs import require_launcher, state_of_run
from zmqtrain.errors import UsageError
from zmqtrain.launcher.asked import heeds
from zmqtrain.launcher.slurm.submit import cancel, job_of
from zmqtrain.observe.dashboard.follow import read_topology
from zmqtrain.observe.run_directory import find_run, runs_of, training_of

#: The port, if it is free and no other was asked for.
PORT = 8790


class Processes:
    """Implements `zmqtrain.observe.dashboard.control.Control` with the processes of this machine."""

    def __init__(self) -> None:
        self._ended: dict[Path, tuple[float, dict[str, Any]]] = {}  # by the time of the summary, which is written once
        self._stopping: set[int] = set()

    def state(self, path: Path) -> dict[str, Any]:
        try:
            written = (path / "summary.json").stat().st_mtime
        except OSError:
            return _readable_state(path)
        if path not in self._ended or self._ended[path][0] != written:
            self._ended[path] = (written, _readable_state(path))
        return self._ended[path][1]

    def stop(self, path: Path) -> str:
        if (job := job_of(path)) is not None:
            cancel(job)
            return f"Slurm job {job} is being cancelled"
        launcher = require_launcher(path)
        if launcher.pid in self._stopping:  # a second signal would stop it at once, without a checkpoint
            return f"{path.name} has been asked to stop; zmqtrain stop {path} asks again, which stops it at once"
        self._stopping.add(launcher.pid)
        launcher.send_signal(signal.SIGINT)
        return f"{path.name} is stopping: its launcher (process {launcher.pid}) ends it with a checkpoint where it can"

    def checkpoint(self, path: Path) -> str:
        launcher = require_launcher(path)
        topology = read_topology(training_of(path))
        if (topology.get("job") or {}).get("task") is None:
            raise UsageError(f"{path.name} trains a script or a modelled device, whose checkpoints are not zmqtrain's to keep")
        if not heeds(launcher.pid, signal.SIGUSR2):
            raise UsageError(f"{path.name} cannot be asked for a checkpoint: it has not started, or is a simulation")
        launcher.send_signal(signal.SIGUSR2)
        return f"{path.name} keeps a checkpoint at the next step that all its workers reach; the events say when it is complete"

    def drain(self, path: Path, host: str) -> str:
        return drained(path, require_launcher(path), host)


def run_dashboard(
    name: str | None, *, address: str = "127.0.0.1", port: int | None = None, open_it: bool = False, json_lines: bool = False
) -> int:
    """Serve the page until Ctrl-C. ``name``: a run to show first, or a folder of runs. Raises `UsageError`."""
    import uvicorn

    from zmqtrain.observe.dashboard.server import make_app

    folder, run = folder_of(name)
    token = secrets.token_urlsafe(16)
    with _listen(address, port) as listening:
        at = int(listening.getsockname()[1])
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{at}/?token={token}" + (f"#run={run}" if run else "")
        _say(url, folder, address, at, json_lines=json_lines)
        if open_it:
            webbrowser.open(url)
        app = make_app(folder, Processes(), token, cookie=f"zmqtrain-{at}")
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=1
        )
        with suppress(KeyboardInterrupt):  # uvicorn has shut down in order by then, and passes the signal on
            uvicorn.Server(config).run(sockets=[listening])
    return 0


def folder_of(name: str | None) -> tuple[Path, str]:
    """The folder with the runs, and the name of the run to show first; empty: the newest."""
    if name is None:
        folder = Path("runs")
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder.absolute()}: give a run, or a folder of runs")
        return folder.absolute(), ""
    path = Path(name)
    if path.is_dir() and not (path / "topology.toml").exists():
        if not runs_of(path) and any(path.iterdir()):  # an empty one may be about to get its first run
            raise UsageError(f"{path.absolute()} is neither a run nor a folder of runs")
        return path.absolute(), ""
    run = find_run(name).absolute()
    return run.parent, run.name


def _listen(address: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, PORT if port is None else port), family=family)
    except OSError as error:
        why = error.strerror or error
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"cannot listen on --address {address}: {why}. Choose an address of this machine") from error
        if port is None:
            return _listen(address, 0)
        raise UsageError(f"cannot listen on {address} port {port}: {why}. Choose another --port; 0: any free one") from error


def _say(url: str, folder: Path, address: str, port: int, *, json_lines: bool) -> None:
    if json_lines:
        print(json.dumps({"url": url, "port": port, "folder": str(folder)}), flush=True)
        return
    print(f"the runs in {folder} (Ctrl-C ends the page, and no run):\n  {url}", flush=True)
    if address in ("127.0.0.1", "::1", "localhost"):
        target = f"{_user()}{socket.gethostname()}"
        print(f"from another machine: ssh -L {port}:{address}:{port} {target}, and open the same address there", flush=True)
    else:
        print("the page is not encrypted: anyone who can read this network's traffic can read the token and stop runs", flush=True)


def _user() -> str:
    try:
        return f"{getpass.getuser()}@"
    except (KeyError, OSError):  # a user without a name, as in some containers
        return ""


def _readable_state(path: Path) -> dict[str, Any]:
    """The run's state; its directory may be incomplete, or on its way to be removed."""
    try:
        return state_of_run(path)
    except (OSError, ValueError, KeyError):
        return {"run": str(path), "status": "unreadable", "pid": None}
