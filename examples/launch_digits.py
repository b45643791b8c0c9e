"""Train from Python, without a topology file or a command: the task of examples/digits.py, and then its model.

python examples/launch_digits.py
"""

from __future__ import annotations

from digits import load, task

import zmqtrain


def main(epochs: int = 10) -> float:
    """Train two groups that gossip; returns the trained model's accuracy on the test data."""
    with zmqtrain.launch(
        task, groups=2, batch_size=32, epochs=epochs, threads=1, oversubscribe=True, set={"exchange.kind": "gossip"}, watch=True
    ) as run:
        run.wait()
    images, labels = load()[1].tensors
    return float((run.model()(images).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    print(f"test accuracy {100 * main():.1f}%")
