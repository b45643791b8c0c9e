"""The transport interface of a process group.

All methods block, and are called in one thread, by all ranks in the same order, unless stated otherwise; before each of them,
`begin` says what the rank is about to do. Tensors are flat, and on the CPU. ``what`` is the operation's name, for errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from zmqtrain.c10d.descriptor import Descriptor
from zmqtrain.host.channel import Done
from zmqtrain.host.sums import Combine


class RankTransport(Protocol):
    """Carries tensors between the ranks of one group."""

    @property
    def goes_on(self) -> tuple[type[Exception], ...]:
        """Errors after which all ranks are still at the same point, and can go on with other operations."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for the others. It may be set: operations that begin later take the new one."""
        ...

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None: ...

    def look(self, what: str) -> None:
        """Raise if a rank of this host is lost. Called while no operation is carried out."""

    def begin(self, descriptor: Descriptor, more: str, *, before: bool) -> None:
        """What the next operation is. It raises `MismatchError`, on all ranks, if another rank has begun a different one, and
        `OtherStreamError` if that has an order of its own; nothing has been changed then.

        ``more``: what else is known of this rank's call, for the error. ``before``: operations of several streams may meet, so the
        ranks compare before they send anything.
        """

    def all_reduce(self, flat: Tensor, combine: Combine, what: str, *, root: int | None = None) -> None:
        """``flat`` becomes the combination over all ranks; only on ``root``, if given."""

    def broadcast(self, flat: Tensor, root: int, what: str) -> None:
        """``flat`` becomes that of ``root``."""

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor, what: str) -> None:
        """``outputs[r]`` becomes rank r's ``own``; lengths may differ, and all ranks know them."""

    def gather(self, outputs: Sequence[Tensor] | None, own: Tensor, root: int, what: str) -> None:
        """Like `all_gather`, on ``root`` only."""

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

    def post(self, sources: Sequence[int], tag: int, flat: Tensor, what: str, done: Done) -> None:
        """Receive the next message with this tag of one of these ranks, without blocking. ``done`` is called in any thread."""

    def close(self, error: Exception | None = None) -> None:
        """Close this rank's transport; waits here raise ``error``."""
