"""A worker's place in the run: the properties that both kinds of session share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zmqtrain.embed.core import Core


class Place:
    """This worker's place in the run. Base of both kinds of session."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def rank(self) -> int:
        """The number of this worker among all workers."""
        return self._core.context.role.index

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._core.context.placement.world_size

    @property
    def local_rank(self) -> int:
        """The number of this worker among those of its host."""
        return self._core.context.role.local_rank

    @property
    def group(self) -> int:
        """The number of this worker's compute group."""
        return self._core.context.role.group

    @property
    def groups(self) -> int:
        """The number of compute groups."""
        return self._core.context.placement.groups

    @property
    def position(self) -> int:
        """The position of this worker in its group."""
        return self._core.context.role.position

    @property
    def group_size(self) -> int:
        """The number of workers in a group."""
        return self._core.context.placement.group_size

    @property
    def column(self) -> int:
        """The number of this worker's samples in its group: workers with the same number divide the model (``[compute] grid``) and
        must have the same samples. Without a grid, `position`."""
        return self._core.context.topology.compute.column_of(self.position)

    @property
    def columns(self) -> int:
        """Into how many parts a group divides its samples. Without a grid, `group_size`."""
        return self._core.context.topology.compute.columns

    @property
    def device(self) -> torch.device:
        """The device for the model."""
        return self._core.device

    @property
    def data_path(self) -> str | None:
        """The value of ``--data``, ZMQTRAIN_DATA or ``[data] path``."""
        return self._core.context.data_path

    @property
    def seed(self) -> int:
        """``[job] seed``. Torch is seeded with it when the session begins."""
        return self._core.context.topology.job.seed

    @property
    def step(self) -> int:
        """Steps that the replicated model has made. A worker that replaces a lost one begins at the step of the others."""
        return self._core.calls.step

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.world_size}, group {self.group} of {self.groups}>"
