"""Cross-entropy of logits that are divided over the rows: with the softmax's numbers travels the logit of the target."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model import traffic
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.precision import raised
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.softmax import combined, vector_traffic
from zmqtrain.parallel.model.traffic import Traffic, total
from zmqtrain.parallel.once import once_differentiable
from zmqtrain.parallel.placement import Divisions, Range


class CrossEntropy(Divided):
    """`torch.nn.CrossEntropyLoss` with classes as targets, of logits whose classes are divided over the rows.

    Backward sends nothing.

    ``mean_over``: what the reduction ``mean`` is over. ``"samples"``: this process's, as the plain loss of them would be.
    ``"batch"``: the whole batch's, however unevenly it is divided or ignored; the result is the same on all processes, and its
    gradient is what this process's samples contribute. That costs one message of two numbers around the row.
    """

    weight: Tensor | None

    def __init__(
        self,
        original: nn.CrossEntropyLoss,
        site: Site,
        divisions: Divisions,
        *,
        mean_over: Literal["samples", "batch"] = "samples",
    ) -> None:
        super().__init__(original, site)
        self.divisions = self.given_or_even(divisions, divisions[-1][1], "classes")
        self.ignore_index, self.label_smoothing = original.ignore_index, original.label_smoothing
        self.reduction, self.mean_over = original.reduction, mean_over
        if original.weight is not None and len(original.weight) != divisions[-1][1]:
            raise UsageError(f"layer {site.layer}: {len(original.weight)} weights for {divisions[-1][1]} classes")
        # Small, and needed by target: every process has all of them.
        self.hold("weight", original.weight)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """(samples, this row's classes, ...) and (samples, ...) to a number, or to (samples, ...) without reduction."""
        if target.is_floating_point():
            raise UsageError(f"layer {self.site.layer}: targets that are probabilities need logits that are whole")
        start, stop = self.divisions[self.site.row]
        if logits.shape[1] != stop - start or logits.shape[0] != target.shape[0]:
            raise UsageError(
                f"layer {self.site.layer}: logits of shape {tuple(logits.shape)} and targets of {tuple(target.shape)} where this "
                f"row has classes {start} to {stop}"
            )
        x = raised(logits).movedim(1, -1).reshape(target.numel(), stop - start)
        flat = target.reshape(-1)
        counted = flat != self.ignore_index
        if not x.is_meta and bool(((flat < 0) | (flat >= self.divisions[-1][1]))[counted].any()):
            raise UsageError(f"layer {self.site.layer}: a target is none of the {self.divisions[-1][1]} classes")
        weights = x.new_ones(self.divisions[-1][1]) if self.weight is None else self.weight.to(x.dtype)
        losses = cast(
            Tensor,
            _CrossEntropy.apply(x, flat, counted, weights, self.label_smoothing, (start, stop), self.site),  # type: ignore[no-untyped-call]
        )
        if self.reduction == "none":
            return losses.reshape(target.shape)
        if self.reduction == "sum":
            return losses.sum()
        own = (weights[flat * counted] * counted).sum()
        if self.mean_over == "samples":
            return losses.sum() / own
        loss, grid, rank = losses.sum(), self.site.grid, self.site.rank
        if grid.columns == 1:
            return loss / own
        together = torch.stack((loss.detach(), own))
        group = self.site.fabric.among(grid.row(rank))
        (everything,) = group.all_reduce(together, self.site.label("statistics")).wait()
        # The value is that of all, the gradient that of this process's samples.
        return (everything[0] + (loss - loss.detach())) / everything[1]

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        vectors = math.prod(shape) // shape[1]
        parts = [vector_traffic(self.site, vectors, itemsize, 4 if self.label_smoothing else 3, backward=False)]
        if self.reduction == "mean" and self.mean_over == "batch":
            columns, column = self.site.grid.columns, self.site.grid.place(self.site.rank)[1]
            parts.append({self.site.label("statistics"): traffic.all_reduce(2, itemsize, columns, column)})
        return total(parts)

    def extra_repr(self) -> str:
        start, stop = self.divisions[self.site.row]
        return f"classes {start} to {stop} of {self.divisions[-1][1]}, {self.reduction}, grid {self.site.grid}"


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        target: Tensor,
        counted: Tensor,
        weights: Tensor,
        smoothing: float,
        held: Range,
        site: Site,
    ) -> Tensor:
        """The loss of each vector; ``weights`` of all classes, ``held``: the classes of ``x``."""
        start, stop = held
        here = (target >= start) & (target < stop) & counted
        index = ((target - start) * here).unsqueeze(-1)
        # A logit of minus infinity times 0 would not be 0.
        right = x.gather(1, index).squeeze(-1).masked_fill(~here, 0.0)
        of_target = weights[target * counted]
        if smoothing:
            highest, summed, right, smooth = combined(x, site, right, x.mv(weights[start:stop]))
            everything = weights.sum()
            evenly = (everything * highest - smooth) + everything * summed.log()
            losses = (1 - smoothing) * of_target * ((highest - right) + summed.log()) + smoothing / len(weights) * evenly
        else:
            highest, summed, right = combined(x, site, right)
            losses = of_target * ((highest - right) + summed.log())
        ctx.save_for_backward(x, highest, summed, index, here, counted, of_target, weights)
        ctx.smoothing, ctx.held = smoothing, held
        return losses.masked_fill(~counted, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, highest, summed, index, here, counted, of_target, weights = ctx.saved_tensors
        start, stop = ctx.held
        sharp, smooth = (1 - ctx.smoothing) * of_target, ctx.smoothing / len(weights)
        result = (x - highest.unsqueeze(-1)).exp() * ((sharp + smooth * weights.sum()) / summed).unsqueeze(-1)
        if ctx.smoothing:
            result -= smooth * weights[start:stop]
        result.scatter_add_(1, index, -(sharp * here).unsqueeze(-1))
        return result * (gradient * counted).unsqueeze(-1), None, None, None, None, None, None
