"""The parameters with which a run begins: the model that ``[job] weights`` names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zmqtrain.errors import CheckpointError
from zmqtrain.train.checkpoint.folder import MODEL, Checkpoint, find_latest, read_safetensors
from zmqtrain.train.checkpoint.model_file import NAME, read_about
from zmqtrain.wire.tensor import TensorPayload


@dataclass(frozen=True, slots=True)
class Weights:
    """A model on disk, stored alone or as a part of a checkpoint."""

    checkpoint: Checkpoint | None
    file: Path | None = None
    step: int = 0
    """The step after which it was written, if known."""

    @classmethod
    def of(cls, path: Path) -> Weights:
        """Load a safetensors file, or the model in a run's directory, a checkpoint, or a folder of checkpoints or runs. Raises
        `CheckpointError`."""
        if path.is_dir() and (path / NAME).is_file() and (about := read_about(path)) is not None:
            step = about.get("step")
            path = path / NAME
            return cls(None, path, step if isinstance(step, int) and 0 <= step < 2**53 else 0)
        if path.is_file():
            read_safetensors(path)  # so that errors are reported at once
            return cls(None, path)
        if not path.exists():
            raise CheckpointError(
                f"[job] weights: {path} does not exist; give the path of a run (runs/NAME-001), of its model.safetensors, or of a "
                "checkpoint"
            )
        checkpoint = Checkpoint(find_latest(path))
        return cls(checkpoint, None, checkpoint.step)

    def part(self, name: str) -> tuple[Mapping[str, TensorPayload], Mapping[str, Any]]:
        """Tensors and plain values of the part ``name``, which must be the model's: there is no other."""
        assert name == MODEL
        if self.checkpoint is not None:
            return self.checkpoint.part(name)
        assert self.file is not None
        return read_safetensors(self.file), {"step": self.step}
