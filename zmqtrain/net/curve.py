"""Who a process is where connections are encrypted, and whom it lets in (CURVE, ZeroMQ's use of Curve25519).

Each process makes a key pair when it starts; the secret key never leaves its memory. Two kinds of servers, two ways in:

* The *coordinator* lets in every process that has the run's token: from it all processes of the run compute one more key pair, the
  *joiners'*, and show that when they call the coordinator. Its own public key they have from its address.
* All others let in who is on their list: the coordinator from the start, and those whose addresses, with their public keys, they
  were told of. A member tells the coordinator its own when it joins; the coordinator tells all, in its views.

So no process without the token can send a message to a member, and no member can use another's name.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from zmqtrain.errors import UsageError
from zmqtrain.net.address import key_in, split_address
from zmqtrain.net.endpoint import PeerId

#: In whose name the server sockets ask who may come in.
DOMAIN = b"zmqtrain"
#: Goes into the joiners' key, so that the token gives other keys for other uses.
_PURPOSE = b"zmqtrain: key of those who join"
#: Under which name joiners are let in; no peer is called so.
ANYBODY = "*"
#: A route is a session in 16 digits, a slash and the peer's name.
_NAME_AT = 17


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Two keys that belong together."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """A fresh one. Raises `UsageError` where ZeroMQ cannot encrypt."""
        _check()
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))

    @classmethod
    def of_token(cls, token: str) -> KeyPair:
        """The one that everybody with this token computes. Raises `UsageError` for an empty token."""
        _check()
        if not token:
            raise UsageError("an encrypted run needs a token: set ZMQTRAIN_TOKEN to a long random text, the same in all processes")
        secret = hmac.digest(token.encode(), _PURPOSE, "sha256")
        return cls(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


def _check() -> None:
    if not zmq.has("curve"):
        raise UsageError(
            "this build of ZeroMQ cannot encrypt (it lacks libsodium): install pyzmq's wheel from PyPI, or set "
            '[job] transport_encryption = "disabled" if you trust the network'
        )


class Identity:
    """One endpoint's key pair and its list of whom it lets in."""

    def __init__(self, *, joiner: KeyPair | None = None, coordinator: bytes | None = None, open_to_joiners: bool = False) -> None:
        """Use `coordinator` or `member`; called directly, it lets in only peers that are admitted."""
        self._own = KeyPair.new()
        self._joiner, self._coordinator, self._open = joiner, coordinator, open_to_joiners
        self._names: dict[bytes, PeerId] = {}
        self._keys: dict[PeerId, bytes] = {}
        if open_to_joiners and joiner is not None:
            self._names[joiner.public] = ANYBODY

    @classmethod
    def coordinator(cls, token: str) -> Identity:
        """The coordinator's identity: every process that has the token is let in."""
        return cls(joiner=KeyPair.of_token(token), open_to_joiners=True)

    @classmethod
    def member(cls, token: str, coordinator: bytes) -> Identity:
        """Everybody else's. ``coordinator``: its public key."""
        return cls(joiner=KeyPair.of_token(token), coordinator=coordinator)

    @property
    def public(self) -> bytes:
        """This process's public key."""
        return self._own.public

    @property
    def is_complete(self) -> bool:
        """Whether the set of accepted keys is final: the token alone decides."""
        return self._open

    # The list

    def admit(self, peer: PeerId, address: str) -> None:
        """Admit ``peer``, as announced by a trusted source: only a process with the key in ``address`` may use that name.

        A key that is another's already stays that one's. Raises `ValueError` for an address without a key.
        """
        key = _needed_key(address)
        self.dismiss(peer)
        if key not in self._names:
            self._keys[peer], self._names[key] = key, peer

    def dismiss(self, peer: PeerId) -> None:
        """Let the peer in no more."""
        key = self._keys.pop(peer, None)
        if key is not None:
            del self._names[key]

    def name_of(self, key: bytes) -> PeerId | None:
        """Under which name a caller with this key is let in; `ANYBODY`: any; ``None``: not at all."""
        return self._names.get(key)

    def may_be(self, name: str, route: bytes) -> bool:
        """Whether a caller who was let in as ``name`` may send under this route."""
        # What begins so was named by ZeroMQ itself: a refusal of somebody's, for which a route counts nothing.
        return name == ANYBODY or route[:1] == b"\0" or route[_NAME_AT:] == name.encode()

    def believes(self, peer: PeerId, address: str) -> bool:
        """Whether to take the peer's own word that it is there."""
        try:
            split_address(address)
            key = _needed_key(address)
        except ValueError:
            return False
        # At the coordinator a process may come instead of another, with keys of its own: the token proves that it may.
        return key == self._keys.get(peer) or (self._open and key not in self._names)

    def joins(self, address: str) -> bool:
        """Whether it is the run's token that is to let this process in there."""
        return self._coordinator is not None and key_in(address) == self._coordinator

    # Sockets

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make it a server that asks who calls."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # with nobody there to be asked, nobody comes in

    def arm(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Make ``socket`` a client of the process that listens at ``address``, and of no other. Raises `ValueError` without a
        key."""
        key = _needed_key(address)
        pair = self._joiner if self._joiner is not None and self.joins(address) else self._own
        socket.setsockopt(zmq.CURVE_SERVERKEY, key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


def _needed_key(address: str) -> bytes:
    key = key_in(address)
    if key is None:
        raise ValueError(f"the address {address} has no key: the process there does not encrypt, and this one must")
    return key
