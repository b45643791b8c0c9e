"""The norm of a whole gradient of which processes have parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zmqtrain.parallel.communicator import Fabric, Label
from zmqtrain.parallel.shard import Shard


class GradientNorm:
    """Norms of one divided model's gradients, as in one process: what rows hold in parts is brought together, and what all of them
    hold counts once."""

    def __init__(self, shards: Mapping[str, Shard], fabric: Fabric) -> None:
        """``shards``: how each parameter is divided, by its name."""
        self._shards, self._fabric = shards, fabric

    def __call__(self, gradients: Mapping[str, Tensor | None], norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients together, as `torch.nn.utils.get_total_norm` has it: that of the parameters' norms. No
        dimension, at least float32, on the gradients' device.

        All processes of the group call it, in their compute threads, with the same names in the same order.
        ``gradients``: the sums over all samples already; ``None`` where a parameter has none.
        """
        device = next((gradient.device for gradient in gradients.values() if gradient is not None), torch.device("cpu"))
        found = {name: _norm(each, norm_type) for name, each in gradients.items() if each is not None and each.numel()}
        if not gradients:
            return torch.zeros(())
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        norms = torch.stack([found[name].double() if name in found else nothing for name in gradients])
        there = torch.tensor([name in found for name in gradients], dtype=torch.float64, device=device)
        mine = torch.stack([norms, there]).cpu()
        everyone = tuple(range(self._fabric.size))  # layers may have columns of their own
        label = Label("", "statistics", "backward")
        ranks = self._fabric.among(everyone).all_gather(mine, [tuple(mine.shape)] * len(everyone), label).wait()
        wholes = []
        for index, name in enumerate(gradients):
            shard = self._shards[name]
            parts = [ranks[member][0, index] for member in shard.members if ranks[member][1, index]]
            if parts and shard.dimension is None:
                wholes.append(parts[0])
            elif parts:  # a norm of order 0 is a count
                wholes.append(torch.stack(parts).sum() if norm_type == 0 else _norm(torch.stack(parts), norm_type))
        total = _norm(torch.stack(wholes), norm_type) if wholes else torch.zeros((), dtype=torch.float64)
        return total.to(device, next(iter(found.values())).dtype if found else torch.float32)


def _norm(tensor: Tensor, norm_type: float) -> Tensor:
    """The norm of a tensor, computed in single precision at least."""
    found: Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return found
