"""Who may connect where nothing is encrypted: a process that proves in ZeroMQ's handshake (PLAIN) that it has the run's token.

A stranger gets no further than the handshake, so nothing that it sends is kept. The proof is a hash of the token; it crosses the
network in plain text, as does everything else then.
"""

from __future__ import annotations

import hmac

import zmq

from zmqtrain.net.curve import DOMAIN
from zmqtrain.net.endpoint import PeerId

_PURPOSE = b"zmqtrain: password of a plain connection"
_USER = b"zmqtrain"


class Password:
    """The password of one run."""

    def __init__(self, token: str) -> None:
        """``token``: the run's; empty in programs of a single user, where it proves nothing."""
        self._word = hmac.digest(token.encode(), _PURPOSE, "sha256").hex().encode()

    def name_of(self, credentials: list[bytes]) -> PeerId | None:
        """The name under which a caller with these credentials is admitted; ``None``: it is not."""
        match credentials:
            case [user, word] if user == _USER and hmac.compare_digest(word, self._word):
                return _USER.decode()
        return None

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make the socket a server that asks whether to admit callers."""
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler to ask, no caller is admitted

    def arm(self, socket: zmq.Socket[bytes]) -> None:
        """Make the socket show the password to the process that it calls."""
        socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
        socket.setsockopt(zmq.PLAIN_PASSWORD, self._word)
