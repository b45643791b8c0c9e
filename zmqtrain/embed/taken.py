"""The batches that a worker's loop has taken: how much its gradient counts in its group, and how many samples a step had."""

from __future__ import annotations

from zmqtrain.errors import TaskError


class Taken:
    """What one worker has taken to train."""

    def __init__(self) -> None:
        self.share: tuple[int, int] | None = None
        """The samples of the last batch, and of its group's; ``None`` if the loop has none of the session's."""
        self._uncounted = 0  # samples of batches that are of no step yet
        self._shares: list[tuple[int, int]] = []  # of the batches since the last backward: each share once

    def note(self, samples: int, of_group: int) -> None:
        """The loop has got a batch of ``samples``, of the ``of_group`` that its group has."""
        self.share = samples, of_group
        self._uncounted += samples
        if all(samples * other_of != of_group * other for other, other_of in self._shares):
            self._shares.append(self.share)

    def weight(self, group_size: int, *, any_share: bool) -> float:
        """The weight of the gradient of the batches since the last call. ``group_size``: the workers of a group, which count alike
        where the loop has chosen its samples. Raises `TaskError` if batches have different shares of their groups', unless
        ``any_share`` will do."""
        shares, self._shares = self._shares, []
        if len(shares) > 1 and not any_share:
            (one, of_one), (two, of_two), *_ = shares
            raise TaskError(
                f"this backward() is of batches that the group has divided differently: this worker has {one} of {of_one} samples "
                f"of one, and {two} of {of_two} of another, so it is not known by how much its gradient counts. Choose batch sizes "
                "that are multiples of the group's workers, and take batches for an evaluation under torch.no_grad()"
            )
        if self.share is None:
            return 1.0 / group_size
        samples, of = self.share
        return samples / of

    def of_step(self, backwards: int) -> int:
        """The samples of the step that has ended, with so many backwards.

        Each backward is of a batch: of one that was taken since (gradients that several add up), or of the same one again (two
        passes). A loop may also take batches in advance."""
        share = self.share[0] if self.share else 0
        samples = min(self._uncounted, max(1, backwards) * share) or share
        self._uncounted = max(0, self._uncounted - samples)
        return samples
