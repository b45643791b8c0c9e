"""`script_session.py` for an asynchronous program: the session lives in your event loop, and the training runs in a thread.

python examples/script_join.py
zmqtrain launch launch/script.toml examples/script_join.py
"""

from __future__ import annotations

import asyncio
import sys

import torch
from digits import load, network
from torch import Tensor
from torch.nn.functional import cross_entropy

import zmqtrain


async def main(epochs: int = 20) -> float:
    """Train on the handwritten digits; returns the test accuracy, the mean over all workers."""
    train, test = load()
    async with zmqtrain.join() as session:
        model = network().to(session.device)
        model, optimizer = await session.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))

        def step(images: Tensor, labels: Tensor) -> float:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss.item()

        for epoch in range(epochs):
            async for images, labels in session.batches(train, epoch):
                # In the session's compute thread; meanwhile the loop moves gradients and parameters, and does any other work.
                session.report(loss=await session.run(step, images, labels))

        def accuracy() -> Tensor:
            images, labels = (tensor.to(session.device) for tensor in test.tensors)
            with torch.no_grad():
                return (model(images).argmax(1) == labels).float().mean().cpu()

        mean = (await session.all_reduce(await session.run(accuracy), "mean")).item()
        if session.rank == 0:
            print(f"test accuracy {mean:.1%}")
    return mean


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
