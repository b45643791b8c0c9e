"""The activation function that has weights. All others take divided features as they are."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic
from zmqtrain.parallel.placement import Divisions
from zmqtrain.parallel.shard import one_range


class PReLU(Divided):
    """`torch.nn.PReLU` of channels (dimension 1) that are divided over the rows. Sends nothing.

    A weight for each channel is divided with them; a single one for all is whole, and each process sees only some of what it is
    applied to: so its gradients are summed over all processes.
    """

    weight: Tensor

    def __init__(self, original: nn.PReLU, site: Site, divisions: Divisions) -> None:
        super().__init__(original, site)
        self.num_parameters = original.num_parameters
        if self.num_parameters == 1:
            self.hold("weight", original.weight, summed_over=tuple(range(site.grid.size)))
        else:
            self.hold("weight", original.weight, 0, one_range(self.given_or_even(divisions, self.num_parameters, "channels")))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, this row's channels, ...) to the same."""
        return functional.prelu(x, self.weight)

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        return {}
