"""Seeds for torch's global generators."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def seed_torch(seed: int, cuda: Iterable[int] | None = None) -> None:
    """What ``torch.manual_seed(seed)`` does, without its price where there is a choice.

    For kinds of devices that are not initialized yet, torch keeps the call with a stack trace: 0.6 ms, and 3 ms in a deep stack.
    A torch that was built for the CPU alone has no such kinds.

    Args:
        seed: below 2**64.
        cuda: the CUDA devices, all of them initialized, whose generators are seeded besides the CPU's. By default those of all
            devices, also of those that are initialized later.
    """
    if cuda is None and torch.accelerator.current_accelerator() is not None:
        torch.random.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    for device in cuda or ():
        torch.cuda.default_generators[device].manual_seed(seed)
