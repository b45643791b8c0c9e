"""The transport interface of a process group.

All methods block, and are called in one thread, by all ranks in the same order, unless said otherwise. Tensors are flat and on the
CPU. ``what`` is the operation's name for errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from zmqtrain.host.sums import Combine


class Transport(Protocol):
    """Carries tensors between the ranks of one group."""

    def all_reduce(self, flat: Tensor, combine: Combine, what: str, *, root: int | None = None) -> None:
        """``flat`` becomes the combination over all ranks; of ``root`` only, if given."""

    def broadcast(self, flat: Tensor, root: int, what: str) -> None:
        """``flat`` becomes that of ``root``."""

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor, what: str) -> None:
        """``outputs[r]`` becomes rank r's ``own``; lengths may differ, and all know them."""

    def gather(self, outputs: Sequence[Tensor] | None, own: Tensor, root: int, what: str) -> None:
        """The same at ``root`` only."""

    def scatter(self, output: Tensor, parts: Sequence[Tensor] | None, root: int, what: str) -> None:
        """``output`` becomes ``parts[rank]`` of ``root``."""

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], combine: Combine, what: str) -> None:
        """``output`` becomes the combination of all ranks' ``parts[rank]``."""

    def all_to_all(self, outputs: Sequence[Tensor], parts: Sequence[Tensor], what: str) -> None:
        """``outputs[r]`` becomes rank r's ``parts[rank]``."""

    def barrier(self, what: str) -> None:
        """Returns once all ranks have called it."""

    # Called in threads of their own, one for each peer and direction.

    def send(self, to: int, tag: int, flat: Tensor, what: str) -> None:
        """Send bytes; returns when ``flat`` may be written again."""

    def receive(self, source: int, tag: int, flat: Tensor, what: str) -> None:
        """Receive what was sent with this tag."""

    def waiting(self, source: int) -> bool:
        """Whether something of ``source`` is there to be received."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Close this rank's transport; waits here raise ``error``."""
