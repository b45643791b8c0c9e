"""What all nodes of a run have in common and nobody else: the token, and what is made from it."""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from zmqtrain.errors import UsageError
from zmqtrain.membership.environment import TOKEN
from zmqtrain.world import random_bits

TOKEN_FILE = "ZMQTRAIN_TOKEN_FILE"
#: A shorter one could be guessed from what goes over the network.
LEAST_LETTERS = 16
#: A file with more in it is another file.
MOST_LETTERS = 4096
_RUN = b"zmqtrain: token of one run"


def read_token(environ: Mapping[str, str]) -> str | None:
    """The token that the environment has, itself or in a file; ``None``: none.

    Raises `UsageError` for a file that others may read, or that is not there, and for a token that is too short.
    """
    token, source = environ.get(TOKEN, "").strip(), TOKEN
    name = environ.get(TOKEN_FILE, "").strip()
    if not token and name:
        token, source = _in_file(Path(name)), f"{TOKEN_FILE} ({name})"
    if not token:
        return None
    if len(token) < LEAST_LETTERS:
        raise UsageError(
            f"{source} holds {len(token)} characters, which can be guessed: take {LEAST_LETTERS} or more, like those that "
            "`openssl rand -hex 32` prints"
        )
    return token


def _in_file(path: Path) -> str:
    try:
        status = path.stat()
        # A mounted Kubernetes Secret belongs to root, and to the pod's own group.
        mine = status.st_uid == os.getuid() != 0
        if status.st_mode & stat.S_IRWXO or (mine and status.st_mode & stat.S_IRWXG):
            raise UsageError(f"{TOKEN_FILE}: others may read {path}: chmod 600 {path} (a mounted Secret: defaultMode: 0440)")
        if status.st_size > MOST_LETTERS:
            raise UsageError(f"{TOKEN_FILE}: {path} is too large for a token")
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{TOKEN_FILE}: {path} cannot be read: {error}") from error


def write_token(path: Path) -> str:
    """A new token, in a file that nobody else may read."""
    token = f"{random_bits(256):064x}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(token + "\n")
    return token


def run_token(token: str, run: str) -> str:
    """One run's own token: who has the token, and knows which run it is, can compute it, and nobody else. So the same token may
    serve again, and yet nobody of an earlier run gets into a later one."""
    return hmac.new(token.encode(), _RUN + run.encode(), "sha256").hexdigest()
