"""A rank of `torch.nn.parallel.DistributedDataParallel` whose model takes the time of a profile's, and computes nothing.

The peer of modelled devices: its gradients are as large, ready one after the other as a real backward's, and really travel. It is
started as ``python -m benchmarks.ddp PROFILE BATCH STEPS`` with torchrun's variables; rank 0 prints its steps' seconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zmqtrain.train.device.profile import Layer, Profile


class _Timed(torch.autograd.Function):
    """Nothing, in a layer's time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, gradient: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.gradient, ctx.backward_s = gradient, backward_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return upstream, ctx.gradient, None, None, None


class _Layer(nn.Module):
    def __init__(self, layer: Layer, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(max(1, layer.numel)))
        self._times = layer.forward_s * scale, layer.backward_s * scale
        self._gradient = torch.ones_like(self.weight)  # made once: what a real layer takes for it is in its time

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = _Timed.apply(value, self.weight, self._gradient, *self._times)  # type: ignore[no-untyped-call]
        return result


def main() -> None:
    """Take the steps."""
    name, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    profile = Profile.load(name)
    scale = batch / (profile.batch_size or batch)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        nn.Sequential(*(_Layer(layer, scale) for layer in profile.layers)), gradient_as_bucket_view=True
    )
    value = torch.zeros(1, requires_grad=True)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        model(value).sum().backward()
        time.sleep(profile.update_s)
        model.zero_grad(set_to_none=False)
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
