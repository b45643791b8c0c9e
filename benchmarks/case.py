"""One measured figure beside its peer's: a row of ``python -m benchmarks NAME``, and with ``--json`` a line."""

from __future__ import annotations

from typing import Literal, TypedDict

#: Which of the two is divided by the other: ``peer/value`` where less is better (times, bytes), ``value/peer`` where more is
#: (rates, shares) and where the ratio says how near a value is to a figure.
Ratio = Literal["peer/value", "value/peer"]


class Case(TypedDict):
    """The keys of a line, in their order."""

    bench: str
    case: str
    value: float
    unit: str
    peer: str | None
    peer_value: float | None
    ratio: float | None
    """Above 1: better than the peer, measured in the same run."""


def case_of(
    bench: str,
    case: str,
    value: float,
    unit: str,
    peer: str = "",
    peer_value: float | None = None,
    ratio: Ratio | float = "peer/value",
    *,
    digits: int | None = None,
) -> Case:
    """A case, with its ratio if there is a peer's value to compare with; without one, no peer is named.

    Args:
        bench: the benchmark's name.
        case: what was measured.
        value: ours, in ``unit``.
        unit: of both values; empty for mere numbers.
        peer: what it is compared with.
        peer_value: the peer's.
        ratio: how the two values compare, or the ratio itself where it is no quotient of these two.
        digits: round all three numbers.
    """
    if peer_value is None:
        compared = None
    elif isinstance(ratio, float):
        compared = ratio
    else:
        over, under = (value, peer_value) if ratio == "value/peer" else (peer_value, value)
        compared = over / under if under else None
    if digits is not None:
        value = round(value, digits)
        peer_value = None if peer_value is None else round(peer_value, digits)
        compared = None if compared is None else round(compared, digits)
    return {
        "bench": bench,
        "case": case,
        "value": value,
        "unit": unit,
        "peer": None if peer_value is None else peer,
        "peer_value": peer_value,
        "ratio": compared,
    }


def size_text(nbytes: int) -> str:
    """A size in the name of a case, like ``25 MB``."""
    return f"{nbytes / 1e6:g} MB" if nbytes >= 1_000_000 else f"{nbytes / 1e3:g} KB"
