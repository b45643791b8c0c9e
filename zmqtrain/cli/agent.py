"""``zmqtrain agent [FILE]``: take part in a run as one host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from zmqtrain.cli.overrides import load_with
from zmqtrain.death import die_with_parent
from zmqtrain.errors import UsageError
from zmqtrain.launcher.agent import main as start_agent
from zmqtrain.launcher.environment.node import main as start_node
from zmqtrain.launcher.environment.node import needed_token
from zmqtrain.launcher.environment.place import DEFAULT_PORT, NODE_RANK, NodePlace, read_place
from zmqtrain.launcher.local import PARENT
from zmqtrain.membership.environment import PEER


def run_agent_command(
    file: Path | None,
    script: Sequence[str] = (),
    *,
    data: str | None = None,
    resume: str | None = None,
    run_dir: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Run the agent that the environment describes and return the exit code.

    With a ``file``, the first node is both launcher and agent; the options are those of `zmqtrain.cli.launch.run_launch`.

    Raises `UsageError` if the environment lacks a variable, and the errors that keep the node from joining the run.
    """
    if os.environ.get(PEER):  # an engine has started this agent and set all variables
        return start_agent()
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        die_with_parent(int(parent))
    place = read_place(os.environ, together=file is not None)
    if file is None:
        return start_node(place)
    if place.rank is None:
        raise UsageError(
            f"which node is this? With FILE all nodes run the same command, and number 0 launches: set {NODE_RANK} (Slurm, "
            "SkyPilot, Kubeflow and torch.distributed have variables for it). Or run zmqtrain launch FILE on one machine, and "
            "zmqtrain agent without FILE on all nodes."
        )
    if place.rank == 0:
        return _launch(file, script, place, data=data, resume=resume, run_dir=run_dir, settings=settings)
    topology = load_with(file, settings)
    return start_node(place, port=topology.job.port or DEFAULT_PORT, wait_s=topology.engine.wait)


def _launch(
    file: Path,
    script: Sequence[str],
    place: NodePlace,
    *,
    data: str | None,
    resume: str | None,
    run_dir: Path | None,
    settings: Sequence[str],
) -> int:
    from zmqtrain.cli.launch import run_launch
    from zmqtrain.cli.launch_options import LaunchOptions
    from zmqtrain.launcher.environment.engine import EnvironmentEngine

    needed_token(os.environ)  # otherwise the nodes could not have the same token
    # The environment says where all nodes meet; the file's port is for launches by hand.
    port = [] if place.port is None else [f"job.port={place.port}"]
    options = LaunchOptions(
        data=data,
        resume=resume,
        run_dir=run_dir,
        settings=['engine.kind="environment"', *port, *settings],
        own_engine=EnvironmentEngine(here=True),
    )
    return run_launch(file, script, options)
