"""What a run begins with in place of new values: the model that ``[job] weights`` names, and what its optimizer had kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zmqtrain.errors import CheckpointError
from zmqtrain.exchange.checkpoint_part import AS_KEPT
from zmqtrain.topology.schema import Topology
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
    state: bool = False
    """Whether a run takes the optimizer's state from the checkpoint, too."""

    @classmethod
    def of_job(cls, topology: Topology) -> Weights | None:
        """What the job begins with; ``None`` if it does not say. Raises `CheckpointError`."""
        job = topology.job
        if job.weights is None:
            return None
        if job.optimizer_state == "new":
            return cls.of(Path(job.weights))
        path, kind = Path(job.weights), topology.exchange.kind
        if not path.is_dir():
            raise _no_state(f"{path} is no folder with checkpoints, and only these have it: give a run or a checkpoint as weights")
        checkpoint = Checkpoint(find_latest(path))
        was = checkpoint.shape
        if was.kind != kind:
            raise _no_state(
                f'{checkpoint.folder} has it as kind = "{was.kind}" keeps it, and not as [exchange] kind = "{kind}" does'
            )
        if was.fc_servers:
            raise _no_state(f"{checkpoint.folder} was written with merged_fc, and FC servers have a part of it")
        return cls(checkpoint, None, checkpoint.step, state=True)

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

    def source(self, name: str) -> Weights | Checkpoint | None:
        """What has the part ``name`` that a role asks for, if it gets one: the model, or with it what was kept of the optimizer."""
        if name == MODEL:
            return self
        return self.checkpoint if self.state and name.startswith(AS_KEPT) else None

    def part(self, name: str) -> tuple[Mapping[str, TensorPayload], Mapping[str, Any]]:
        """Tensors and plain values of the part ``name``, which must be the model's: there is no other."""
        assert name == MODEL
        if self.checkpoint is not None:
            return self.checkpoint.part(name)
        assert self.file is not None
        return read_safetensors(self.file), {"step": self.step}


def _no_state(why: str) -> CheckpointError:
    return CheckpointError(f'[job] optimizer_state = "kept": {why}; or set optimizer_state = "new"')
