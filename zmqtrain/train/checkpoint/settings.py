"""The settings that checkpoints keep, since what is in them is of use only with these."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from zmqtrain.errors import CheckpointError
from zmqtrain.topology.schema import Topology
from zmqtrain.wire.payload import Value

BATCH_SIZE = "[compute] batch_size"
OPTIMIZER = "the optimizer"


def settings_to_resume(topology: Topology, samples: int | None, optimizer: Optimizer) -> dict[str, Value]:
    """The settings with which a step's number says what was trained before, and what comes next: with others a resumed run would
    train some ``samples`` of an epoch twice and others not at all, or go on with another method's models, or without what another
    class of optimizer has kept."""
    settings: dict[str, Value] = {
        BATCH_SIZE: topology.compute.batch_size,
        "[job] seed": topology.job.seed,
        "[data] shuffle": topology.data.shuffle,
        OPTIMIZER: type(optimizer).__qualname__,
    }
    if samples is not None:
        settings["len(Task.train_data)"] = samples
    if topology.exchange.kind == "averaging":
        settings["[exchange.averaging] method"] = topology.exchange.averaging.method
    return settings


def require_optimizer(kept: object, mine: Mapping[str, Value]) -> None:
    """Raise `CheckpointError` unless the optimizer that wrote a checkpoint with the settings ``kept`` was of this run's class."""
    was = kept.get(OPTIMIZER) if isinstance(kept, Mapping) else None
    if was != mine[OPTIMIZER]:
        raise CheckpointError(
            f"[job] optimizer_state: the checkpoint's optimizer is {was!r:.60}, but this run's is {mine[OPTIMIZER]!r}, which "
            'cannot go on with its state: use the same class, or set optimizer_state = "new"'
        )
