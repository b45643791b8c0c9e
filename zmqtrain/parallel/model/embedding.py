"""An embedding divided over the rows: by its features, or by its vocabulary."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.parts import add_up, gather, gather_traffic, sum_traffic
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total
from zmqtrain.parallel.placement import Divisions
from zmqtrain.parallel.shard import one_range


class Embedding(Divided):
    """`torch.nn.Embedding`, of which a process holds some features of all words, or all features of some words.

    By features the rows' parts are all-gathered (or stay divided, with ``gather=False``). By vocabulary each looks up the words
    that it has, and the rows' results are summed: twice the volume, and for a table that is shared with an output layer divided by
    outputs. Backward sends nothing.
    """

    weight: Tensor

    def __init__(
        self,
        original: nn.Embedding,
        site: Site,
        *,
        by: Literal["features", "vocabulary"] = "features",
        divisions: Divisions | None = None,
        gather: bool = True,
    ) -> None:
        super().__init__(original, site)
        for what, used in (("max_norm", original.max_norm is not None), ("sparse", original.sparse)):
            if used:
                raise UsageError(f"layer {site.layer}: an embedding with {what} cannot be divided")
        if original.scale_grad_by_freq:
            raise UsageError(f"layer {site.layer}: an embedding with scale_grad_by_freq cannot be divided")
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim
        self.by, self.padding_idx = by, original.padding_idx
        self.gathers_output = gather and by == "features"
        count, what = (self.embedding_dim, "features") if by == "features" else (self.num_embeddings, "words")
        self.divisions = self.given_or_even(divisions, count, what)
        self.hold("weight", original.weight, 1 if by == "features" else 0, one_range(self.divisions))

    def forward(self, words: Tensor) -> Tensor:
        """Integers of any shape to (..., features)."""
        if self.by == "features":
            found = functional.embedding(words, self.weight, self.padding_idx)
            return gather(found, -1, self.divisions, self.site) if self.gathers_output else found
        start, stop = self.divisions[self.site.row]
        here = (words >= start) & (words < stop)
        padding = None
        if self.padding_idx is not None and start <= self.padding_idx < stop:
            padding = self.padding_idx - start
        found = functional.embedding((words - start) * here, self.weight, padding)
        return add_up(found * here.unsqueeze(-1), self.site)

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        words, label = math.prod(shape), self.site.label("all_gather")
        if self.by == "vocabulary":
            return total([{label: sum_traffic(words * self.embedding_dim, self.site, itemsize)}])
        return total([{label: gather_traffic(words, self.divisions, self.site, itemsize)}] if self.gathers_output else [])

    def extra_repr(self) -> str:
        start, stop = self.divisions[self.site.row]
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.by} {start} to {stop}, grid {self.site.grid}"
