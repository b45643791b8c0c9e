"""The Trainer of transformers on handwritten digits, with a small vision transformer.

torchrun --nproc-per-node 2 examples/transformers_digits.py                 # one group of all ranks: two lines more than without
torchrun --nproc-per-node 2 examples/transformers_digits.py gossip          # each rank is a group, and these gossip: four lines

Also ``model_server`` and ``averaging``. Needs ``pip install 'zmqtrain[accelerate,examples]' transformers``.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from digits import load
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from zmqtrain.integrations.accelerate import init_process_group
from zmqtrain.integrations.transformers import exchange


def main(kind: str) -> float:
    """Train; returns the accuracy on the test images."""
    train, test = ([{"pixel_values": image, "labels": int(label)} for image, label in part] for part in load())
    torch.manual_seed(1)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=5,
            learning_rate=2e-3,
            per_device_train_batch_size=16,
            max_grad_norm=0,  # gradients that leave during backward cannot be clipped after it
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            ViTForImageClassification(config), arguments, train_dataset=train, eval_dataset=test, compute_metrics=accuracy_of
        )
        if kind != "ddp":
            exchange(trainer, kind, group_size=1)
        trainer.train()
        accuracy: float = trainer.evaluate()["eval_accuracy"]
        if trainer.is_world_process_zero():
            print(f"{kind}: accuracy {accuracy:.1%} with {arguments.world_size} ranks", flush=True)
        trainer.accelerator.wait_for_everyone()  # the folder is rank 0's
    return accuracy


def accuracy_of(found: EvalPrediction) -> dict[str, float]:
    """The share of images whose best guess is right."""
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


if __name__ == "__main__":
    init_process_group()
    for each in sys.argv[1:] or ["ddp"]:
        main(each)
