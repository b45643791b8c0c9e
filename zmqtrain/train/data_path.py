"""Where a task's data lies: who says so."""

from __future__ import annotations

import os

from zmqtrain.topology.schema import Topology

#: The environment's word.
DATA = "ZMQTRAIN_DATA"


def data_path_of(given: str | None, topology: Topology) -> str | None:
    """An argument (``--data``) goes before the environment, and that before the file."""
    found = said_data_path(given, topology)
    return None if found is None else found[1]


def said_data_path(given: str | None, topology: Topology) -> tuple[str, str] | None:
    """Who says where the data is, and where."""
    sources = (("--data", given), (DATA, os.environ.get(DATA)), ("[data] path", topology.data.path))
    return next(((source, path) for source, path in sources if path), None)
