"""``zmqtrain render``: the manifest of a topology for a scheduler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from zmqtrain.cli.overrides import load_with
from zmqtrain.errors import UsageError
from zmqtrain.launcher.kubernetes.manifest import manifests
from zmqtrain.launcher.kubernetes.yaml_writer import write_yaml
from zmqtrain.topology.schema import Topology
from zmqtrain.world import random_bits


def run_render(kind: str, file: Path, *, settings: Sequence[str] = ()) -> int:
    """Print the manifest of a topology file. Raises `UsageError` for an unknown kind, or for a file that lacks a setting."""
    if kind != "kubernetes":
        raise UsageError(
            f"render {kind}: the kind must be kubernetes, which writes a JobSet (for Slurm use zmqtrain launch "
            "--engine slurm --submit)"
        )
    sys.stdout.write(
        kubernetes(load_with(file, settings), token=f"{random_bits(256):064x}", command=f"zmqtrain render {kind} {file}")
    )
    return 0


def kubernetes(topology: Topology, *, token: str, command: str) -> str:
    """The manifest as text. ``command``: the command that made it, for a comment."""
    head = [
        f"# {command} | kubectl apply -f -",
        "# Needs the JobSet controller (https://jobset.sigs.k8s.io). The Secret is new each time this is rendered.",
    ]
    return "\n".join(head) + "\n" + write_yaml(*manifests(topology, token=token))
