"""``python -m benchmarks dashboard``: frames of a page with 1,000 workers, what its server takes, and what watching costs a run.

The 1,000 workers are lines of events, written as a run of as many would write them: a step a second each. The browser is a headless
Chromium, driven by chromedriver; without these only the server is measured.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from benchmarks.case import Case, case_of
from tests.browser import Browser
from zmqtrain.errors import ZmqTrainError

WORKERS, GROUP_SIZE, HOST_SIZE = 1000, 8, 8
#: Steps that there are already, and seconds of a measurement after some to settle down.
BEFORE, SETTLE_S, SECONDS = 60, 8.0, 20.0
REPEATS = 5
_PATIENCE_S = 120.0
_PYTHON = (sys.executable, "-m", "zmqtrain")
#: Counts frames, the longest time between two, and those that took longer than two.
_FRAMES = """
const [seconds, done] = arguments;
const begin = performance.now();
let frames = 0, last = begin, longest = 0, late = 0;
function frame(now) {
  longest = Math.max(longest, now - last);
  late += now - last > 34;
  last = now;
  frames += 1;
  if (now - begin < 1000 * seconds) requestAnimationFrame(frame);
  else done([1000 * frames / (now - begin), longest, late]);
}
requestAnimationFrame(frame);
"""
#: A page that draws something in every frame, and nothing else: what the browser itself can do here.
_EMPTY = (
    "data:text/html,<p id=p></p><script>let n = 0; const draw = () => "
    "{ p.textContent = ++n; requestAnimationFrame(draw); }; draw();</script>"
)
_STATUS = """
const rows = document.querySelectorAll("#workers tr").length;
arguments[0](rows ? document.getElementById("status").textContent : "without workers");
"""
_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from zmqtrain import Task

def task():
    inputs = torch.randn(4096, 256, generator=torch.Generator().manual_seed(1))
    return Task(
        model=lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train_data=TensorDataset(inputs, inputs[:, :1]),
    )
"""
_JOB = """
[job]
task = "task.py"
steps = 1000
oversubscribe = true
[compute]
groups = 2
batch_size = 64
threads = 1
[exchange]
kind = "gossip"
"""


