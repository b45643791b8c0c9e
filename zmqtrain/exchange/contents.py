"""What a worker's model contains of what others have trained, if groups have models of their own: when a group is lost, others
train what no model contains. Pure.

It is known as a vector clock: for each process the step before which all that it has trained is in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from zmqtrain.data.slots import Life
from zmqtrain.errors import ProtocolError
from zmqtrain.wire.payload import Value


class Contents(Protocol):
    """One worker's model. Its own batches are not listed."""

    def got(self, life: Life) -> int:
        """The step before which all that this process has trained is in the model; 0 if nothing is known to be."""
        ...

    def known(self) -> Mapping[Life, int]:
        """That of all processes of which something is, once no exchange is under way."""
        ...

    def begin_with(self, known: Mapping[Life, int]) -> None:
        """The model is a copy of another one, which contained this."""


def merge(into: dict[Life, int], more: Mapping[Life, int]) -> None:
    """``into`` becomes what both contain together."""
    for life, until in more.items():
        into[life] = max(until, into.get(life, 0))


def rows_of(known: Mapping[Life, int], most: int | None = None) -> Value:
    """Plain values for `known_of`. At ``most`` so many processes: those of which the newest batches are known."""
    # All workers of a group tell the same, whoever of them has come later.
    rows = sorted(known.items(), key=lambda item: (-item[1], item[0]))[:most]
    return [[peer, process, until] for (peer, process), until in rows]


def known_of(value: Value) -> dict[Life, int]:
    """What another worker's `rows_of` has returned. Raises `ProtocolError`."""
    found: dict[Life, int] = {}
    for row in value if isinstance(value, list | tuple) else (value,):
        match row:
            case [str(peer), int(process), int(until)]:
                found[peer, process] = until
            case _:
                raise ProtocolError(f"{value!r:.100} does not say what a model contains")
    return found
