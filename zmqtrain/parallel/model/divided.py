"""What all divided layers have in common: parameters under their ordinary names, of which this process holds a part."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic
from zmqtrain.parallel.placement import Divisions, check_divisions
from zmqtrain.parallel.shard import Pieces, Shard


class Divided(nn.Module):
    """A layer that is divided over the rows of a grid. It is made from the whole layer, of which it copies this process's part."""

    def __init__(self, original: nn.Module, site: Site) -> None:
        super().__init__()
        self.site = site
        self._shards: dict[str, Shard] = {}
        self.training = original.training

    def hold(
        self,
        name: str,
        whole: Tensor | None,
        dimension: int | None = None,
        pieces: Pieces = (),
        summed_over: tuple[int, ...] | None = None,
    ) -> None:
        """Register this process's part of a parameter or buffer of the original. ``None`` stays ``None``, as without a bias.

        ``summed_over``: the ranks whose gradients of it are to be summed, if they are not the row.
        """
        if whole is None:
            self.register_parameter(name, None)
            return
        grid, rank = self.site.grid, self.site.rank
        ranks = grid.row(rank) if summed_over is None else summed_over
        shard = self._shards[name] = Shard(self.site.layer, tuple(whole.shape), grid.column(rank), ranks, dimension, pieces)
        part = shard.cut(whole, self.site.row)
        if isinstance(whole, nn.Parameter):
            self.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        else:
            self.register_buffer(name, part)

    def shards(self) -> Mapping[str, Shard]:
        """How this module's own parameters and buffers are divided."""
        return self._shards

    def given_or_even(self, divisions: Divisions | None, count: int, what: str) -> Divisions:
        """The divisions of ``count`` things: those that were asked for, checked, or even ones. Raises `UsageError`."""
        if divisions is None:
            return self.site.divide(count, what)
        check_divisions(divisions, self.site.rows)
        if any(start == stop for start, stop in divisions):
            raise UsageError(f"layer {self.site.layer}: a row would have no {what}: {divisions}")
        if divisions[-1][1] != count:
            raise UsageError(f"layer {self.site.layer} has {count} {what}, and the divisions {divisions[-1][1]}")
        return divisions

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        """What this process sends in a forward and a backward, by label: exactly. Pure.

        ``shape``: that of the input that this process gives to the layer, with elements of ``itemsize`` bytes.
        ``input_gradient``: whether the input needs a gradient, as a first layer's does not.
        """
        raise NotImplementedError
