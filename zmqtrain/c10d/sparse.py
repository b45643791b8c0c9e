"""Sums of sparse tensors, such as the gradients of ``nn.Embedding(sparse=True)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zmqtrain.c10d.errors import WrongCallError


def add_sparse(tensor: Tensor, size: int, gather: Callable[[Tensor, Sequence[int]], list[Tensor]]) -> None:
    """``tensor`` (sparse_coo) becomes the coalesced sum of all ranks' ones, in the order of the ranks.

    ``size``: ranks. ``gather``: gathers flat tensors of all ranks, of these numbers of elements.

    Raises `ValueError`, on all ranks, if the tensors' shapes differ.
    """
    own = tensor.detach().cpu().coalesce()
    indices, values = own.indices(), own.values()
    head = [own.dim(), own.sparse_dim(), *own.shape]
    # Shapes are of one length only where they agree.
    lengths = [int(each) for each in torch.cat(gather(torch.tensor([len(head)]), [1] * size))]
    heads = gather(torch.tensor(head), lengths)
    if any(not torch.equal(each, heads[0]) for each in heads):
        shapes = [tuple(each[2:].tolist()) for each in heads]
        raise WrongCallError(f"a sum of sparse tensors of different shapes, or with different sparse dimensions: {shapes}")
    counts = [int(each) for each in torch.cat(gather(torch.tensor([indices.shape[1]]), [1] * size))]
    each_index, each_value = own.sparse_dim(), int(values[0].numel()) if len(values) else _numel(own.shape[own.sparse_dim() :])
    all_indices = gather(indices.contiguous().view(-1), [each_index * count for count in counts])
    all_values = gather(values.contiguous().view(-1), [each_value * count for count in counts])
    total = torch.sparse_coo_tensor(
        torch.cat([part.view(each_index, -1) for part in all_indices], dim=1),
        torch.cat([part.view(count, *values.shape[1:]) for part, count in zip(all_values, counts, strict=True)]),
        own.shape,
        check_invariants=False,
    ).coalesce()
    tensor.copy_(total)


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for each in shape:
        numel *= each
    return numel
