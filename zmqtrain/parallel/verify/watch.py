"""Where two models part: the first module, in the order of the forward, whose output differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zmqtrain.parallel.placed.model import ParallelModel, map_tensors
from zmqtrain.parallel.placed.tensor import Placed
from zmqtrain.parallel.placement import Placement
from zmqtrain.parallel.verify.tolerance import largest

#: Of the ordinary model's outputs that are kept: a differing module is most often found long before.
MOST_BYTES = 2**30
#: Of a module's largest output. What matters has been found before; here is asked where it begins.
RELATIVE = {torch.float64: 1e-7, torch.float32: 1e-3}


class Watch:
    """Sees the ordinary model's forward first, and the divided one's after it."""

    def __init__(self) -> None:
        self.modules: list[tuple[str, str]] = []
        """Phase and name of each module's call, in the order in which the ordinary model's ended."""
        self.first: int | None = None
        """The number of the first one whose output differs here."""
        self._places: dict[tuple[str, str, int], int] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        self._bytes = 0

    @contextmanager
    def over(self, model: nn.Module, phase: str) -> Iterator[None]:
        """Watch a forward of it."""
        calls: Counter[str] = Counter()
        inner = model.inner if isinstance(model, ParallelModel) else model
        handles: list[RemovableHandle] = []
        for name, module in inner.named_modules():

            def seen(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                if torch._C._current_graph_task_id() != -1:
                    return  # computed again, for its backward
                calls[name] += 1
                found: list[Tensor] = []
                map_tensors(output, found.append)
                if isinstance(model, ParallelModel):
                    self._compare(model, (phase, name, calls[name]), found)
                else:
                    self._keep((phase, name, calls[name]), found)

            handles.append(module.register_forward_hook(seen))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, key: tuple[str, str, int], found: list[Tensor]) -> None:
        place = self._places[key] = len(self.modules)
        self.modules.append(key[:2])
        size = sum(each.nbytes for each in found)
        if self._bytes + size <= MOST_BYTES:
            self._bytes += size
            self._outputs[place] = [each.detach().clone() for each in found]

    def _compare(self, model: ParallelModel, key: tuple[str, str, int], found: list[Tensor]) -> None:
        place = self._places.get(key)
        expected = None if place is None else self._outputs.get(place)
        if place is None or expected is None or (self.first is not None and self.first <= place):
            return
        if len(found) != len(expected) or any(not _alike(model, own, whole) for own, whole in zip(found, expected, strict=True)):
            self.first = place


def block_of(whole: Tensor, placement: Placement, rank: int) -> Tensor:
    """The block of a whole tensor that a rank should hold with this placement, as a view."""
    for dimension, (start, stop) in enumerate(placement.block(whole.shape, rank)):
        whole = whole.narrow(dimension, start, stop - start)
    return whole


def _alike(model: ParallelModel, own: Tensor, whole: Tensor) -> bool:
    if isinstance(own, Placed):
        if tuple(own.shape) != tuple(whole.shape):
            return False
        if own.placement.summands != "none":
            return True  # parts of sums say nothing by themselves
        local, part = own.local.detach(), block_of(whole, own.placement, model.fabric.rank)
    else:
        local, part = own.detach(), whole
    if local.shape != part.shape:
        return isinstance(own, Placed) is False  # of the whole model, which gives plain tensors, parts
    if not local.numel() or local.dtype != part.dtype:
        return True
    difference = torch.where(local == part, 0, local - part) if local.is_floating_point() else (local != part)
    by = float(difference.abs().nan_to_num(0.0).max()) if local.is_floating_point() else float(difference.any())
    return by <= RELATIVE.get(whole.dtype, 0.0) * largest(whole)


@contextmanager
def watching(watch: Watch | None, model: nn.Module, phase: str) -> Iterator[None]:
    """`Watch.over`, where there is one."""
    if watch is None:
        yield
        return
    with watch.over(model, phase):
        yield
