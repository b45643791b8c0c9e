"""What a softmax of logits that are divided over the rows needs to know of all classes.

The logits are never gathered. Each row tells the others, for each vector, its largest logit and the sum of exponentials relative to
it: one small all-gather.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zmqtrain.parallel.model import traffic
from zmqtrain.parallel.model.parts import sum_traffic
from zmqtrain.parallel.model.site import Site
from zmqtrain.parallel.model.traffic import Traffic, total


def combined(x: Tensor, site: Site, *more: Tensor) -> tuple[Tensor, ...]:
    """Of (vectors, this row's classes): the largest of all classes, the sum of exponentials relative to it, the sums of ``more``.

    Each is (vectors). Without gradient; blocks.
    """
    largest = x.amax(-1)
    # A row whose logits are all minus infinity has a sum of 0, and not of infinity minus infinity.
    base = largest.masked_fill(largest == -math.inf, 0.0)
    own = torch.stack((largest, (x - base.unsqueeze(-1)).exp().sum(-1), *more))
    found = own.unsqueeze(0)
    if site.rows > 1:
        shapes = [tuple(own.shape)] * site.rows
        found = torch.stack(site.column_group.all_gather(own, shapes, site.label("statistics")).wait())
    highest = found[:, 0].amax(0)
    summed = (found[:, 1] * (found[:, 0] - highest).exp()).sum(0)
    return highest, summed, *found[:, 2:].sum(0)


def vector_traffic(site: Site, vectors: int, itemsize: int, numbers: int, *, backward: bool) -> Traffic:
    """What this process sends for some numbers of each vector, gathered in forward, and for one that is summed in backward."""
    parts = [{site.label("statistics"): traffic.all_gather([numbers * vectors * itemsize] * site.rows, site.row)}]
    if backward:
        parts.append({site.label("statistics", "backward"): sum_traffic(vectors, site, itemsize)})
    return total(parts)
