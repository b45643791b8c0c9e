"""The random states of a worker's process, as tensors and plain values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zmqtrain.data.draws import not_drawing
from zmqtrain.data.seeding import seed_torch
from zmqtrain.parallel.turns import generator_state, turn
from zmqtrain.train.device.accelerator import accelerator_of


def seed_everything(seed: int, rank: int | None = None) -> None:
    """Seed Python, numpy and torch: equally on all workers, or (with ``rank``) differently on each. Waits until no loading thread
    of this process draws."""
    sequence = np.random.SeedSequence([seed] if rank is None else [seed, rank + 1])
    state = [int(word) for word in sequence.generate_state(3, np.uint64)]
    with not_drawing():  # another worker's thread would go on with this seed
        random.seed(state[0])
        np.random.seed(state[1] % 2**32)
    seed_torch(state[2] % 2**63)


@contextmanager
def drawn_alike(device: torch.device, seed: Sequence[int]) -> Iterator[None]:
    """A context in which torch's global generators (of the CPU and the device) follow from ``seed``; afterwards they go on as if
    nothing had been drawn. Python's and numpy's stay as they are, since a loading thread draws from them at the same time."""
    accelerator = accelerator_of(device)
    with turn():
        before = generator_state()
        on_device = None if accelerator is None else accelerator.random_state(device)
        word = int(np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)[0])
        seed_torch(word % 2**63, () if accelerator is None else None)
        try:
            yield
        finally:
            torch.set_rng_state(before)
            if accelerator is not None and on_device is not None:
                accelerator.set_random_state(device, on_device)


def imported(name: str, load: Callable[[], ModuleType]) -> ModuleType:
    """A module of the task's code. If it seeds generators or draws from them when it is imported, they are afterwards as it leaves
    them, also where this process has it already: for another of its ranks, or by ``[job] preload``.

    Args:
        name: the module's.
        load: imports it, or finds it imported.
    """
    if (left := _LEFT.get(name)) is not None:
        torch.set_rng_state(left[0])
        with not_drawing():
            np.random.set_state(left[1])
            random.setstate(left[2])
        return load()
    before = _states()
    module = load()
    after = _states()
    if not torch.equal(before[0], after[0]) or before[1:] != after[1:]:
        _LEFT[name] = after
    return module


def _states() -> tuple[Tensor, Any, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return generator_state(), (name, np.asarray(keys).tolist(), *rest), random.getstate()


#: Modules that have drawn when they were imported, with the states of torch's, numpy's and Python's generators afterwards.
_LEFT: dict[str, tuple[Tensor, Any, Any]] = {}


def random_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state that `restore_random_state` takes: tensors named ``random/...``, and plain values."""
    tensors = {"random/torch": generator_state()}
    accelerator = accelerator_of(device)
    if accelerator is not None:
        tensors[f"random/{device.type}"] = accelerator.random_state(device)
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors["random/numpy"] = torch.from_numpy(np.asarray(keys).view(np.int32).copy())
    version, state, gauss_next = random.getstate()
    values = {"numpy": [name, int(position), int(has_gauss), float(gauss)], "python": [version, list(state), gauss_next]}
    return tensors, values


def restore_random_state(device: torch.device, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    with turn():
        torch.set_rng_state(tensors["random/torch"].clone())
    accelerator, own = accelerator_of(device), tensors.get(f"random/{device.type}")
    if accelerator is not None and own is not None:  # otherwise it was written on another kind of device
        accelerator.set_random_state(device, own.clone())
    name, position, has_gauss, gauss = values["numpy"]
    if name != "MT19937" or not 0 <= position <= len(tensors["random/numpy"]):  # unchecked, numpy would read beyond its end
        raise ValueError(f"position {position!r:.40} of numpy's {name!r:.40}")
    version, state, gauss_next = values["python"]
    with not_drawing():
        np.random.set_state((name, tensors["random/numpy"].numpy().view(np.uint32).copy(), position, has_gauss, gauss))
        random.setstate((version, tuple(state), gauss_next))
