"""Losses that are no mean over a worker's samples, as far as the kinds of operations in the graph of a loss show it.

A worker's ``loss.backward()`` counts by its number of samples, which is right for the mean loss of these. Torch's loss functions
keep in the graph what they were given: class weights, how many targets counted, sums. What values tell beside this is in
`zmqtrain.train.loss_trial`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

#: So many nodes are looked at, beginning with the loss.
MOST_NODES = 64
#: So many nodes may be between a loss and the product that its scores come from: a logarithm, a temperature.
MOST_SCALED = 6
#: What adds terms, or does not change the value of a single element.
ADDS = frozenset(
    {"Add", "Sub", "Neg", "Squeeze", "Unsqueeze", "View", "UnsafeView", "Reshape", "Clone", "Alias", "ToCopy", "Expand"}
)
SCALES = frozenset({"Mul", "Div"})
BENDS = frozenset(
    {
        *("Sqrt", "Rsqrt", "Log", "Log1P", "Log2", "Log10", "Exp", "Expm1", "Pow", "Reciprocal", "Tanh", "Sigmoid", "Square"),
        *("Abs", "Relu", "Clamp", "ClampMin", "ClampMax", "Softplus", "Maximum", "Minimum"),
    }
)
#: What leads into a divided model, or out of it: values stay as they are.
BOUNDARIES = frozenset({"_ToLocal", "_FromLocal"})
MEAN, SUM = 1, 2  # torch's numbers for reductions
#: What chooses among values.
_PICKS = frozenset({"Max", "Min", "Amax", "Amin", "Median", "Nanmedian", "Kthvalue", "Topk", "Sort"})
#: So many nodes may be between a loss and what chooses among its samples.
MOST_PICKED = 12

_WEIGHTED = (
    'give the sum and its weight: session.backward(total, weight), with reduction="sum", and the sum of the weights of the '
    "targets that count; of a mean that the model computes, session.backward(loss * n, n) for the n targets that count "
    "(docs/sessions.md, Losses)"
)

PICKED = "it chooses among the samples (a maximum, a median, the hardest), of which each worker has only its own: use one worker"

_SUMMED = (
    'it is the sum over the samples (reduction="sum", or backward() of ones), and the mean of the workers\' sums is not the sum of '
    "all. Use the mean over samples, with a learning rate that fits; or session.backward(total, weight), for the sum of all "
    "workers' totals divided by that of their weights. For gradients of inputs alone use torch.autograd.grad()"
)


def children_of(node: Node) -> list[Node]:
    """The nodes whose results this one is computed of, as far as they have a gradient."""
    return [child for child, _ in node.next_functions if child is not None]


def leaves_of(loss: Tensor, *, beside: Collection[Node | None] = ()) -> Iterator[Tensor]:
    """The tensors at the ends of the whole graph of ``loss``, parameters above all; not through the nodes ``beside``."""
    for node in nodes_of(loss, beside=beside):
        if "AccumulateGrad" in node.name():
            yield node.variable  # type: ignore[attr-defined]


def nodes_of(loss: Tensor, *, beside: Collection[Node | None] = ()) -> Iterator[Node]:
    """All nodes of the graph of ``loss``, each once; not the nodes ``beside``, nor what is only reached through them."""
    nodes, seen = [] if loss.grad_fn is None else [loss.grad_fn], set[Node]()
    while nodes:
        node = nodes.pop()
        if node in seen or node in beside:
            continue
        seen.add(node)
        yield node
        nodes += children_of(node)


def not_a_mean(loss: Tensor, gradient: Tensor | None = None, samples: int | None = None, *, inside: int | None = None) -> str:
    """Why the loss is not a mean over samples, with what to do, in words; empty if nothing shows that.

    ``gradient``: what backward() is given, for a loss of several elements. ``samples``: this worker's; ``None``: not known. Targets
    may be left out if as many are left for each of them, as in a language model whose last token has no next one; whether other
    workers have as many, `zmqtrain.train.loss_trial.constants_of` shows. ``inside``: the samples of which a divided model has
    computed the loss, or a part of it, if these are not all samples of the step; ``None``: what it computes is not looked at."""
    if loss.grad_fn is None:
        return ""
    if loss.numel() != 1:
        return _SUMMED if gradient is not None and gradient.numel() > 1 and bool((gradient == 1).all()) else ""
    if picks_samples(loss, inside=inside is not None):
        return f"{PICKED}; if each worker's own choice is meant, write session.backward(loss * n, n) for its n samples"
    return _Walk(samples, inside).reason(loss.grad_fn, scaled=False)


class _Walk:
    def __init__(self, samples: int | None, inside: int | None) -> None:
        self._samples, self._inside, self._left = samples, inside, MOST_NODES

    def reason(self, node: Node | None, *, scaled: bool) -> str:
        """Of a term of the loss. ``scaled``: it is multiplied by something."""
        self._left -= 1
        if node is None or self._left < 0:
            return ""
        kind, children = kind_of(node), children_of(node)
        if hasattr(node, "_saved_reduction"):
            return _of_torchs(node, self._samples, scaled=scaled)
        if kind in SCALES and sum(map(self._has_mean, children)) > 1:
            return (
                "a product or quotient of means is not the mean of the workers' products: compute it for each sample, then the mean"
            )
        if kind in BOUNDARIES and self._inside is not None:
            return _Walk(self._inside, self._inside).reason(children[0] if children else None, scaled=scaled)
        if kind in ADDS or kind in SCALES:
            found = (self.reason(child, scaled=scaled or kind in SCALES) for child in children)
            return next(filter(None, found), "")
        if kind in BENDS and any(map(self._has_mean, children)):
            return (
                f"it is a function ({kind.lower()}) of a mean, and the mean of the workers' values is not that of the mean of all "
                "samples: apply the function to each sample's loss, or train with the mean itself"
            )
        return ""

    def _has_mean(self, node: Node | None) -> bool:
        """Whether a mean loss of torch is among what a single element is computed of."""
        self._left -= 1
        if node is None or self._left < 0:
            return False
        if hasattr(node, "_saved_reduction"):
            return bool(getattr(node, "_saved_reduction") == MEAN)  # noqa: B009 - not known to mypy
        through = kind_of(node) in ADDS | SCALES | BENDS | {"Rsub"}
        return through and any(self._has_mean(child) for child, _ in node.next_functions)


def picks_samples(loss: Tensor, *, inside: bool = False) -> bool:
    """Whether a loss is computed of the largest, the smallest or the middle ones of values that have a row for each sample.

    ``inside``: also by a divided model."""
    return _picks_samples(loss.grad_fn, MOST_PICKED, inside=inside)


def _picks_samples(node: Node | None, left: int, *, inside: bool) -> bool:
    if node is None or not left or hasattr(node, "_saved_reduction"):
        return False
    kind = kind_of(node)
    children = children_of(node)
    if kind in _PICKS:
        return _picks_rows(node) and not all(map(of_weights, children))
    through = kind in ADDS or kind in SCALES or kind in ("Mean", "Sum", "Relu", "Clamp", "Slice", "Index")
    through |= inside and kind in BOUNDARIES
    return through and any(_picks_samples(child, left - 1, inside=inside) for child in children[:2])


def _picks_rows(node: Any) -> bool:
    """Whether the choice is made along the first dimension, or among all elements."""
    shape = tuple(node._saved_self_sym_sizes if hasattr(node, "_saved_self_sym_sizes") else node._saved_self.shape)
    dims = dims_of(node)
    return (not dims or 0 in dims) and bool(shape) and shape[0] > 1


def of_weights(node: Node, left: int = 8) -> bool:
    """Whether this is computed of parameters and numbers alone, in a few operations on each element."""
    if "AccumulateGrad" in node.name():
        return True
    kind = kind_of(node)
    if not left or kind not in ADDS | SCALES | BENDS | {"Sum", "Mean", "LinalgVectorNorm", "T", "Transpose", "Permute"}:
        return False
    if kind in SCALES:
        factors = [getattr(node, name, None) for name in ("_saved_self", "_saved_other")]
        if any(child is None for child, _ in node.next_functions) and any(isinstance(f, Tensor) and f.ndim for f in factors):
            return False
    return all(of_weights(child, left - 1) for child, _ in node.next_functions if child is not None)


def is_without_rows(node: Node, left: int = 8) -> bool:
    """Whether this is computed, element by element, of means over samples or of several losses, so that no row is a sample's."""
    children = children_of(node)
    if any(kind_of(child) == "Stack" or is_of_the_batch(child) for child in children):
        return True
    through = [child for child in children if kind_of(child) in ADDS | SCALES | BENDS]
    return left > 0 and any(is_without_rows(child, left - 1) for child in through)


