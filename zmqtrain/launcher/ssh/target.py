"""A machine to log in to: ssh's arguments, its configuration, and the command for the login shell."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

from zmqtrain.topology.schema import Host

#: Seconds between signs of life, and how many may be missing: a silent connection is noticed within a minute.
ALIVE_S, ALIVE_MISSING = 15, 3
#: What Python runs first: it takes the real program from its standard input, so that nothing needs to be installed there. In
#: single quotes this means the same in every shell.
_FIRST = 'import sys;b=sys.stdin.buffer;exec(compile(b.read(int(b.readline())),"zmqtrain-remote","exec"))'
#: What it does with them: under their own names they find each other, and nothing else of zmqtrain is looked for. The last one
#: is the program.
_BRING = (
    "for name, text in modules.items():",
    "    sys.modules[name] = types.ModuleType(name)",
    "    exec(compile(text, name, 'exec'), sys.modules[name].__dict__)",
    "sys.modules[name].main()",
)
_MODULES = ("zmqtrain.processors", "zmqtrain.death", "zmqtrain.launcher.ssh.supervisor", "zmqtrain.launcher.ssh.remote")


@dataclass(frozen=True, slots=True)
class Target:
    """How to get to one host, and to what the run has there."""

    name: str
    """The host's name in the topology file."""
    host: str
    """The name or address that ssh connects to."""
    python: str
    user: str | None = None
    port: int | None = None
    jump: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, host: Host, python: str) -> Target:
        """The target of a host. ``python``: used if the file names none."""
        login = host.ssh
        return cls(
            name=host.name,
            host=login.host or host.address,
            python=host.python or python,
            user=login.user,
            port=login.port,
            jump=login.jump,
            options=login.options,
            environment=host.environment,
        )

    def to_dict(self) -> dict[str, Any]:
        """The target as plain values; `from_dict` restores it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Target:
        """The target that `to_dict` wrote. Raises ``TypeError`` for anything else."""
        return cls(**values)

    @property
    def way(self) -> str:
        """The connection, in words."""
        return "the ssh connection"

    @property
    def program(self) -> bytes:
        """The program that is sent there first."""
        return remote_program()

    @property
    def by_hand(self) -> str:
        """The command with which a user would log in."""
        words = ["ssh"]
        if self.jump is not None:
            words += ["-J", self.jump]
        if self.port is not None:
            words += ["-p", str(self.port)]
        words += [word for name, value in self.options.items() for word in ("-o", f"{name}={value}")]
        return shlex.join([*words, self.host if self.user is None else f"{self.user}@{self.host}"])


def system_arguments(target: Target, *, connect_s: float) -> list[str]:
    """The system's ``ssh`` with its arguments, to run the remote program. The file's options take precedence over the user's
    configuration."""
    options = {
        "BatchMode": "yes",  # there is no user to ask
        "ConnectTimeout": str(max(1, round(connect_s))),
        "ServerAliveInterval": str(ALIVE_S),
        "ServerAliveCountMax": str(ALIVE_MISSING),
        **target.options,
    }
    words = ["ssh", "-T", "-x", "-a"]
    words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    for flag, value in (("-J", target.jump), ("-p", target.port), ("-l", target.user)):
        if value is not None:
            words += [flag, str(value)]
    return [*words, "--", target.host, remote_command(target.python)]


def options_as_config(target: Target) -> str:
    """The file's options as an ssh configuration that applies to this host only, and not to jump hosts."""
    lines = [f"Host {target.host}", *(f"  {name} {value}" for name, value in target.options.items())]
    return "\n".join(lines) + "\n"


def remote_command(python: str) -> str:
    """The command for the login shell, for any shell: Python, which then gets the remote program on its standard input."""
    # Every shell knows $HOME, but not ~ in quotes.
    word = '"$HOME"/' + shlex.quote(python[2:]) if python.startswith("~/") else shlex.quote(python)
    return f"{word} -u -c {shlex.quote(_FIRST)}"


def remote_words(python: str) -> tuple[str, ...]:
    """The same as words, for use without a shell."""
    return (os.path.expanduser(python), "-u", "-c", _FIRST)


def remote_program(*more: str) -> bytes:
    """The remote program in the form that `remote_command` reads: its length, and its text, which contains its modules.
    ``more``: further modules, of which the last is the program."""
    modules = {}
    for name in (*_MODULES, *more):
        package, _, module = name.rpartition(".")
        modules[name] = files(package).joinpath(f"{module}.py").read_text("utf-8")
    lines = ["import sys, types", f"modules = {modules!r}", *_BRING]
    text = "\n".join(lines).encode()
    return f"{len(text)}\n".encode() + text


def launching_python() -> str:
    """The path of this Python interpreter, which other hosts may have, too. Links are not followed, since a virtual environment is
    identified by its own path."""
    import sys

    return os.path.abspath(sys.executable)
