"""Losses that are no mean over a worker's samples, as far as only values show it.

Two things are looked at, beside what the kinds of a loss's operations tell (`zmqtrain.train.loss_graph`):

*second derivatives*: in a mean over samples no sample changes the gradient of another one. In a loss of pairs, of correlations or
of batch statistics it does (`couples`);

*constants*: what a loss divides by, over how many elements it is a mean, and by what a mean over the batch is multiplied, is the
same on all workers, unless each computes it of its own samples (`constants_of`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from zmqtrain.data.nested import leaves
from zmqtrain.train.loss_graph import (
    ADDS,
    BENDS,
    BOUNDARIES,
    MEAN,
    MOST_NODES,
    children_of,
    is_of_the_batch,
    is_without_rows,
    kind_of,
    leaves_of,
    of_weights,
)

#: A constant with more elements is not compared.
MOST_ELEMENTS = 4096
#: The most outputs of forwards whose second derivatives are computed.
MOST_OUTPUTS = 8

#: The kind of a constant that a whole loss is multiplied by.
SCALE = "scale"

OF_SAMPLES = (
    "each sample's gradient depends on other samples of the batch (a loss of pairs, of correlations, or of the batch's own mean), "
    "and each worker has only its own part of these: use one worker; if each worker's own loss is meant, write "
    "session.backward(loss * n, n) for its n samples"
)
DIFFERENT_CONSTANTS = (
    "this loss is not a mean over this worker's samples: what it divides by, over how many elements it is a mean, or what it "
    "multiplies a mean by, differs between the workers, so each computes it of its own samples (a mask, targets that count, the "
    "load of experts). Give the sum and its weight: session.backward(total, weight), with the number of those that count "
    '(docs/sessions.md, Losses); or average such a statistic with session.all_reduce(value, "mean") before it is used; if each '
    "worker's own loss is meant, write session.backward(loss * n, n) for its n samples"
)
DIFFERENT_SCALES = (
    "the workers multiply their losses by different numbers. That is right if each draws its own at random (mixup). If each "
    "computes it of its own samples, it is another one than that of the whole batch: average it first, with "
    'session.all_reduce(value, "mean")'
)


def rows_of(output: Any, samples: int) -> Iterator[Tensor]:
    """The tensors of a model's output that have a row for each sample, and a gradient."""
    for leaf in leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point() and leaf.ndim and len(leaf) == samples > 1:
            yield leaf


