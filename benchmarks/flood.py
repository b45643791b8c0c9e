"""What an encrypted run loses while strangers hammer at its doors: 200 connection attempts a second by peers that have no key.

Two workers train, and what they say to each other goes over sockets; strangers come and stay away in turn.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from benchmarks.case import Case, case_of
from zmqtrain.errors import ZmqTrainError
from zmqtrain.net.address import key_in, split_address, with_key
from zmqtrain.net.curve import KeyPair

RATE, PHASE_S, PHASES = 200, 1.5, 15
#: Where the strangers are.
_KINDS = ("nowhere", "elsewhere", "here")
#: One of so many strangers has the coordinator's public key, which only the run's processes are told.
INFORMED = 20
#: How long a stranger keeps a connection open. With all of them ZeroMQ has to wait for what they say next.
STAY_S = 0.5
#: Of each phase, when the one before may still show.
EDGE_S = 0.3
PATIENCE_S = 180.0

_TOPOLOGY = """
[job]
oversubscribe = true
transport_encryption = "required"
[compute]
group_size = 2
batch_size = 64
threads = 1
shared_memory = false
"""
_SCRIPT = """
import os, pathlib, time, torch, zmqtrain
from torch import nn
with zmqtrain.session() as session:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
    model, optimizer = session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01))
    inputs, target = torch.randn(64, 512), torch.randint(10, (64,))
    pathlib.Path(f"ready-{session.rank}").write_text(os.environ["ZMQTRAIN_COORDINATOR"])
    ends, over = [], torch.zeros(1)
    while not over.item():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        ends.append(time.monotonic())
        if len(ends) % 20 == 0:
            over[:] = float(pathlib.Path("over").exists())
            session.all_reduce(over)
    if session.rank == 0:
        pathlib.Path("steps").write_text("\\n".join(map(repr, ends)))
"""

#: The first words of ZeroMQ's protocol: a signature, version 3.1, the mechanism, and that this is no server.
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f\x03\x01"


def bench_flood(*, rate: int = RATE, phase_s: float = PHASE_S, phases: int = PHASES) -> Iterator[Case]:
    """The run's speed, with strangers at its doors, with as many at the door of another program of this machine (so that what they
    themselves take counts on both sides), and with none, in turn. Medians of ratios. Raises `ZmqTrainError` if the run fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _launched(folder) as process, _strangers(_doors(folder), rate) as strangers:
            spans: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
            attempts = 0
            for turn in range(phases):
                for kind in _KINDS[turn % 3 :] + _KINDS[: turn % 3]:
                    start = time.monotonic()
                    strangers.send((kind, phase_s))
                    count = strangers.recv()
                    attempts += count if kind == "here" else 0
                    spans[kind].append((start, time.monotonic()))
            (folder / "over").touch()
            if process.wait(PATIENCE_S):
                raise ZmqTrainError(f"the run failed with code {process.returncode} among strangers: {_said(folder)}")
        ends = [float(line) for line in (folder / "steps").read_text().splitlines()]
    speeds = {kind: [_steps_per_s(ends, *span) for span in spans[kind]] for kind in _KINDS}
    yield case_of("net", "connection attempts turned away, each second", attempts / (phases * phase_s), "1/s")
    for kind, peer in (("elsewhere", "while they are at another's door"), ("nowhere", "left in peace")):
        if not all(speeds[kind]):
            raise ZmqTrainError(f"the run is too slow for phases of {phase_s:g} s: it took no step in one, though left in peace")
        ratio = statistics.median(here / other for here, other in zip(speeds["here"], speeds[kind], strict=True))
        here, other = (statistics.median(speeds[one]) for one in ("here", kind))
        yield case_of("net", "steps a second of a run meanwhile, encrypted", here, "1/s", peer, other, ratio)


def _steps_per_s(ends: Sequence[float], start: float, end: float) -> float:
    return sum(start + EDGE_S <= moment <= end for moment in ends) / (end - start - EDGE_S)


