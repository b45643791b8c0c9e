"""``ssh`` in ``[[hosts]]``: how to log in to a machine."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from zmqtrain.topology import ranges
from zmqtrain.topology.section import Section

_OPTION = re.compile(r"[A-Za-z][A-Za-z0-9]*")
#: Options that the file may not set: those for what ssh runs on the other side, and two that have keys of their own.
_OURS = {"batchmode", "remotecommand", "requesttty", "sessiontype", "stdinnull", "forkafterauthentication", "port", "user"}


def _word(value: str) -> str:
    if value.startswith("-") or not value or len(value) > 1000 or any(character.isspace() for character in value):
        raise ValueError("must be one word that does not begin with '-'")
    return value


def _host(value: str) -> str:
    ranges.count(_word(value))
    return value


def _options(values: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if not _OPTION.fullmatch(name) or "\n" in value:
            raise ValueError(f"contains {name!r}, which is not an option of ssh: see man ssh_config")
        if name.lower() in _OURS:
            raise ValueError(f"contains {name}, which cannot be set here: user and port have keys of their own")
    return values


class SshLogin(Section):
    """How to log in to a host. Anything left out has the default of ``ssh`` itself."""

    host: Annotated[str, AfterValidator(_host)] | None = Field(
        default=None,
        description="Where ssh connects to, or the host's name in `~/.ssh/config`, if that is not `address`. May be a range.",
    )
    user: Annotated[str, AfterValidator(_word)] | None = Field(default=None, description="The login name.")
    port: int | None = Field(default=None, ge=1, le=65535, description="The port of sshd.")
    jump: Annotated[str, AfterValidator(_word)] | None = Field(
        default=None,
        description="Machines to connect through, such as `me@gate` or `gate1,gate2:2222` (`ProxyJump`).",
    )
    options: Annotated[dict[str, str], AfterValidator(_options)] = Field(
        default_factory=dict, description='Options as in `~/.ssh/config`, which they override: `{ IdentityFile = "~/.ssh/lab" }`.'
    )
