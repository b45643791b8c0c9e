"""``zmqtrain join RUN``: take part in a running elastic run with another worker, or another model server."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from functools import partial
from urllib.parse import urlsplit

from zmqtrain.cli.runs import lives, require_launcher
from zmqtrain.launcher.addresses import address_towards
from zmqtrain.launcher.agent import main as start_agent
from zmqtrain.launcher.asked import ask
from zmqtrain.membership.environment import COORDINATOR_ADDRESS, HOST
from zmqtrain.observe.run_directory import find_run, training_of
from zmqtrain.topology.loopback import is_loopback


def run_join(name: str, *, show: bool) -> int:
    """Ask the launcher of a run, on this machine, for a place, and be a host of the run until it has ended. ``show``: print the
    command that does so on another machine instead. Returns the exit code.

    Raises `UsageError` if the run has no place, and `HostLostError` if its launcher ends before it answers."""
    path = find_run(name)
    launcher = require_launcher(path)
    request = {"what": "join", "from": "elsewhere" if show else "here"}
    place = json.loads(ask(training_of(path), launcher.pid, request, lives=partial(lives, launcher)))
    environment: dict[str, str] = place["environment"]
    at = urlsplit(environment[COORDINATOR_ADDRESS]).hostname or ""
    if show:
        settings = {name: value for name, value in environment.items() if value and name != HOST}
        print(
            " ".join([*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), f"{HOST}=ITS_ADDRESS zmqtrain agent"])
        )
        return 0
    if not is_loopback(at):
        environment[HOST] = asyncio.run(address_towards("the launcher", at))
    os.chdir(place["folder"])
    os.environ.update(environment)
    return start_agent()
