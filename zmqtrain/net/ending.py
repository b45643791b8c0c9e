"""Why a link ended, and the error that each wait for its peer raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zmqtrain.errors import (
    PeerLostError,
    PeerTimeoutError,
    RunTokenError,
    SupersededError,
    VersionMismatchError,
    WireError,
    ZmqTrainError,
)
from zmqtrain.net.address import without_key
from zmqtrain.net.endpoint import PeerId
from zmqtrain.net.greeting import RefusalCode
from zmqtrain.wire.message import WIRE_VERSION


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a link ended."""

    reason: str
    error: Callable[[str], ZmqTrainError]
    """Makes the error of a wait, from what was waited for."""
    loss: bool = True
    """Whether work is lost for which others wait, perhaps indirectly; otherwise only waits for this peer fail."""


def lost(peer: PeerId, reason: str) -> Ending:
    return Ending(reason, lambda waiting_for: PeerLostError(peer, reason, waiting_for=waiting_for))


def left(peer: PeerId) -> Ending:
    """The peer had finished: everything that it had to send has arrived."""
    reason = "it has finished and closed its endpoint"
    return Ending(reason, lambda waiting_for: PeerLostError(peer, reason, waiting_for=waiting_for, finished=True), loss=False)


def never_came(peer: PeerId, greet_s: float, address: str, trouble: str = "") -> Ending:
    """``trouble``: what was wrong with the last attempt, if that is known."""
    return Ending(
        f"no connection within {greet_s:g} s{trouble and f': {trouble}'}",
        lambda waiting_for: PeerTimeoutError(
            f"{peer} ({where(address, trouble)})", f"its first greeting, for {waiting_for or 'a message'}", greet_s, "[job] timeout"
        ),
    )


def where(address: str, trouble: str) -> str:
    """Where a peer was looked for without success, and what was wrong there."""
    found = f"at {without_key(address)}" if address else "whose address is unknown"
    return found + (trouble and f": {trouble}")


def other_version(peer: PeerId, theirs: int) -> Ending:
    return Ending(
        f"it speaks wire version {theirs}, not {WIRE_VERSION}", lambda _: VersionMismatchError(peer, WIRE_VERSION, theirs)
    )


def other_token(peer: PeerId) -> Ending:
    return Ending("it has another run token", lambda _: RunTokenError(peer))


def superseded() -> Ending:
    """Another process leads the run now."""
    return Ending(str(SupersededError()), lambda _: SupersededError())


def bad_message(peer: PeerId, reason: str) -> Ending:
    return Ending(reason, lambda _: WireError(f"the link to {peer} was closed: {reason}"))


def refused(peer: PeerId, code: RefusalCode, reason: str, version: int) -> Ending:
    """The peer has refused the link."""
    if code == "version":
        return other_version(peer, version)
    if code == "token":
        return other_token(peer)
    if code == "epoch":
        return superseded()
    if code == "protocol":
        return bad_message(peer, f"{peer} reports: {reason}")
    return lost(peer, f"{peer} had already given up on this process: {reason}")


def closed(owner: PeerId) -> Ending:
    return Ending(
        "the endpoint was closed", lambda waiting_for: ZmqTrainError(f"{owner} was closed while waiting for {waiting_for}")
    )
