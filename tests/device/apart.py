"""The device "apart", where there is no GPU: torch's real dispatch to another device, and copies that are late.

`apart.cpp` says what its memory is like. It stays in the process that has loaded it, and changes what torch thinks of pinned memory
there, so a process of its own runs the tests (`tests/test_apart.py`).
"""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zmqtrain.train.device.accelerator import KINDS, Event, Stream

SOURCE = Path(__file__).with_name("apart.cpp")
#: Copies take so long, in seconds: far more than a backward of a small model.
LATE_S = 0.002
PATIENCE_S = 20.0


def missing() -> str | None:
    """Why the device cannot be made here, if so."""
    return None if shutil.which("g++") else "there is no g++ to compile tests/device/apart.cpp with"


def built() -> Path:
    """The extension, compiled if it has not been yet. Raises `RuntimeError` with the compiler's words."""
    torch_folder = Path(torch.__file__).parent
    seed = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"zmqtrain-apart-{os.getuid()}"
    library = folder / f"apart-{seed}.so"
    if library.exists():
        return library
    folder.mkdir(exist_ok=True, mode=0o700)
    here = folder / f"{os.getpid()}.so"
    include = torch_folder / "include"
    words = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-isystem", str(include)]
    words += ["-isystem", str(include / "torch/csrc/api/include"), str(SOURCE), "-o", str(here)]
    words += [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    here.replace(library)  # at once, whoever else compiles it
    return library


class Late(Stream):
    """Work in a thread of its own, in order."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="a stream apart", daemon=True).start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def synchronize(self) -> None:
        passed = Passed()
        passed.record(self)
        passed.synchronize()

    def _work(self) -> None:
        while True:
            self._jobs.get()()


class AtOnce(Stream):
    """Where arithmetic is queued: it has run when the call returns."""

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        """Nothing is queued."""


class Passed(Event):
    def __init__(self) -> None:
        self._passed = threading.Event()

    def record(self, stream: Stream) -> None:
        if isinstance(stream, Late):
            stream.put(self._passed.set)
        else:
            self._passed.set()

    def synchronize(self) -> None:
        assert self._passed.wait(PATIENCE_S), "a copy never ended"


class Apart:
    """Implements `zmqtrain.train.device.accelerator.Accelerator`."""

    streams: tuple[Late, ...] = ()
    copies = 0
    """So many were queued beside the arithmetic."""

    def count(self) -> int:
        return 8

    def use(self, device: torch.device) -> None:
        torch.ops.apart.set_device(device.index)

    def stream(self, device: torch.device) -> Stream:
        made = Late()
        Apart.streams += (made,)
        return made

    def current(self, device: torch.device) -> Stream:
        return AtOnce()

    def event(self) -> Event:
        return Passed()

    def copy(self, source: Tensor, target: Tensor, stream: Stream) -> None:
        assert isinstance(stream, Late)
        kinds = {each.device.type for each in (source, target)}
        assert kinds == {"apart", "cpu"}, f"a copy between {kinds}"
        host = source if source.device.type == "cpu" else target
        assert host.is_pinned(), "this copy would not have run beside the arithmetic"
        self._queue(source, target, stream)

    def move(self, source: Tensor, device: torch.device, stream: Stream) -> Tensor:
        made = torch.empty_like(source, device=device)
        assert isinstance(stream, Late)
        if source.is_pinned():
            self._queue(source, made, stream)
        else:
            made.copy_(source)
        return made

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Nothing is queued where arithmetic is."""

    def synchronize(self, device: torch.device) -> None:
        for stream in Apart.streams:
            stream.synchronize()

    def pin(self, tensor: Tensor, device: torch.device) -> bool:
        assert tensor.device.type == "cpu"
        if tensor.is_pinned():
            return False
        torch.ops.apart.pin(tensor.data_ptr(), tensor.nbytes)
        return True

    def unpin(self, tensor: Tensor) -> None:
        torch.ops.apart.unpin(tensor.data_ptr())

    def random_state(self, device: torch.device) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        assert state.device.type == "cpu"
        assert state.dtype == torch.uint8

    def _queue(self, source: Tensor, target: Tensor, stream: Late) -> None:
        Apart.copies += 1

        def copy() -> None:
            target.fill_(float("nan") if target.is_floating_point() else -1)
            time.sleep(LATE_S)
            target.copy_(source)

        stream.put(copy)


def load() -> None:
    """Let torch and the package know it, once."""
    if "apart" in KINDS:
        return
    torch.ops.load_library(built())
    torch.utils.rename_privateuse1_backend("apart")
    module: Any = types.ModuleType("torch.apart")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 8
    module.current_device = torch.ops.apart.current_device
    module.set_device = lambda device: torch.ops.apart.set_device(torch.device("apart", device).index)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: None
    torch._register_device_module("apart", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.empty(1).pin_memory()  # torch knows of no pinned memory before it has made some
    KINDS["apart"] = Apart
