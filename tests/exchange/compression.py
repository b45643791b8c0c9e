"""What compression with error feedback comes to, written for one process and whole matrices, as the papers have it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def signs(values: Tensor, block: int = 1024) -> Tensor:
    """EF-SignSGD's compression (Karimireddy et al. 2019), by blocks."""
    found = []
    for part in values.split(block):
        size = part.abs().mean().float().double()  # scales travel in single precision
        found.append(torch.where(part >= 0, size, -size))
    return torch.cat(found)


def largest(values: Tensor, ratio: float) -> Tensor:
    found = torch.zeros_like(values)
    places = values.abs().topk(math.ceil(len(values) * ratio)).indices
    found[places] = values[places]
    return found


class Powers:
    """PowerSGD (Vogels et al. 2019, algorithms 1 and 2) on one matrix; ``start``: the first Q."""

    def __init__(self, start: Tensor) -> None:
        self.right = start

    def of(self, matrices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The product for the mean of the matrices, and what each of them contributes to it."""
        left = torch.linalg.qr(torch.stack([matrix @ self.right for matrix in matrices]).mean(0)).Q
        rights = [matrix.T @ left for matrix in matrices]
        self.right = torch.stack(rights).mean(0)
        return left @ self.right.T, [left @ right.T for right in rights]
