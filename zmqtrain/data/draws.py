"""Random numbers for reading samples: they follow from a batch's seed, wherever it is read."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import get_worker_info

from zmqtrain.data.seeding import seed_torch

#: Functions that take a generator.
_DRAWS = frozenset(
    {
        torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial, torch.poisson,
        Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.uniform_, Tensor.normal_, Tensor.random_,
        Tensor.exponential_, Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_,
    }
)  # fmt: skip


class OwnDraws(TorchFunctionMode):
    """While active, torch draws in this thread from a separate generator and not from the global one, which belongs to the model.

    That holds for functions that take a generator, and for ``rand_like`` and the like, but not for `torch.nn.functional.dropout`.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS and kwargs.get("generator") is None and _on_cpu(args, kwargs):
            if not any(isinstance(argument, torch.Generator) for argument in args):
                kwargs = {**kwargs, "generator": self._generator}
        elif func in (torch.rand_like, torch.randn_like) and args and _on_cpu(args, kwargs):
            empty = torch.empty_like(*args, **kwargs)
            fill = Tensor.uniform_ if func is torch.rand_like else Tensor.normal_
            with torch.no_grad():
                return fill(empty, generator=self._generator)
        elif func is torch.randint_like and args and _on_cpu(args, kwargs):
            like, *bounds = args
            bounds += [kwargs.pop(name) for name in ("low", "high") if name in kwargs]
            with torch.no_grad():
                return torch.empty_like(like, **kwargs).random_(*([0] * (2 - len(bounds))), *bounds, generator=self._generator)
        return func(*args, **kwargs)


def _on_cpu(args: Any, kwargs: Any) -> bool:
    where = kwargs.get("device")
    return (where is None or torch.device(where).type == "cpu") and not any(
        isinstance(argument, Tensor) and argument.device.type != "cpu" for argument in args
    )


class _Alone:
    """A lock: Python's and numpy's generators belong to the process, so of several loading threads (workers in one process) only
    one draws at a time."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.lock = threading.RLock()


_alone = _Alone()
os.register_at_fork(after_in_child=_alone.renew)  # the thread that held the lock does not exist in the child


@contextmanager
def not_drawing() -> Iterator[None]:
    """No loading thread draws meanwhile."""
    with _alone.lock:
        yield


@contextmanager
def drawn_from(seed: Sequence[int], *, restore: bool = False) -> Iterator[None]:
    """A context in which Python's, numpy's and torch's global generators follow from ``seed``, in any thread or loader process.

    In a process that trains, torch's global generator itself is not touched, since the model draws from it at the same time.
    Python's and numpy's are seeded, and keep the state they have at the end. With ``restore``, their old state comes back, which is
    for a thread that alone uses them.
    """
    with _alone.lock:
        yield from _drawing(seed, restore)


def _drawing(seed: Sequence[int], restore: bool) -> Iterator[None]:
    before = (random.getstate(), np.random.get_state()) if restore else None
    state = np.random.SeedSequence(list(seed)).generate_state(3)
    random.seed(int(state[0]))
    np.random.seed(int(state[1]))
    if get_worker_info() is not None:
        seed_torch(int(state[2]))  # nothing else draws in a loader process
    try:
        with OwnDraws(int(state[2])):
            yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])
