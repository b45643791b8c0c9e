"""Where a task's data is: the command line, the environment or the topology file says so."""

from __future__ import annotations

import os

from zmqtrain.topology.schema import Topology

#: The environment variable.
DATA = "ZMQTRAIN_DATA"


def data_path_of(given: str | None, topology: Topology) -> str | None:
    """The path of the task's data, or ``None``. ``--data`` (``given``) comes before the environment, which comes before the
    file."""
    found = said_data_path(given, topology)
    return None if found is None else found[1]


def said_data_path(given: str | None, topology: Topology) -> tuple[str, str] | None:
    """The source that names the data's path (option, variable or setting), and the path; ``None`` if none does."""
    sources = (("--data", given), (DATA, os.environ.get(DATA)), ("[data] path", topology.data.path))
    return next(((source, path) for source, path in sources if path), None)
