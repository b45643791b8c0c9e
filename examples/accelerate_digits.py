"""Accelerate on handwritten digits: two lines more than without.

torchrun --nproc-per-node 2 examples/accelerate_digits.py
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_digits.py       # also where there is no GPU

Needs ``pip install 'zmqtrain[accelerate,examples]'``.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from digits import load, network
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from zmqtrain.integrations.accelerate import init_process_group


def main(epochs: int = 6) -> float:
    """Train; returns the accuracy on the test images."""
    init_process_group()
    accelerator = Accelerator()
    torch.manual_seed(1)
    model = network()
    train, test = load()
    model, optimizer, batches, tests = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8),
        DataLoader(train, 32, shuffle=True),
        DataLoader(test, 180),
    )
    for _ in range(epochs):
        for images, labels in batches:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
    right = []
    with torch.no_grad():
        for images, labels in tests:
            right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
    accuracy = torch.cat(right).float().mean().item()
    accelerator.print(f"accuracy {accuracy:.1%} with {accelerator.num_processes} ranks")
    accelerator.end_training()
    return accuracy


if __name__ == "__main__":
    main()
