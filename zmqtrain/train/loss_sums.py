"""Losses that are sums over a worker's samples, and are not divided by their number.

The mean of the workers' values is the value for all samples only if each worker divides by its own number of samples. One that
divides by a fixed number, or by nothing, trains with a gradient that is too small by the number of workers. The graph of a loss
shows what is summed and what it is divided by (`summed`), unless the loss is computed where no graph is kept (`hidden`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from zmqtrain.train.loss_graph import (
    ADDS,
    BOUNDARIES,
    MOST_NODES,
    SCALES,
    SUM,
    children_of,
    dims_of,
    is_without_rows,
    kind_of,
    of_weights,
)

#: So many operations may be between a model's output and the sum.
MOST_BETWEEN = 256
#: Half a sum of squares is divided by twice the number of samples.
_USUAL = (1, 2)
_ADDS = ADDS | {"Rsub"}

_QUOTIENT = (
    "it is a quotient of two sums over samples (a Dice or Tversky loss?), and the mean of the workers' quotients is not that of "
    "all samples. Compute it for each sample, then the mean; if each worker's own quotient is meant, write "
    "session.backward(loss * n, n) for its n samples"
)
HIDDEN = (
    "the loss is computed by an operation whose parts cannot be seen (a function compiled by torch.compile, or a "
    "torch.autograd.Function), so it is not checked that it is a mean over samples. If it is no mean (class weights, targets left "
    "out, a sum, pairs of samples), give its sum and weight to session.backward(total, weight)"
)


def hidden(loss: Tensor) -> bool:
    """Whether an operation of the user's or the compiler's own has computed the loss, or a term of it."""
    nodes = [] if loss.grad_fn is None or loss.numel() != 1 else [loss.grad_fn]
    for _ in range(MOST_NODES):
        if not nodes:
            return False
        node = nodes.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction) and kind_of(node) not in BOUNDARIES:
            return True
        if kind_of(node) in _ADDS | SCALES:
            nodes += children_of(node)
    return False


def summed(
    loss: Tensor,
    outputs: Sequence[Tensor],
    wholes: Collection[int],
    inner: Collection[Node] = (),
    *,
    read: bool,
    inside: int | None = None,
) -> str:
    """Why the loss is a sum over samples that is not divided by their number, with what to do, in words; empty if nothing shows
    that.

    ``outputs`` of the model have a row for each of this worker's samples. ``wholes``: the numbers of samples of larger batches,
    those of its group and of all groups. ``inner``: operations within the model whose results have a row for each sample, too.
    ``read``: divisors that are on the device may be read. ``inside``: as for `zmqtrain.train.loss_graph.not_a_mean`."""
    samples = len(outputs[-1]) if outputs else inside or 0
    if not samples or loss.grad_fn is None or loss.numel() != 1:
        return ""
    ends = {output.grad_fn for output in outputs if len(output) == samples and output.grad_fn is not None} | set(inner)
    try:
        return _Walk(samples, ends, sorted(set(wholes) - {samples}), inside, read=read).reason(loss.grad_fn, ())
    except RuntimeError:  # a value has been changed in place, or the graph is gone: backward() will say so
        return ""


class _Walk:
    def __init__(
        self, samples: int, ends: Collection[Node] | None, wholes: Sequence[int], inside: int | None, *, read: bool
    ) -> None:
        """``ends``: ``None`` within the model."""
        self._samples, self._ends, self._wholes, self._inside, self._read = samples, ends, wholes, inside, read
        self._left = MOST_NODES

    def reason(self, node: Node | None, divisors: tuple[float, ...]) -> str:
        """Of a term of the loss, which is divided by each of the ``divisors``; NaN: by something that is not known."""
        self._left -= 1
        if node is None or self._left < 0:
            return ""
        kind, children = kind_of(node), children_of(node)
        if kind in BOUNDARIES and self._inside and children:
            wholes = [each for each in self._wholes if each > self._inside]
            return _Walk(self._inside, None, wholes, self._inside, read=self._read).reason(children[0], divisors)
        if kind == "Div" and len(children) > 1 and all(map(self._has_sum, children)):
            return _QUOTIENT
        if kind in SCALES and len(children) == 1:
            divisors += (self._divisor(node, kind),)
        if kind in _ADDS | SCALES:
            return next(filter(None, (self.reason(child, divisors) for child in children)), "")
        if (shape := self._rows_summed(node)) is not None:
            return self._of_sum(shape, divisors)
        if kind in ("Mean", "Sum") and is_without_rows(node):  # of the values of several losses, or of the classes'
            return self.reason(children[0], divisors)
        return ""

    def _of_sum(self, shape: Sequence[int], divisors: Sequence[float]) -> str:
        """Of a sum over all ``shape[0]`` rows, and over the dimensions beside them in ``shape``."""
        if any(map(math.isnan, divisors)) or any(self._explains(divisor, shape) for divisor in divisors):
            return ""
        by = max(map(abs, divisors), default=0.0)
        divided = f"divided by {by:g}" if by > 1 else "not divided by their number"
        of = f" of {self._wholes[-1]}" if self._wholes else ""
        return (
            f"it is a sum over the samples that is {divided}, and this worker has {self._samples}{of} samples: the mean of the "
            "workers' values is then not the value for all. Divide by the number of this worker's samples, and write any other "
            "factor apart (0.5 * total / len(inputs)); or call session.backward(total, weight), for the sum of all workers' totals "
            "divided by that of their weights"
        )

    def _explains(self, divisor: float, shape: Sequence[int]) -> bool:
        """Whether a number is that of the samples, or that of the values that count in them."""
        each = abs(divisor) / self._samples
        if each < 1 or abs(each - round(each)) > 1e-4 * each:
            return False
        sizes = (shape[0] // self._samples, *shape[1:])
        usual = {math.prod(some) for number in range(len(sizes) + 1) for some in combinations(sizes, number)}
        whole = round(abs(divisor)) in self._wholes
        if round(each) in (usual if whole else {times * each for each in usual for times in _USUAL}):
            return True
        return not whole and each <= math.prod(sizes)  # so many of each sample's values, as a mask with a fixed number

    def _divisor(self, node: Any, kind: str) -> float:
        """What the only term with a gradient is divided by."""
        kept = node._saved_self if kind == "Mul" and node.next_functions[0][0] is None else node._saved_other
        if not isinstance(kept, Tensor) or kept.numel() != 1 or not (self._read or kept.device.type == "cpu"):
            return math.nan
        value = float(kept)
        if kind == "Div":
            return value
        return 1 / value if value else math.nan

    def _has_sum(self, node: Node | None, left: int = 8) -> bool:
        """Whether this is computed, in a few operations, of a sum or a mean over the samples."""
        if node is None or not left:
            return False
        if kind_of(node) in ("Mean", "Sum"):
            return self._rows_summed(node, ("Mean", "Sum")) is not None or (
                is_without_rows(node) and any(self._has_sum(child, left - 1) for child in children_of(node))
            )
        through = kind_of(node) in _ADDS | SCALES | {"Clamp", "ClampMin"}
        return through and any(self._has_sum(child, left - 1) for child in children_of(node))

    def _rows_summed(self, node: Any, kinds: Collection[str] = ("Sum",)) -> tuple[int, ...] | None:
        """The sizes of what is summed over all samples, theirs first; ``None`` if this is no such sum."""
        if getattr(node, "_saved_reduction", None) == SUM and "Sum" in kinds:
            target = getattr(node, "_saved_target", None)
            of = target if kind_of(node).startswith("NllLoss") and target is not None else getattr(node, "_saved_self", None)
            shape = tuple(of.shape) if isinstance(of, Tensor) else ()
        elif kind_of(node) in kinds:
            sizes = tuple(node._saved_self_sym_sizes)
            reduced = dims_of(node) or range(len(sizes))
            shape = tuple(sizes[dim] for dim in sorted(reduced)) if 0 in reduced else ()
            shape += _summed_before(node) if shape else ()
        else:
            return None
        if not shape or shape[0] % self._samples or not shape[0]:
            return None
        if is_without_rows(node) or all(map(of_weights, children_of(node))) or not self._reaches(node):
            return None
        return shape

    def _reaches(self, node: Node) -> bool:
        """Whether this is computed of the model's outputs."""
        return self._ends is None or any(found in self._ends for found in _below(node))


def _summed_before(node: Node) -> tuple[int, ...]:
    """The sizes of what was summed within each row, just before: over classes, by label smoothing."""
    for _ in range(4):
        children = children_of(node)
        if len(children) != 1:
            return ()
        node = children[0]
        if kind_of(node) == "Sum":
            sizes, reduced = tuple(node._saved_self_sym_sizes), dims_of(node)  # type: ignore[attr-defined]
            return () if not reduced or 0 in reduced else tuple(sizes[dim] for dim in sorted(reduced))
        if kind_of(node) not in ("Neg", "MaskedFill", "View", "Reshape", "Squeeze", "Unsqueeze"):
            return ()
    return ()


def _below(node: Node) -> Iterator[Node]:
    """What a node is computed of, the nearest first, to a limit."""
    nodes, seen = [node], {node}
    for found in nodes:
        yield found
        for child in children_of(found):
            if child not in seen and len(nodes) < MOST_BETWEEN:
                seen.add(child)
                nodes.append(child)