def bench_dashboard(*, workers: int = WORKERS, seconds: float = SECONDS, repeats: int = REPEATS) -> Iterator[Case]:
    """Raises `ZmqTrainError` if a run, the dashboard's server or the browser fails."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _many_workers(Path(folder), workers, seconds)
    yield from _cost(repeats)


# Many workers.


def _many_workers(folder: Path, workers: int, seconds: float) -> Iterator[Case]:
    with ExitStack() as stack:
        events = _begin(folder / "many-001", workers)
        stack.enter_context(_growing(events, workers))
        url, server = stack.enter_context(_served(folder))
        browser = shutil.which("chromium"), shutil.which("chromedriver")
        if None in browser:
            stack.enter_context(_streaming(url, "many-001"))
        else:
            driver = stack.enter_context(Browser.opened(str(browser[0]), str(browser[1])))
            driver.show(_EMPTY)
            time.sleep(SETTLE_S)
            own_rate, own_longest_ms, own_late = driver.asked(_FRAMES, seconds)
            driver.show(url)
        time.sleep(SETTLE_S)
        if None not in browser and (status := driver.asked(_STATUS)) != "running":
            raise ZmqTrainError(f"the page shows a run that is {status or 'not there'}")
        busy = -_cpu_s(server)
        began = time.monotonic()
        if None in browser:
            time.sleep(seconds)
        else:
            rate, longest_ms, late = driver.asked(_FRAMES, seconds)
            name = f"{workers:,} workers in the browser"
            peer = "an empty page"
            yield case_of("dashboard", name, rate, "frames/s", peer, own_rate, "value/peer", digits=2)
            yield case_of("dashboard", f"{name}: longest between two frames", longest_ms, "ms", peer, own_longest_ms, digits=1)
            yield case_of("dashboard", f"{name}: frames that took more than two", late, f"in {seconds:g} s", peer, own_late)
        busy += _cpu_s(server)
        share = 100 * busy / (time.monotonic() - began)
        yield case_of("dashboard", f"the server, of a core, for {workers:,} workers", share, "%", "the aim", 5.0, digits=2)


def _begin(path: Path, workers: int) -> Path:
    """A run that has trained for `BEFORE` steps. Returns its events."""
    path.mkdir()
    groups, hosts = workers // GROUP_SIZE, workers // HOST_SIZE
    named = f'[[hosts]]\nname = "node[1-{hosts}]"\nslots = {HOST_SIZE}\n'
    topology = f'[job]\nname = "many"\nsteps = 100000\n{named}[compute]\ngroups = {groups}\ngroup_size = {GROUP_SIZE}\n'
    (path / "topology.toml").write_text(topology, encoding="utf-8")
    launcher = psutil.Process()  # this one: the run seems to go on
    (path / "pid").write_text(f"{launcher.pid} {launcher.create_time()}\n", encoding="utf-8")
    now = time.time() - BEFORE
    with (path / "events.jsonl").open("w", encoding="utf-8") as events:
        for rank in range(workers):
            events.write(_line("join", rank, None, now, {"peer": f"worker/{rank}", "reason": "joined"}))
            events.write(_line("start", rank, None, now, {"steps": 100000}))
        for step in range(BEFORE):
            for rank in range(workers):
                events.write(_step(rank, step, now + step))
    return path / "events.jsonl"


@contextmanager
def _growing(events: Path, workers: int) -> Iterator[None]:
    """Every worker does a step a second, spread over the second as they come from a launcher: four batches."""
    stop = threading.Event()

    def write() -> None:
        with events.open("a", encoding="utf-8") as file:
            part, step = 0, BEFORE
            while not stop.wait(0.25):
                now = time.time()
                file.writelines(_step(rank, step, now) for rank in range(part, workers, 4))
                file.flush()
                part, step = (part + 1, step) if part < 3 else (0, step + 1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def _step(rank: int, step: int, now: float) -> str:
    seconds = 0.9 + 0.1 * ((rank * 7919 + step * 104729) % 101) / 100
    values = {
        "loss": 2.0 / (1 + 0.01 * step) + 0.0001 * (rank % 17), "lr": 0.1, "seconds": seconds, "compute_s": 0.7 * seconds,
        "exposed_s": 0.2 * seconds, "data_s": 0.01, "samples": 32, "staleness": float(rank % 5),
    }  # fmt: skip
    return _line("step", rank, step, now, values)


def _line(kind: str, rank: int, step: int | None, now: float, values: dict[str, Any]) -> str:
    host = f"node{1 + rank // HOST_SIZE}"
    return (
        json.dumps({"time": now, "host": host, "role": "worker", "rank": rank, "step": step, "kind": kind, "values": values}) + "\n"
    )


# What watching costs a run.


def _cost(repeats: int) -> Iterator[Case]:
    """The same run by itself and while somebody watches, in turns."""
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    shares = []
    for _ in range(repeats):
        for watched in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                used_s, rate, share = _trained(Path(folder), watched=watched)
            found[watched].append((used_s, rate))
            if watched:
                shares.append(share)
    used, rates = ({watched: statistics.median(each[i] for each in found[watched]) for watched in found} for i in (0, 1))
    yield case_of(
        "dashboard", "processor time of a run's processes, watched", used[True], "s", "not watched", used[False], digits=3
    )
    yield case_of("dashboard", "steps of a run, watched", rates[True], "/s", "not watched", rates[False], "value/peer", digits=3)
    yield case_of("dashboard", "the server, of a core, for two workers", 100 * statistics.median(shares), "%", digits=2)


def _trained(folder: Path, *, watched: bool) -> tuple[float, float, float]:
    """The processor seconds of a run's processes, its steps a second, and the share of a core that the dashboard has taken."""
    (folder / "task.py").write_text(_TASK, encoding="utf-8")
    (folder / "job.toml").write_text(_JOB, encoding="utf-8")
    (folder / "runs").mkdir()
    command = [*_PYTHON, "launch", "job.toml", "--run-dir", "runs/job-001"]
    with ExitStack() as stack:
        url, server = stack.enter_context(_served(folder / "runs")) if watched else ("", None)
        process = psutil.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if server is not None:
            while process.poll() is None and not (folder / "runs" / "job-001" / "events.jsonl").exists():
                time.sleep(0.05)
            stack.enter_context(_streaming(url, "job-001"))
            busy, began = -_cpu_s(server), time.monotonic()
        used_s = 0.0
        while process.poll() is None:  # those of children that have ended are in their parent's
            used_s = max(used_s, _cpu_s(process))
            time.sleep(0.1)
        share = (busy + _cpu_s(server)) / (time.monotonic() - began) if server is not None else 0.0
        if process.returncode != 0:
            raise ZmqTrainError(f"the run failed: {process.stderr.read().decode()[-2000:]}")
    summary = json.loads((folder / "runs" / "job-001" / "summary.json").read_text(encoding="utf-8"))
    return used_s, 1 / summary["step_s"]["median"], share


def _cpu_s(process: psutil.Process) -> float:
    """Of a process and its children, ended or not."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.Error:  # it has ended since
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


# The dashboard, and who looks at it.


@contextmanager
def _served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [*_PYTHON, "dashboard", str(folder), "--port", "0", "--json"]
    with psutil.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield json.loads(server.stdout.readline())["url"], server
        finally:
            server.terminate()


@contextmanager
def _streaming(url: str, run: str) -> Iterator[None]:
    """Somebody who takes what the page would take."""
    address, _, token = url.partition("/?token=")
    request = Request(f"{address}/api/runs/{run}/stream", headers={"authorization": f"Bearer {token.partition('#')[0]}"})
    stop = threading.Event()

    def read() -> None:
        with urlopen(request, timeout=_PATIENCE_S) as answer:
            while not stop.is_set() and answer.readline():
                pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()
