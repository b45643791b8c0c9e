"""A transformer's encoder layer divided over the rows: attention by heads, and its MLP by hidden units."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model.attention import MultiheadAttention
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.dropout import Batch, Dropout, Masks
from zmqtrain.parallel.model.linear import Linear
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total
from zmqtrain.parallel.placement import Placement


class TransformerEncoderLayer(Divided):
    """`torch.nn.TransformerEncoderLayer`, of which a process holds some heads and some hidden units of the MLP.

    Forward sums activations twice over the column, backward their gradients twice. Norms are whole, and computed by every process
    of the column alike. It takes the original's place within a `torch.nn.TransformerEncoder`. ``batch`` and ``seed`` are needed
    where there is dropout.
    """

    def __init__(self, original: nn.TransformerEncoderLayer, site: Site, *, batch: Batch | None = None, seed: int = 0) -> None:
        super().__init__(original, site)
        dropouts = {name: getattr(original, name) for name in ("dropout", "dropout1", "dropout2")}
        if batch is None and (original.self_attn.dropout or any(each.p for each in dropouts.values())):
            raise UsageError(f"layer {site.layer} has dropout: the batch that its masks are for must be given")
        batch = batch or Batch(0)

        def masks(name: str) -> Masks:
            return Masks(site.child(name), batch, seed)

        samples = 0 if original.self_attn.batch_first else 1
        self.self_attn = MultiheadAttention(original.self_attn, site.child("self_attn"), masks=masks("self_attn"))
        self.linear1 = Linear(original.linear1, site.child("linear1"), gather=False)
        hidden = Placement(site.grid, "columns", 2, self.linear1.divisions, samples)
        whole = Placement(site.grid, sample_dimension=samples)
        self.dropout = Dropout(dropouts["dropout"], masks("dropout"), hidden)
        self.linear2 = Linear(original.linear2, site.child("linear2"), divisions=self.linear1.divisions, input_divided=True)
        self.norm_first = original.norm_first
        self.norm1, self.norm2 = copy.deepcopy(original.norm1), copy.deepcopy(original.norm2)
        self.dropout1 = Dropout(dropouts["dropout1"], masks("dropout1"), whole)
        self.dropout2 = Dropout(dropouts["dropout2"], masks("dropout2"), whole)
        self.activation: Callable[[Tensor], Tensor] = original.activation

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As the original's, on whole activations of the column's samples."""

        def attention(x: Tensor) -> Tensor:
            found, _ = self.self_attn(x, x, x, src_key_padding_mask, need_weights=False, attn_mask=src_mask, is_causal=is_causal)
            return self.dropout1(found)  # type: ignore[no-any-return]

        def hidden(x: Tensor) -> Tensor:
            return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))  # type: ignore[no-any-return]

        if self.norm_first:
            x = src + attention(self.norm1(src))
            return x + hidden(self.norm2(x))
        x = self.norm1(src + attention(src))
        return self.norm2(x + hidden(x))  # type: ignore[no-any-return]

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        # The first norm's weights need the gradient of its output, also where the layer's input needs none.
        through = input_gradient or (self.norm_first and any(each.requires_grad for each in self.norm1.parameters()))
        hidden = (*shape[:-1], self.linear1.out_features)
        return total(
            [
                self.self_attn.traffic(shape, itemsize, input_gradient=through),
                self.linear1.traffic(shape, itemsize),
                self.linear2.traffic(hidden, itemsize),
            ]
        )
