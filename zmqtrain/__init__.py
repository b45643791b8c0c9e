"""Train a PyTorch model on a few machines over an ordinary network.

The names below are the whole interface for training, and for runs inside programs of one's own (docs/embedding.md). They are
imported when they are first used, because torch takes over a second to import and much of zmqtrain (its commands, its agents) works
without it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmqtrain.c10d.averaging import Averaging
    from zmqtrain.c10d.hook import Gossip, ddp_comm_hook
    from zmqtrain.c10d.servers import ModelServers
    from zmqtrain.embed.own_run import OwnRun, open_run, run_role
    from zmqtrain.embed.session import AsyncSession, Session, join, session
    from zmqtrain.errors import RunFailedError, RunStopped, ZmqTrainError
    from zmqtrain.launcher.program.run import LaunchedRun, launch
    from zmqtrain.parallel.network import NetworkFabric
    from zmqtrain.parallel.placed.model import parallelize
    from zmqtrain.parallel.verify import verify
    from zmqtrain.plan.program import JobPlan, plan
    from zmqtrain.simulate.program import SimulatedRun, simulate
    from zmqtrain.topology.load import load_topology
    from zmqtrain.topology.schema import Topology
    from zmqtrain.train.callback import Callback, StepDone
    from zmqtrain.train.task import Task

    __version__: str

__all__ = [
    "AsyncSession",
    "Averaging",
    "Callback",
    "Gossip",
    "JobPlan",
    "LaunchedRun",
    "ModelServers",
    "NetworkFabric",
    "OwnRun",
    "RunFailedError",
    "RunStopped",
    "Session",
    "SimulatedRun",
    "StepDone",
    "Task",
    "Topology",
    "ZmqTrainError",
    "__version__",
    "ddp_comm_hook",
    "join",
    "launch",
    "load_topology",
    "open_run",
    "parallelize",
    "plan",
    "run_role",
    "session",
    "simulate",
    "verify",
]

_HOME = {
    "AsyncSession": "zmqtrain.embed.session",
    "Averaging": "zmqtrain.c10d.averaging",
    "Callback": "zmqtrain.train.callback",
    "Gossip": "zmqtrain.c10d.hook",
    "JobPlan": "zmqtrain.plan.program",
    "LaunchedRun": "zmqtrain.launcher.program.run",
    "ModelServers": "zmqtrain.c10d.servers",
    "NetworkFabric": "zmqtrain.parallel.network",
    "OwnRun": "zmqtrain.embed.own_run",
    "RunFailedError": "zmqtrain.errors",
    "RunStopped": "zmqtrain.errors",
    "Session": "zmqtrain.embed.session",
    "SimulatedRun": "zmqtrain.simulate.program",
    "StepDone": "zmqtrain.train.callback",
    "Task": "zmqtrain.train.task",
    "Topology": "zmqtrain.topology.schema",
    "ZmqTrainError": "zmqtrain.errors",
    "ddp_comm_hook": "zmqtrain.c10d.hook",
    "join": "zmqtrain.embed.session",
    "launch": "zmqtrain.launcher.program.run",
    "load_topology": "zmqtrain.topology.load",
    "open_run": "zmqtrain.embed.own_run",
    "parallelize": "zmqtrain.parallel.placed.model",
    "plan": "zmqtrain.plan.program",
    "run_role": "zmqtrain.embed.own_run",
    "session": "zmqtrain.embed.session",
    "simulate": "zmqtrain.simulate.program",
    "verify": "zmqtrain.parallel.verify",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("zmqtrain")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