def is_of_the_batch(node: Node | None, left: int = 12) -> bool:
    """Whether this is a mean or a sum over the first dimension, and not over all, or several of these, divided by numbers."""
    if node is None or not left:
        return False
    if kind_of(node) in ("Mean", "Sum"):
        return 0 in tuple(getattr(node, "_saved_dim", None) or ())
    children = children_of(node) if kind_of(node) in ADDS | SCALES else []
    return bool(children) and all(is_of_the_batch(child, left - 1) for child in children)


def dims_of(node: Any) -> list[int]:
    """The dimensions that an operation reduces, counted from the first one; empty for all."""
    dims = getattr(node, "_saved_dim", None)
    signed = [dim - 2**64 if dim > 2**63 else dim for dim in ([dims] if isinstance(dims, int) else dims or ())]
    shape = node._saved_self_sym_sizes if hasattr(node, "_saved_self_sym_sizes") else node._saved_self.shape
    return [dim % max(1, len(shape)) for dim in signed]


def kind_of(node: Node) -> str:
    """``Add`` of ``AddBackward0``."""
    return node.name().partition("Backward")[0]


def _of_torchs(node: Any, samples: int | None, *, scaled: bool) -> str:
    """Why the loss of one of torch's functions is no mean over the samples; empty if that does not show."""
    if node._saved_reduction == SUM and not scaled:
        return _SUMMED
    if node._saved_reduction != MEAN or not kind_of(node).startswith("NllLoss"):
        return ""
    target = node._saved_target
    counted = float(node._saved_total_weight)
    if node._saved_weight is not None and counted != target.numel():
        return f"it has class weights, so workers count by the weights of their targets: {_WEIGHTED}"
    if counted != target.numel() and (not samples or not counted or counted % samples):
        return f"it leaves out targets (ignore_index), so workers with more of them would count too much: {_WEIGHTED}"
    if target.ndim == 1 and 1 < len(target) == node._saved_self.shape[1] and _of_pairs(node):
        own = torch.arange(len(target), device=target.device)
        if not torch.equal(target, own):
            return ""
        return (
            "it compares each sample with the others of its batch (a contrastive loss), and each worker has only its own part of "
            "these: use one worker, or a grid in which one column has all samples; if each worker's own loss is meant, write "
            "session.backward(loss * n, n) for its n samples"
        )
    return ""


