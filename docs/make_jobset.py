"""Writes launch/jobset.yaml from launch/kubernetes.toml: ``make docs``. A test compares the two."""

from __future__ import annotations

from pathlib import Path

from zmqtrain.cli.render import kubernetes
from zmqtrain.topology.load import load_topology

LAUNCH = Path(__file__).parents[1] / "launch"


def manifest() -> str:
    """The manifest, with no secret in it: a token that is so short is refused."""
    return kubernetes(load_topology(LAUNCH / "kubernetes.toml"), token="replace me", command="zmqtrain render kubernetes FILE")


if __name__ == "__main__":
    (LAUNCH / "jobset.yaml").write_text(manifest())
