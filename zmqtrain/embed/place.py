"""Where a worker stands in the run: what both kinds of session tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zmqtrain.embed.core import Core


class Place:
    """Where this worker stands in the run. Base of both kinds of session."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def rank(self) -> int:
        """Number of this worker among all."""
        return self._core.context.role.index

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._core.context.placement.world_size

    @property
    def local_rank(self) -> int:
        """Number of this worker among those of its host."""
        return self._core.context.role.local_rank

    @property
    def group(self) -> int:
        """Number of this worker's compute group."""
        return self._core.context.role.group

    @property
    def groups(self) -> int:
        """Number of compute groups."""
        return self._core.context.placement.groups

    @property
    def position(self) -> int:
        """Place of this worker in its group."""
        return self._core.context.role.position

    @property
    def group_size(self) -> int:
        """Workers in a group."""
        return self._core.context.placement.group_size

    @property
    def device(self) -> torch.device:
        """Where to put the model."""
        return self._core.device

    @property
    def data_path(self) -> str | None:
        """What ``--data``, ZMQTRAIN_DATA or ``[data] path`` says."""
        return self._core.context.data_path

    @property
    def seed(self) -> int:
        """``[job] seed``. Torch is seeded with it when the session begins."""
        return self._core.context.topology.job.seed

    @property
    def step(self) -> int:
        """Steps that the replicated model has made. A worker that came instead of one that was lost begins where the others are."""
        return 0 if self._core.replicated is None else self._core.replicated.step

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}, group {self.group} of {self.groups}>"