def _of_pairs(node: Node, left: int = MOST_SCALED) -> bool:
    """Whether the loss's scores are products of two activations each, and not of activations and weights."""
    children = children_of(node)
    if kind_of(node) == "Mm":
        return len(children) == 2 and not any(map(_is_weight, children))
    return left > 0 and len(children) <= 2 and any(_of_pairs(child, left - 1) for child in children)


def _is_weight(node: Node) -> bool:
    """Whether this is a parameter, perhaps transposed."""
    while kind_of(node) in ("T", "Transpose", "Permute", "ToCopy") and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return "AccumulateGrad" in node.name()


_lock = threading.Lock()
#: What is called with a loss, and with the gradient that `backward` was given for it.
Listener = Callable[[Tensor, Tensor | None], None]
_listeners: list[Listener] = []
_original = torch.autograd.backward


def _backward(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    *arguments: Any,
    **keywords: Any,
) -> None:
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    gradients: list[Any] = list(grad_tensors) if isinstance(grad_tensors, tuple | list) else [grad_tensors] * len(losses)
    for loss, gradient in zip(losses, gradients, strict=False):
        if isinstance(loss, Tensor):
            for listener in tuple(_listeners):
                listener(loss, gradient)
    _original(tensors if isinstance(tensors, Tensor) else losses, grad_tensors, *arguments, **keywords)


def watch_backward(listener: Listener) -> Callable[[], None]:
    """Call ``listener(loss, gradient)`` before each ``backward()`` in this process. Returns what ends that."""
    with _lock:
        _listeners.append(listener)
        torch.autograd.backward = _backward  # type: ignore[assignment]

    def end() -> None:
        with _lock:
            if listener in _listeners:
                _listeners.remove(listener)
            if not _listeners:
                torch.autograd.backward = _original

    return end
