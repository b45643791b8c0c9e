"""Lightning on handwritten digits: the strategy is all that changes.

torchrun --nproc-per-node 2 examples/lightning_digits.py                    # one group of all ranks, as with "ddp"
torchrun --nproc-per-node 2 examples/lightning_digits.py gossip             # each rank is a group, and these gossip

Also ``model_server`` and ``averaging``. Needs ``pip install 'zmqtrain[lightning,examples]'``.
"""

from __future__ import annotations

import os
import sys
import tempfile

import lightning
import torch
from digits import load, network
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from zmqtrain.integrations.lightning import ZmqStrategy


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        outputs = self.network(batch[0])
        self.log("loss", cross_entropy(outputs, batch[1]), sync_dist=True)
        self.log("accuracy", (outputs.argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.8)


def main(exchange: str) -> float:
    """Train; returns the accuracy of the best checkpoint on the test images."""
    lightning.seed_everything(1, verbose=False)
    train, test = load()
    strategy = ZmqStrategy() if exchange == "ddp" else ZmqStrategy(exchange, group_size=1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ModelCheckpoint(folder, monitor="loss")
        trainer = lightning.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            max_epochs=6,
            callbacks=[checkpoint, EarlyStopping("loss", patience=3)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        digits = Digits()
        trainer.fit(digits, DataLoader(train, 32, shuffle=True), DataLoader(test, 180))
        found = trainer.validate(digits, DataLoader(test, 180), ckpt_path=checkpoint.best_model_path, verbose=False)
        if trainer.is_global_zero:
            print(f"{exchange}: accuracy {found[0]['accuracy']:.1%}", flush=True)
        trainer.strategy.barrier()  # the folder is rank 0's
    return found[0]["accuracy"]


if __name__ == "__main__":
    for each in sys.argv[1:] or ["ddp"]:
        main(each)
