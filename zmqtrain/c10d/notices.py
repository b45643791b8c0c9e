"""What the ranks of a process group tell each other through torch's store, before they have connections.

Whoever reaches the store can read and write it. With a token, which the store never sees, each notice carries a keyed digest: it
counts only if a process with the token wrote it, for this group and in this rank's name.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from zmqtrain.errors import ConnectivityError, PeerTimeoutError, RunTokenError, UsageError
from zmqtrain.membership.secret import run_token
from zmqtrain.world import random_bits

SETTING = "timeout= of init_process_group() or new_group()"
#: How long a rank that refuses another one stays for the others to read why: its process may hold the store.
STAY_S = 2.0
_PURPOSE = b"zmqtrain: notice of a rank"


class Notices:
    """One rank's side. First `meet`, then any number of `tell` and `hear`."""

    def __init__(self, store: Store, rank: int, names: Sequence[str], timeout: timedelta, token: str | None) -> None:
        """``names``: of the ranks. ``token``: what all of them know, and nobody else; ``None``: they trust the store."""
        # A program may destroy its group and make another one in the same store, where what the first one wrote is still to be
        # found.
        self._store = PrefixStore(f"group-{store.add(f'made/{rank}', 1)}", store)
        self._rank, self._names, self._timeout, self._token = rank, names, timeout, token
        self._session = ""
        """What no other group has, once the ranks have met."""

    def meet(self, **values: str) -> list[dict[str, str]]:
        """Exchange these values. Returns those of all ranks.

        Raises `RunTokenError` or `UsageError` if another rank has another token, or only one of both has any.
        """
        # A number of each rank's own: notices of another group, given to this one, are of no use.
        self.tell("rank", json.dumps({**values, "number": f"{random_bits(128):032x}"}))
        try:
            texts = [self.hear("rank", rank) for rank in range(len(self._names))]
        except (RunTokenError, UsageError):
            self._store.set(f"met/{self._rank}", "")
            with suppress(RuntimeError):
                self._store.wait([f"met/{rank}" for rank in range(len(self._names))], timedelta(seconds=STAY_S))
            raise
        self._store.set(f"met/{self._rank}", "")
        self._session = sha256("\n".join(texts).encode()).hexdigest()
        return [json.loads(text) for text in texts]

    @property
    def run_token(self) -> str:
        """What members of this group show each other when they connect; it is not the token, nor does it reveal it."""
        return run_token(self._token or "", self._session)

    def tell(self, key: str, text: str) -> None:
        """Write this rank's notice."""
        self._store.set(f"{key}/{self._rank}", f"{self._digest(key, self._rank, text)}:{text}")

    def hear(self, key: str, rank: int) -> str:
        """The notice of that rank, once it has written it. Raises `PeerTimeoutError`, or like `meet`."""
        name = self._names[rank]
        try:
            self._store.wait([f"{key}/{rank}"], self._timeout)
            content: bytes = self._store.get(f"{key}/{rank}")
        except dist.DistNetworkError as error:
            raise ConnectivityError(
                f"torch's store, through which {name} is found, cannot be reached any more: the process that holds it (rank 0, or "
                "torchrun) has ended. Its own output says why"
            ) from error
        except RuntimeError as error:  # torch's stores raise DistStoreError, a subclass
            raise PeerTimeoutError(name, "it to join the process group", self._timeout.total_seconds(), SETTING) from error
        digest, _, text = content.decode().partition(":")
        if bool(digest) != bool(self._token):
            one, other = ("a", "has none") if digest else ("no", "has one")
            raise UsageError(
                f"{name} has {one} token, but {self._names[self._rank]} {other}: set ZMQTRAIN_TOKEN to the same secret in all "
                "processes, or in none"
            )
        if not hmac.compare_digest(digest, self._digest(key, rank, text)):
            raise RunTokenError(name)
        return text

    def _digest(self, key: str, rank: int, text: str) -> str:
        if not self._token:
            return ""
        what = json.dumps([self._session, list(self._names), key, rank, text])
        return hmac.digest(self._token.encode(), _PURPOSE + what.encode(), "sha256").hex()