def couples(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    """Whether the gradient of the first half of the samples depends on those of the other half.

    ``outputs`` of the model have a row for each sample. One may be computed of another by layers that couple samples (a decoder
    with batch normalization, of codes): that is the model's doing, not the loss's, so each is varied while the others stay. If the
    loss cannot be differentiated twice, distances between all pairs of rows say so. Does nothing if the user has hooks that would
    be called."""
    samples = len(outputs[-1]) if outputs else 0
    # Others are of another batch.
    outputs = list({id(output): output for output in outputs if len(output) == samples and output.numel()}.values())
    if not outputs or any(output._backward_hooks for output in outputs):
        return False
    outputs.sort(key=_made_at, reverse=True)
    half = samples // 2
    try:
        with torch.enable_grad():
            whole = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
            first = _partial(whole, outputs, create_graph=True)
            mixed = [_mixture(each[:half]) for each in first if each is not None and each.requires_grad]
            if not mixed:
                return False
            second = torch.autograd.grad(torch.stack(mixed).sum(), outputs, retain_graph=True, allow_unused=True)
            alone = _partial(second, outputs, create_graph=False)
        of_others = max((float(each[half:].detach().abs().max()) for each in alone if each is not None), default=0.0)
        of_all = max((float(each.detach().abs().max()) for each in second if each is not None), default=0.0)
    except Exception:  # noqa: BLE001 - the loss has been computed, and that is all that is asked of it
        return loss.grad_fn is not None and _has_distances(loss.grad_fn)
    return of_others > 1e-4 * of_all


def _made_at(tensor: Tensor) -> int:
    """Larger for what was computed later; a leaf is made first."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def _partial(whole: Sequence[Tensor | None], outputs: Sequence[Tensor], *, create_graph: bool) -> list[Tensor | None]:
    """Derivatives by each output alone, of those in which outputs that are computed of it change with it.

    By the chain rule a whole derivative by one is its partial one, and those by the later ones through which it acts: the latest
    of the ``outputs``, which come in this order, has no later ones."""
    partial: list[Tensor | None] = []
    for number, (derivative, output) in enumerate(zip(whole, outputs, strict=True)):
        later = [(each, by) for each, by in zip(outputs[:number], partial, strict=True) if by is not None and each.requires_grad]
        if derivative is not None and later:
            of, by = zip(*later, strict=True)
            (through,) = torch.autograd.grad(of, output, by, create_graph=create_graph, retain_graph=True, allow_unused=True)
            derivative = derivative if through is None else derivative - through
        partial.append(derivative)
    return partial


def _has_distances(node: Node) -> bool:
    """Whether the loss is computed of the distances of all rows from each other."""
    nodes, seen = [node], 0
    while nodes and seen < MOST_NODES:
        seen += 1
        node = nodes.pop(0)
        if kind_of(node) in ("Cdist", "EuclideanDist", "Pdist"):
            children = children_of(node)
            points = getattr(node, "_saved_x1", getattr(node, "_saved_self", None))
            return isinstance(points, Tensor) and points.ndim == 2 and not any(map(of_weights, children))
        nodes += children_of(node)
    return False


def foreign_parameters(loss: Tensor, own: frozenset[int]) -> Iterator[nn.Parameter]:
    """The parameters that ``loss`` depends on, besides those with the identities ``own``. Looks at the whole graph."""
    return (leaf for leaf in leaves_of(loss) if isinstance(leaf, nn.Parameter) and id(leaf) not in own)


def _mixture(gradient: Tensor) -> Tensor:
    """A sum in which nothing cancels by accident."""
    factors = torch.arange(1, gradient.numel() + 1, device=gradient.device, dtype=torch.float32).cos().to(gradient.dtype)
    return (gradient.reshape(-1) * factors).sum()


@dataclass(slots=True)
class Constants:
    """Those of the losses of a step, as two numbers that workers compare."""

    kinds: int = 0
    """A checksum of what they are: workers whose losses have other terms are not compared."""
    value: float = 0.0
    """What must be the same on all workers."""
    scale: float = 0.0
    """The numbers that losses are multiplied by. They may differ if they are drawn at random, so workers warn only."""

    def add(self, found: Sequence[tuple[str, float]]) -> None:
        for kind, value in found:
            self.kinds = zlib.crc32(kind.encode(), self.kinds)
            weighted = value * (1.0 + self.kinds % 1021 / 1021)
            if kind == SCALE:
                self.scale += weighted
            else:
                self.value += weighted


def counts_of(loss: Tensor) -> list[tuple[str, float]]:
    """Over how many elements the loss is a mean, for each mean in it."""
    found = constants_of(loss, None, read=False)
    return [(kind, count) for kind, count in found if kind in ("mean", "Mean") and count == round(count)]


class Trials:
    """When a task's loss is tried on halves of its samples: in the first micro-batches, then in every one whose number is a power
    of 2, and where its constants are others than in any trial before, since a mask, or targets that are left out, may come late.

    A loss whose constants always differ (random weights) is tried ever more rarely."""

    def __init__(self, first: int) -> None:
        self._first, self._losses, self._pause, self._resumes = first, 0, 1, 0
        self._seen: set[tuple[tuple[str, float], ...]] = set()

    def due(self, loss: Tensor, samples: int, *, read: bool) -> bool:
        """Whether to try this loss. ``read``: as for `constants_of`."""
        self._losses += 1
        number, constants = self._losses, tuple(constants_of(loss, samples, read=read, counted=True))
        changed = number > self._first and number >= self._resumes and constants not in self._seen
        if number > self._first and number & (number - 1) and not changed:
            return False
        if changed:
            self._pause *= 2
            self._resumes = number + self._pause
        self._seen.add(constants)
        return True


def constants_of(
    loss: Tensor, samples: int | None, *, read: bool, counted: bool = False, inside: int | None = None
) -> list[tuple[str, float]]:
    """What of the loss must be the same on all workers, in the order of its graph.

    ``samples``: this worker's, by whose number counts are divided; ``None``: not known. ``read``: values that are on the device may
    be read. ``counted``: also the weight of targets that torch's losses have counted. ``inside``: as for
    `zmqtrain.train.loss_graph.not_a_mean`."""
    if loss.grad_fn is None or loss.numel() != 1:
        return []
    walk = _Walk(samples, inside, read=read, counted=counted)
    try:
        walk.visit(loss.grad_fn)
    except RuntimeError:  # a value has been changed in place, or the graph is gone: backward() will say so
        return []
    return walk.found


class _Walk:
    def __init__(self, samples: int | None, inside: int | None, *, read: bool, counted: bool) -> None:
        self._samples, self._inside = samples, inside
        self._read, self._counted, self._left = read, counted, MOST_NODES
        self.found: list[tuple[str, float]] = []

    def visit(self, node: Node | None) -> None:
        self._left -= 1
        if node is None or self._left < 0:
            return
        kind = kind_of(node)
        if hasattr(node, "_saved_reduction"):
            self._of_torchs(node)
            return
        if kind == "Mean" and not hasattr(node, "_saved_dim"):
            count = int(node._saved_self_sym_numel)  # type: ignore[attr-defined]
            self.found.append((kind, count if of_weights(node) or is_without_rows(node) else self._count(count)))
        elif kind in ("Div", "Mul", "Dot"):
            self._of_factor(node, kind)
        elif kind in BOUNDARIES and self._inside is not None:
            self._samples = self._inside
        elif kind not in ADDS | BENDS | {"Mean", "Sum", "Stack", "Rsub"}:
            return
        for child, _ in node.next_functions:
            self.visit(child)

    def _count(self, count: float) -> float:
        """A number of elements, or of those for each sample."""
        if self._samples and count % self._samples == 0:
            return count / self._samples
        return float(count)

    def _of_torchs(self, node: Any) -> None:
        """Note what a node of one of torch's loss functions shows."""
        if node._saved_reduction == MEAN:
            of = node._saved_target if kind_of(node).startswith("NllLoss") else node._saved_self
            self.found.append(("mean", self._count(of.numel())))
            if self._counted and kind_of(node).startswith("NllLoss"):
                self._keep("counted", node._saved_total_weight)
        for name in ("_saved_weight", "_saved_pos_weight"):
            weight = getattr(node, name, None)
            if weight is not None and weight.ndim < 2 and weight.shape[:1] != node._saved_self.shape[:1]:
                self._keep(name, weight)

    def _of_factor(self, node: Any, kind: str) -> None:
        """Of a quotient, or of a product with something that has no gradient."""
        one, other = [child for child, _ in node.next_functions] + [None] * (2 - len(node.next_functions))
        if kind == "Div":
            if other is None and isinstance(node._saved_other, Tensor) and not node._saved_other.ndim:
                self._keep("divisor", node._saved_other)
        elif one is None or other is None:
            factor = (node._saved_tensor if kind == "Dot" else node._saved_other) if other is None else node._saved_self
            if isinstance(factor, Tensor) and not factor.ndim:
                self._keep(SCALE, factor)
            elif isinstance(factor, Tensor) and is_of_the_batch(one or other):
                self._keep("factor", factor)

    def _keep(self, kind: str, value: Tensor) -> None:
        if value.numel() > MOST_ELEMENTS or not (self._read or value.device.type == "cpu"):
            return
        exact = value.detach().double().reshape(-1)
        total = float(_mixture(exact) if exact.numel() > 1 else exact.sum())
        if kind == SCALE:
            if not total or not math.isfinite(total):
                return
            if divisor := round(1 / total, 6):  # the inverse of the number of samples is a divisor, too
                total = 1 / self._count(divisor)
        self.found.append((kind, self._count(total) if kind in ("divisor", "counted") else total))
