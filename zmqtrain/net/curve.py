"""The keys of processes on encrypted connections, and which callers they admit (CURVE, ZeroMQ's use of Curve25519).

Each process makes a key pair when it starts. The secret key stays in its memory; that of a coordinator that may be replaced is
also in its journal. There are two kinds of servers:

* The *coordinator* admits every process that has the run's token: all processes of the run compute from it one further key pair,
that
  of the *joiners*, and use it to call the coordinator. They have the coordinator's public key from its address.
* All others admit the processes on their list: first only the coordinator, later those whose addresses, with their public keys,
they
  were told. A member tells the coordinator its own key when it joins; the coordinator tells all members in its views.

So no process without the token can send a message to a member, and no member can use the name of another.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from zmqtrain.errors import UsageError
from zmqtrain.net.address import key_in, split_address
from zmqtrain.net.endpoint import PeerId

#: The domain in which server sockets ask whether to admit a caller.
DOMAIN = b"zmqtrain"
#: Part of the joiners' key, so that the token gives other keys for other purposes.
_PURPOSE = b"zmqtrain: key of those who join"
#: The name under which joiners are admitted; no peer has it.
ANYBODY = "*"
#: A route is a session in 16 digits, a slash and the peer's name.
_NAME_AT = 17


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A secret key and its public key."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """A new key pair. Raises `UsageError` if ZeroMQ cannot encrypt."""
        _check()
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))

    @classmethod
    def of_token(cls, token: str) -> KeyPair:
        """The key pair that every process with this token computes. Raises `UsageError` for an empty token."""
        _check()
        if not token:
            raise UsageError("an encrypted run needs a token: set ZMQTRAIN_TOKEN to the same long random text in all processes")
        return cls.of_secret(hmac.digest(token.encode(), _PURPOSE, "sha256"))

    @classmethod
    def of_secret(cls, secret: bytes) -> KeyPair:
        """The key pair with this secret key."""
        return cls(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


def _check() -> None:
    if not zmq.has("curve"):
        raise UsageError(
            "this build of ZeroMQ cannot encrypt (it lacks libsodium): install pyzmq's wheel from PyPI, or set "
            '[job] transport_encryption = "disabled" (ZMQTRAIN_TRANSPORT_ENCRYPTION=disabled for the zmq backend of torch) if you '
            "trust the network"
        )


class Identity:
    """One endpoint's key pair, and its list of callers to admit."""

    def __init__(
        self,
        *,
        joiner: KeyPair | None = None,
        coordinator: bytes | None = None,
        open_to_joiners: bool = False,
        own: KeyPair | None = None,
    ) -> None:
        """Use `coordinator` or `member`; called directly, it admits only peers on the list. ``own``: instead of a new key pair."""
        self._own = own or KeyPair.new()
        self._joiner, self._coordinator, self._open = joiner, coordinator, open_to_joiners
        self._names: dict[bytes, PeerId] = {}
        self._keys: dict[PeerId, bytes] = {}
        if open_to_joiners and joiner is not None:
            self._names[joiner.public] = ANYBODY

    @classmethod
    def coordinator(cls, token: str, secret: bytes | None = None) -> Identity:
        """The coordinator's identity: every process that has the token is admitted. ``secret``: of the coordinator whose place it
        takes; by default it is a new one."""
        own = None if secret is None else KeyPair.of_secret(secret)
        return cls(joiner=KeyPair.of_token(token), open_to_joiners=True, own=own)

    @property
    def secret(self) -> bytes:
        """The secret key, for a coordinator that is to take this one's place."""
        return self._own.secret

    @classmethod
    def member(cls, token: str, coordinator: bytes) -> Identity:
        """The identity of all other processes. ``coordinator``: its public key."""
        return cls(joiner=KeyPair.of_token(token), coordinator=coordinator)

    @property
    def public(self) -> bytes:
        """This process's public key."""
        return self._own.public

    @property
    def is_complete(self) -> bool:
        """Whether the set of accepted keys is final: the token alone decides."""
        return self._open

    # The list.

    def admit(self, peer: PeerId, address: str) -> None:
        """Admit ``peer``, as announced by a trusted source: only a process with the key in ``address`` may use that name.

        A key that belongs to another peer stays with that peer. Raises `ValueError` for an address without a key.
        """
        key = _needed_key(address)
        self.dismiss(peer)
        if key not in self._names:
            self._keys[peer], self._names[key] = key, peer

    def dismiss(self, peer: PeerId) -> None:
        """Do not admit the peer any more."""
        key = self._keys.pop(peer, None)
        if key is not None:
            del self._names[key]

    def name_of(self, key: bytes) -> PeerId | None:
        """The name under which a caller with this key is admitted; `ANYBODY`: any name; ``None``: it is not admitted."""
        return self._names.get(key)

    def may_be(self, name: str, route: bytes) -> bool:
        """Whether a caller that was admitted as ``name`` may send under this route."""
        # Routes that begin with this byte were named by ZeroMQ itself: they carry refusals, for which the route does not matter.
        return name == ANYBODY or route[:1] == b"\0" or route[_NAME_AT:] == name.encode()

    def believes(self, peer: PeerId, address: str) -> bool:
        """Whether to believe the peer's own announcement."""
        try:
            split_address(address)
            key = _needed_key(address)
        except ValueError:
            return False
        # At the coordinator a process with new keys may replace another one: the token proves that it may.
        return key == self._keys.get(peer) or (self._open and key not in self._names)

    def joins(self, address: str) -> bool:
        """Whether the run's token is to admit this process there."""
        return self._coordinator is not None and key_in(address) == self._coordinator

    # Sockets

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make the socket a server that asks whether to admit callers."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler to ask, no caller is admitted

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
        raise ValueError(f"the address {address} has no key: the process there does not encrypt, but this run requires encryption")
    return key
