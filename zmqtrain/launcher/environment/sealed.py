"""Lines that only a process with the token can have written: how launcher and nodes talk before they have keys. Sans-IO.

Each side sends a number that it has never used before. Both numbers and the token give the key of this one conversation, and each
line carries a keyed digest that covers its position in the conversation. So no line can be forged, changed, left out or replayed.
The lines can be *read* by anyone on the network: they contain no secret.
"""

from __future__ import annotations

import hmac
import json
from typing import Any

from zmqtrain.errors import ProtocolError, RunTokenError

#: The longest line: at most an environment.
MOST_BYTES = 256 * 1024
_KEY = b"zmqtrain: key of a conversation in the rendezvous"
_DIGITS = 64


class Seal:
    """One side's view of a conversation."""

    def __init__(self, token: str, launcher_number: str, node_number: str, *, launcher: bool) -> None:
        """``launcher``: whether this is the launcher's side."""
        both = f"{launcher_number}/{node_number}".encode()
        self._key = hmac.digest(token.encode(), _KEY + both, "sha256")
        self._launcher = launcher
        self._said = self._heard = 0

    def write(self, **values: Any) -> bytes:
        """The next line of this side."""
        text = json.dumps(values).encode()
        self._said += 1
        return self._sum(self._launcher, self._said, text).encode() + b" " + text + b"\n"

    def read(self, line: bytes, who: str) -> dict[str, Any]:
        """The next line of the other side, ``who``.

        Raises `RunTokenError` if it has another token, and `ProtocolError` if it is not a line of this protocol.
        """
        digits, _, text = line.rstrip(b"\n").partition(b" ")
        if len(digits) != _DIGITS:
            raise ProtocolError(f"{who} does not follow this protocol: check that it is zmqtrain, in the same release")
        self._heard += 1
        if not hmac.compare_digest(digits, self._sum(not self._launcher, self._heard, text).encode()):
            raise RunTokenError(who)
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ProtocolError(f"{who} sent something that is not a message")
        return value

    def _sum(self, launcher: bool, place: int, text: bytes) -> str:
        return hmac.new(self._key, f"{launcher} {place} ".encode() + text, "sha256").hexdigest()
