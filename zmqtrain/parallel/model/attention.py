"""Multi-head attention divided over the rows by its heads."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmqtrain.errors import UsageError
from zmqtrain.parallel.model.divided import Divided
from zmqtrain.parallel.model.dropout import Masks
from zmqtrain.parallel.model.linear import Linear, LinearOperation
from zmqtrain.parallel.model.parts import add_up, gather
from zmqtrain.parallel.model.product import Summed, product
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total
from zmqtrain.parallel.placement import Placement, scaled
from zmqtrain.parallel.shard import one_range

_LINEAR = LinearOperation()


class MultiheadAttention(Divided):
    """`torch.nn.MultiheadAttention`, of which a process holds some heads.

    Queries, keys and values are divided by outputs, the last product by inputs: one sum of activations over the column in forward,
    and in backward one for each different tensor that it is given (one for self-attention). ``masks`` are needed for dropout.
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor

    def __init__(self, original: nn.MultiheadAttention, site: Site, *, masks: Masks | None = None) -> None:
        super().__init__(original, site)
        if original.bias_k is not None or original.add_zero_attn:
            raise UsageError(f"layer {site.layer}: attention with add_bias_kv or add_zero_attn cannot be divided")
        if original.dropout and masks is None:
            raise UsageError(f"layer {site.layer} has dropout: its masks must be given")
        self.embed_dim, self.num_heads, self.head_dim = original.embed_dim, original.num_heads, original.head_dim
        self.dropout, self.batch_first, self.masks = original.dropout, original.batch_first, masks
        self.heads = site.divide(self.num_heads, "heads")
        features = scaled(self.heads, self.head_dim)
        packed = tuple(
            tuple((part * self.embed_dim + start, part * self.embed_dim + stop) for part in range(3)) for start, stop in features
        )
        for name, whole in original.named_parameters(recurse=False):
            self.hold(name, whole, 0, packed if name.startswith("in_proj") else one_range(features))
        for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if name not in self._parameters:
                self.register_parameter(name, None)
        self.out_proj = Linear(original.out_proj, site.child("out_proj"), divisions=features, input_divided=True)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As the original's, on whole activations and masks of the column's samples. Weights cost another sum, or all-gather."""
        if query.dim() != 3:
            raise UsageError(f"layer {self.site.layer}: divided attention needs a dimension of samples")
        # (samples, heads, time, features)
        queries, keys, values = (self._by_heads(each) for each in self._projected(query, key, value))
        mask = self._mask(attn_mask, key_padding_mask, queries)
        dropping = self.training and self.dropout > 0
        weights = None
        if need_weights or dropping:
            scores = queries.matmul(keys.transpose(-2, -1)) / math.sqrt(self.head_dim)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            if dropping:
                assert self.masks is not None
                placement = Placement(self.site.grid, "columns", 1, self.heads)
                weights = self.masks.drop(weights, self.dropout, placement)
            found = weights.matmul(values)
        else:
            causal = is_causal and mask is None
            found = functional.scaled_dot_product_attention(queries, keys, values, mask, is_causal=causal)
        found = found.transpose(1, 2).flatten(2)
        output = self.out_proj(found if self.batch_first else found.transpose(0, 1))
        if not need_weights:
            return output, None
        assert weights is not None
        if average_attn_weights:
            return output, add_up(weights.sum(1), self.site) / self.num_heads
        return output, gather(weights, 1, self.heads, self.site)

    def traffic(self, shape: tuple[int, ...], itemsize: int, *, input_gradient: bool = True) -> Traffic:
        """See `Divided.traffic`; of self-attention whose weights are not asked for."""
        parts = [self.out_proj.traffic(shape, itemsize)]
        if input_gradient:
            sent = Summed(self.site, self.embed_dim).sent(math.prod(shape[:-1]), itemsize)
            parts.append({self.site.label("dx", "backward"): sent})
        return total(parts)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """This row's part of queries, keys and values: one product for each different tensor, where weights are packed."""
        given = [query, key, value]
        if self.in_proj_weight is None:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            biases = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))
            return [
                product(x, weight, bias, _LINEAR, Summed(self.site, weight.shape[1]))
                for x, weight, bias in zip(given, weights, biases, strict=True)
            ]
        found: list[Tensor] = []
        while len(found) < 3:
            x, begin = given[len(found)], len(found)
            count = next((number for number, other in enumerate(given[begin:]) if other is not x), 3 - begin)
            each = self.in_proj_weight.shape[0] // 3
            rows = slice(begin * each, (begin + count) * each)
            bias = None if self.in_proj_bias is None else self.in_proj_bias[rows]
            several = product(x, self.in_proj_weight[rows], bias, _LINEAR, Summed(self.site, self.embed_dim))
            found.extend(several.chunk(count, -1))
        return found

    def _by_heads(self, x: Tensor) -> Tensor:
        start, stop = self.heads[self.site.row]
        x = x if self.batch_first else x.transpose(0, 1)
        return x.reshape(*x.shape[:2], stop - start, self.head_dim).transpose(1, 2)

    def _mask(self, attention: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
        """What to add to the scores of this row's heads."""
        masks = []
        if attention is not None:
            mask = _additive(attention, like)
            if mask.dim() == 3:
                start, stop = self.heads[self.site.row]
                mask = mask.reshape(len(mask) // self.num_heads, self.num_heads, *mask.shape[1:])[:, start:stop]
            masks.append(mask)
        if padding is not None:
            masks.append(_additive(padding, like)[:, None, None, :])
        return sum(masks[1:], masks[0]) if masks else None

    def extra_repr(self) -> str:
        start, stop = self.heads[self.site.row]
        return f"{self.embed_dim}, {self.num_heads}, heads {start} to {stop}, grid {self.site.grid}"


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """True, where nothing is to be seen, becomes minus infinity."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -math.inf)
