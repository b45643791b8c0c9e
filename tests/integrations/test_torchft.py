"""The example with torchft: one of two replicas is killed and started again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest

from tests.launcher.ready import PYTHON, ready_process
from tests.patience import PATIENCE_S
from zmqtrain.arena import shared_memory_missing

pytestmark = [
    pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing())),
    pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed"),
    pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
#: Of what the example prints: step, replicas, checksum of the parameters.
STEP = re.compile(r"step (\d+): (\d+) replicas, .* parameters (\w+)")


class Replica:
    """A process that is forked once torch is imported, and the lines that it has printed. Killed at the end of a ``with`` block."""

    def __init__(self, number: int, lighthouse: str) -> None:
        output, write = os.pipe()
        environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "PYTHONUNBUFFERED": "1"}
        command = (PYTHON, "torchft_digits.py", str(number), "--steps=1000000")
        with open(write, "wb") as printed, open(os.devnull, "wb") as nothing, open(os.devnull, "rb") as channel:
            files = printed.fileno(), nothing.fileno(), channel.fileno()
            self.process = ready_process().command(command, EXAMPLES, environ, *files)
        self._output = open(output, encoding="utf-8")  # noqa: SIM115 - the reader's, until `__exit__`
        self._lines: SimpleQueue[str] = SimpleQueue()
        self._reader = Thread(target=self._read)  # at all times: a replica that cannot print does not train
        self._reader.start()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join()
        self._output.close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def steps(self, replicas: int) -> Iterator[tuple[int, str]]:
        """The steps that so many replicas make, with the checksums of the parameters after them."""
        while line := self._lines.get(timeout=PATIENCE_S):
            found = STEP.match(line)
            if found and int(found[2]) == replicas:
                yield int(found[1]), found[3]
        raise AssertionError(f"a replica has ended with exit code {self.process.wait(PATIENCE_S)}")

    def _read(self) -> None:
        for line in self._output:
            self._lines.put(line)
        self._lines.put("")


def require_same(one: Replica, other: Replica) -> None:
    """Both make steps together, after which they have the same parameters."""
    seen = dict(step for step, _ in zip(other.steps(2), range(4), strict=False))
    shared = 0
    for step, checksum in one.steps(2):
        if step in seen:
            assert checksum == seen[step]
            shared += 1
        if step >= max(seen):
            break
    assert shared > 1


def test_a_replica_that_is_killed_comes_back() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=2000)
    try:
        address = lighthouse.address()
        with Replica(0, address) as survivor:
            with Replica(1, address) as killed:
                require_same(survivor, killed)
                killed.kill()
            next(survivor.steps(1))
            with Replica(1, address) as again:
                require_same(survivor, again)
    finally:
        lighthouse.shutdown()
