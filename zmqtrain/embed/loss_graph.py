"""Losses that are no mean over a worker's samples, as far as the graph of a loss shows it.

A worker's ``loss.backward()`` counts by its number of samples, which is right for the mean loss of these. Torch's loss functions
keep in the graph what they were given: class weights, how many targets counted, sums. What only a loss's values could tell (a mean
of the user's own that leaves samples out) is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

#: So many nodes are looked at, beginning with the loss.
MOST_NODES = 64
#: So many nodes may be between a loss and the product that its scores come from: a logarithm, a temperature.
MOST_SCALED = 6
#: What adds terms, or does not change the value of a single element.
_ADDS = frozenset(
    {"Add", "Sub", "Neg", "Squeeze", "Unsqueeze", "View", "UnsafeView", "Reshape", "Clone", "Alias", "ToCopy", "Expand"}
)
_SCALES = frozenset({"Mul", "Div"})
_BENDS = frozenset(
    {"Sqrt", "Rsqrt", "Log", "Log1P", "Log2", "Log10", "Exp", "Expm1", "Pow", "Reciprocal", "Tanh", "Sigmoid", "Square"}
)
_MEAN, _SUM = 1, 2  # torch's numbers for reductions

_WEIGHTED = (
    'give the sum and its weight: session.backward(total, weight), with reduction="sum", and the sum of the weights of the '
    "targets that count (docs/sessions.md, Losses)"
)


def not_a_mean(loss: Tensor) -> str:
    """Why the loss is not a mean over samples, with what to do, in words; empty if nothing shows that."""
    if loss.grad_fn is None or loss.numel() != 1:
        return ""
    return _Walk().reason(loss.grad_fn, scaled=False)


class _Walk:
    def __init__(self) -> None:
        self._left = MOST_NODES

    def reason(self, node: Node | None, *, scaled: bool) -> str:
        """Of a term of the loss. ``scaled``: it is multiplied by something."""
        self._left -= 1
        if node is None or self._left < 0:
            return ""
        kind, children = _kind(node), [child for child, _ in node.next_functions if child is not None]
        if hasattr(node, "_saved_reduction"):
            return _of_torchs(node, scaled=scaled)
        if kind in _SCALES and sum(map(self._has_mean, children)) > 1:
            return (
                "a product or quotient of means is not the mean of the workers' products: compute it for each sample, then the mean"
            )
        if kind in _ADDS or kind in _SCALES:
            found = (self.reason(child, scaled=scaled or kind in _SCALES) for child in children)
            return next(filter(None, found), "")
        if kind in _BENDS and any(map(self._has_mean, children)):
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
            return bool(getattr(node, "_saved_reduction") == _MEAN)  # noqa: B009 - not known to mypy
        through = _kind(node) in _ADDS | _SCALES | _BENDS | {"Rsub"}
        return through and any(self._has_mean(child) for child, _ in node.next_functions)


def _kind(node: Node) -> str:
    """``Add`` of ``AddBackward0``."""
    return node.name().partition("Backward")[0]


def _of_torchs(node: Any, *, scaled: bool) -> str:
    """Of a loss function of torch."""
    if node._saved_reduction == _SUM and not scaled:
        return (
            'it is the sum over the samples (reduction="sum"), and the mean of the workers\' sums is not the sum of all. Use the '
            "mean over samples, with a learning rate that fits; or session.backward(total, weight), for the sum of all workers' "
            "totals divided by that of their weights. For gradients of inputs alone use torch.autograd.grad()"
        )
    if node._saved_reduction != _MEAN or not _kind(node).startswith("NllLoss"):
        return ""
    target = node._saved_target
    counted = float(node._saved_total_weight)
    if node._saved_weight is not None and counted != target.numel():
        return f"it has class weights, so workers count by the weights of their targets: {_WEIGHTED}"
    if counted != target.numel():
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
    children = [child for child, _ in node.next_functions if child is not None]
    if _kind(node) == "Mm":
        return len(children) == 2 and not any(map(_is_weight, children))
    return left > 0 and len(children) <= 2 and any(_of_pairs(child, left - 1) for child in children)


def _is_weight(node: Node) -> bool:
    """Whether this is a parameter, perhaps transposed."""
    while _kind(node) in ("T", "Transpose", "Permute", "ToCopy") and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return "AccumulateGrad" in node.name()


_lock = threading.Lock()
_listeners: list[Callable[[Tensor], None]] = []
_original = torch.autograd.backward


def _backward(tensors: Tensor | Sequence[Tensor], *arguments: Any, **keywords: Any) -> None:
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        if isinstance(tensor, Tensor):
            for listener in tuple(_listeners):
                listener(tensor)
    _original(tensors, *arguments, **keywords)


def watch_backward(listener: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call ``listener(loss)`` before each ``backward()`` in this process. Returns what ends that."""
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