# The run ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _launched(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run, when its workers have begun to train."""
    (folder / "flood.toml").write_text(_TOPOLOGY)
    (folder / "script.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "zmqtrain", "launch", "--run-dir", "run", "flood.toml", "script.py"]
    with (folder / "said").open("wb") as said, subprocess.Popen(command, cwd=folder, stdout=said, stderr=said) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not all(path.exists() and path.read_text() for path in (folder / "ready-0", folder / "ready-1")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ZmqTrainError(f"the launch failed: {_said(folder)}")
                time.sleep(0.05)
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def _said(folder: Path) -> str:
    return (folder / "said").read_text(errors="replace")[-2000:]


def _doors(folder: Path) -> list[str]:
    """The addresses of all processes of the run; the coordinator's, which comes first, with its key."""
    events = (json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines())
    return [(folder / "ready-0").read_text(), *(event["values"]["address"] for event in events if event["kind"] == "join")]


# Strangers --------------------------------------------------------------------------------------------------------------------


@contextmanager
def _strangers(doors: Sequence[str], rate: int) -> Iterator[Connection]:
    """A process that is sent where to attack and for how many seconds, and answers with the number of its attempts."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_attack, args=(doors, rate, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()  # which ends it
        process.join(PATIENCE_S)


@dataclass(slots=True)
class _Crowd:
    """Connections that are open, and until when."""

    guests: deque[tuple[float, socket.socket | zmq.Socket[bytes]]]

    def add(self, guest: socket.socket | zmq.Socket[bytes]) -> None:
        self.guests.append((time.monotonic() + STAY_S, guest))

    def leave(self, now: float) -> None:
        while self.guests and self.guests[0][0] <= now:
            self.guests.popleft()[1].close()


def _attack(doors: Sequence[str], rate: int, orders: Connection) -> None:
    chance, crowd = random.Random(1), _Crowd(deque())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.BLOCKY, False)
    with suppress(EOFError), _another_door() as decoy:
        port = decoy.getsockname()[1]
        doors_of = {"here": doors, "elsewhere": [with_key(f"tcp://127.0.0.1:{port},{port}", KeyPair.new().public)], "nowhere": []}
        while True:
            kind, seconds = orders.recv()
            start, count = time.monotonic(), 0
            while (now := time.monotonic()) < start + seconds:
                while doors_of[kind] and count < (now - start) * rate:
                    crowd.add(_stranger(chance, context, doors_of[kind], count))
                    count += 1
                with suppress(BlockingIOError):
                    while True:
                        crowd.add(decoy.accept()[0])
                crowd.leave(now)
                time.sleep(0.5 / rate)
            crowd.leave(float("inf"))
            orders.send(count)
    context.destroy(linger=0)


def _another_door() -> socket.socket:
    """A program that lets in everybody, and says nothing."""
    door = socket.create_server(("127.0.0.1", 0), backlog=1024)
    door.setblocking(False)
    return door


def _stranger(
    chance: random.Random, context: zmq.Context[zmq.Socket[bytes]], doors: Sequence[str], number: int
) -> socket.socket | zmq.Socket[bytes]:
    """One attempt: in plain text, for another key, in another protocol, or silent; and now and then one that has found out the
    coordinator's key, and gets further: it costs this process and the coordinator several times as much."""
    if number % INFORMED == INFORMED - 1:
        return _with_key(context, doors[0])
    kind = number % 4
    host, _, port = split_address(chance.choice(doors))[chance.randrange(2)].removeprefix("tcp://").rpartition(":")
    guest = socket.create_connection((host, int(port)), PATIENCE_S)
    if kind == 0:
        guest.sendall(_greeting(b"NULL"))
    elif kind == 1:  # its greeting's box is for a key that it does not have, so it may hold anything
        guest.sendall(_greeting(b"CURVE") + b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + os.urandom(120))
    elif kind == 2:
        guest.sendall(b"GET / HTTP/1.1\r\n\r\n")
    return guest


def _greeting(mechanism: bytes) -> bytes:
    return _SIGNATURE + mechanism.ljust(20, b"\0") + bytes(32)


def _with_key(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    key, mine = key_in(address), KeyPair.new()
    assert key is not None
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, key)
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, mine.public)
    dealer.setsockopt(zmq.CURVE_SECRETKEY, mine.secret)
    dealer.connect(split_address(address)[0])
    return dealer
