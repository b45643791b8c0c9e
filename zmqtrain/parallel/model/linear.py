"""A linear layer divided over the rows: by its outputs, or by its inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.parts import add_up, gather, gather_traffic, gathered, sum_traffic
from zmqtrain.parallel.model.precision import lowered
from zmqtrain.parallel.model.product import Scattered, Summed, product
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total
from zmqtrain.parallel.placement import Divisions
from zmqtrain.parallel.shard import one_range


@dataclass(frozen=True, slots=True)
class LinearOperation:
    """``x W^T + b`` over the last dimension, however many there are before it."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return gradient.matmul(weight)

    def weight_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return _vectors(gradient).t().mm(_vectors(x))

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return _vectors(gradient).sum(0)


def _vectors(x: Tensor) -> Tensor:
    """(vectors, features), also of tensors without features, of which -1 would be ambiguous."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class Linear(Divided):
    """`torch.nn.Linear`, of which a process holds some outputs, or some inputs.

    By outputs (Gholami et al. 2018, figure 3): the input is whole on the column, each process computes its own outputs, and
    these are all-gathered. The gradient of the input is all-reduced. Two options save communication between neighbours:

    ``gather=False`` leaves the output divided, for a layer that can take it so (elementwise ones do);
    ``gathers=DIVISIONS`` takes such an input and gathers it here; its gradient is then only reduce-scattered.

    By inputs (``input_divided=True``): the input is divided over the rows, as a layer by outputs has left it; the contributions of
    all rows are summed in forward, and backward sends nothing. The bias is whole, and added to the sum. Both together, as in the
    two halves of a transformer's MLP, cost one all-reduce in forward and one in backward.

    ``divisions``: of the outputs (or inputs), where they are not to be as even as can be.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        original: nn.Linear,
        site: Site,
        *,
        divisions: Divisions | None = None,
        gather: bool = True,
        gathers: Divisions | None = None,
        input_divided: bool = False,
    ) -> None:
        super().__init__(original, site)
        self.in_features, self.out_features = original.in_features, original.out_features
        self.input_divided, self.gathers_output = input_divided, gather and not input_divided
        if input_divided and (gathers is not None or not gather):
            raise UsageError(f"layer {site.layer}: a linear layer divided by inputs takes them divided and gives its outputs whole")
        if input_divided:
            self.divisions = self.given_or_even(divisions, self.in_features, "inputs")
            self.hold("weight", original.weight, 1, one_range(self.divisions))
            self.hold("bias", original.bias)
            return
        self.divisions = self.given_or_even(divisions, self.out_features, "outputs")
        self.hold("weight", original.weight, 0, one_range(self.divisions))
        self.hold("bias", original.bias, 0, one_range(self.divisions))
        self._operation = LinearOperation()
        self.takes(gathers)

    def takes(self, gathers: Divisions | None) -> None:
        """From now on the input is divided so, and gathered here; ``None``: it is whole. Raises `UsageError`."""
        self.input_divisions = None if gathers is None else self.given_or_even(gathers, self.in_features, "inputs")
        self._meeting: Summed | Scattered = (
            Summed(self.site, self.in_features)
            if self.input_divisions is None
            else Scattered(self.site, one_range(self.input_divisions))
        )

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs), each whole or divided as the layer was made."""
        if self.input_divided:
            result = add_up(functional.linear(x, self.weight), self.site)
            return result if self.bias is None else result + self.bias
        x, given = lowered(x), None
        if self.input_divisions is not None:
            given = gathered(x.detach(), -1, self.input_divisions, self.site, self.site.label("all_gather"))
        result = product(x, self.weight, self.bias, self._operation, self._meeting, given)
        return gather(result, -1, self.divisions, self.site) if self.gathers_output else result

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        site, vectors = self.site, math.prod(shape[:-1])
        forward, backward = site.label("all_gather"), site.label("dx", "backward")
        if self.input_divided:
            return total([{forward: sum_traffic(vectors * self.out_features, site, itemsize)}])
        parts = []
        if self.input_divisions is not None:
            parts.append({forward: gather_traffic(vectors, self.input_divisions, site, itemsize)})
        if self.gathers_output:
            parts.append({forward: gather_traffic(vectors, self.divisions, site, itemsize)})
        if input_gradient:
            parts.append({backward: self._meeting.sent(vectors, itemsize)})
        return total(parts)

    def extra_repr(self) -> str:
        start, stop = self.divisions[self.site.row]
        what = "inputs" if self.input_divided else "outputs"
        return f"{self.in_features}, {self.out_features}, {what} {start} to {stop}, grid {self.site.grid}"
