"""Your own training loop: three lines make it a worker of a run.

python examples/script_session.py                                    # alone, as before
zmqtrain launch launch/script.toml examples/script_session.py        # 2 groups of 2 workers and 2 model servers
"""

from __future__ import annotations

import sys

import torch
from digits import load, network
from torch.nn.functional import cross_entropy

import zmqtrain


def main(epochs: int = 20) -> float:
    """Train on the handwritten digits; returns the test accuracy."""
    train, test = load()
    with zmqtrain.session() as session:  # 1: join the run; also seeds torch alike on all workers
        model = network().to(session.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        model, optimizer = session.replicate(model, optimizer)  # 2: use both as before

        for epoch in range(epochs):
            for images, labels in session.batches(train, epoch):  # 3: this worker's share of each batch
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()  # gradients leave during this call
                optimizer.step()  # on return the servers' parameters are there
                session.report(loss=loss.item())

        images, labels = (tensor.to(session.device) for tensor in test.tensors)
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean().item()
        session.report("eval", eval_accuracy=accuracy)
        if session.rank == 0:
            print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
