"""The secret that only the hosts of a run share: the token, and what is derived from it."""

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
#: The fewest characters of a token: a shorter one could be guessed from the traffic.
LEAST_LETTERS = 16
#: The largest file that can be a token, in bytes.
MOST_LETTERS = 4096
_RUN = b"zmqtrain: token of one run"


def read_token(environ: Mapping[str, str]) -> str | None:
    """The token in the environment, or in a file that it names; ``None`` if there is none.

    Raises `UsageError` for a file that does not exist or that others may read, and for a token that is too short.
    """
    token, source = environ.get(TOKEN, "").strip(), TOKEN
    name = environ.get(TOKEN_FILE, "").strip()
    if not token and name:
        token, source = _in_file(Path(name)), f"{TOKEN_FILE} ({name})"
    if not token:
        return None
    if len(token) < LEAST_LETTERS:
        raise UsageError(
            f"{source} has only {len(token)} characters, which can be guessed: use {LEAST_LETTERS} or more, like the output of "
            f"`openssl rand -hex 32`"
        )
    return token


def _in_file(path: Path) -> str:
    try:
        status = path.stat()
        # A mounted Kubernetes Secret belongs to root, and to the pod's own group.
        mine = status.st_uid == os.getuid() != 0
        if status.st_mode & stat.S_IRWXO or (mine and status.st_mode & stat.S_IRWXG):
            raise UsageError(
                f"{TOKEN_FILE}: others may read {path}. Run chmod 600 {path} (for a mounted Secret, set defaultMode: 0440)"
            )
        if status.st_size > MOST_LETTERS:
            raise UsageError(f"{TOKEN_FILE}: {path} is too large to be a token")
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{TOKEN_FILE}: {path} cannot be read: {error}") from error


def write_token(path: Path) -> str:
    """Write a new token to a file that only this user may read, and return it."""
    token = f"{random_bits(256):064x}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(token + "\n")
    return token


def run_token(token: str, run: str) -> str:
    """The token of one run, which can be computed only from the shared token and the run's id. So the shared token may be used
    again, but no process of an earlier run can join a later one."""
    return hmac.new(token.encode(), _RUN + run.encode(), "sha256").hexdigest()
