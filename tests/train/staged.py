"""A device with memory of its own, as a GPU has it, in this process: copies run in threads, one a direction, and late."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from zmqtrain.train.device.cpu import CpuDevice


class CopyStaging:
    """What is queued on a CPU has run already, so a copy may begin at once; it ends later, and ``target`` holds NaN until then."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.copies = 0
        self.batches: list[str] = []
        """What happens to tensors of batches."""
        self.pinned: list[Tensor] = []
        self.before_each_copy: Callable[[], None] = lambda: time.sleep(delay_s)
        self._outgoing, self._incoming = self._direction("out"), self._direction("in")

    def pin(self, tensor: Tensor) -> None:
        self.pinned.append(tensor)

    def to_host(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        copied = self._copy(self._outgoing, source, target, done)
        return lambda: _wait(copied)

    def to_device(self, source: Tensor, target: Tensor, done: Callable[[], None]) -> Callable[[], None]:
        copied = self._copy(self._incoming, source, target, done)
        return lambda: _wait(copied)

    def ahead(self, source: Tensor) -> Callable[[], Tensor]:
        copy, copied = torch.empty_like(source).fill_(float("nan") if source.is_floating_point() else -1), threading.Event()
        self.batches.append("begun")

        def work() -> None:
            self.before_each_copy()
            copy.copy_(source)
            copied.set()

        def take() -> Tensor:
            self.batches.append("used")
            _wait(copied)
            return copy

        self._incoming.put(work)
        return take

    def synchronize(self) -> None:
        for direction in (self._outgoing, self._incoming):
            passed = threading.Event()
            direction.put(passed.set)
            _wait(passed)

    def _copy(
        self, direction: queue.SimpleQueue[Callable[[], None]], source: Tensor, target: Tensor, done: Callable[[], None]
    ) -> threading.Event:
        self.copies += 1
        assert any(_within(host, pinned) for host in (source, target) for pinned in self.pinned), "memory that was not pinned"
        copied = threading.Event()

        def copy() -> None:
            target.fill_(float("nan"))
            self.before_each_copy()
            target.copy_(source)
            copied.set()
            done()

        direction.put(copy)
        return copied

    def _direction(self, name: str) -> queue.SimpleQueue[Callable[[], None]]:
        jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

        def work() -> None:
            while True:
                jobs.get()()

        threading.Thread(target=work, name=f"copies-{name}", daemon=True).start()
        return jobs


class StagedDevice(CpuDevice):
    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(threads=1)
        self.staging: CopyStaging = CopyStaging(delay_s)


def _within(inner: Tensor, outer: Tensor) -> bool:
    start = inner.data_ptr() - outer.data_ptr()
    return start >= 0 and start + inner.nbytes <= outer.nbytes


def _wait(event: threading.Event) -> None:
    assert event.wait(20), "a copy never ended"
