"""A program that starts everything itself: its event loop holds the coordinator, a model server and a worker; another worker is a
process that it starts.

    python examples/own_scheduler.py

That is how a scheduler of your own (a queue, a notebook, an experiment manager) runs zmqtrain, without ``zmqtrain launch``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from digits import task

from zmqtrain import Topology, open_run, run_role

TOPOLOGY = Topology.from_dict(
    {
        "job": {"name": "own", "epochs": 15, "oversubscribe": True},
        "compute": {"groups": 2, "batch_size": 64, "device": "cpu", "threads": 1},
        "exchange": {"kind": "model_server", "staleness": "async"},
    }
)


async def main(topology: Topology = TOPOLOGY) -> dict[str, float]:
    """Train on the handwritten digits; returns the metrics of the last evaluation."""
    metrics: dict[str, float] = {}

    def on_report(peer: str, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "eval":
                metrics.update({name: value for name, value in event["values"].items() if name.startswith("eval_")})

    async with open_run(topology, on_report=on_report) as run, asyncio.TaskGroup() as tasks:
        # The roles: server/0, worker/0 and worker/1. This program decides which one runs where.
        tasks.create_task(run.role("server/0"))
        tasks.create_task(run.role("worker/0", task=task(lr=0.1, momentum=0.5)))
        environment = {**os.environ, **run.environment("worker/1")}
        process = await asyncio.create_subprocess_exec(sys.executable, __file__, "worker", env=environment)
        code = await process.wait()
        if code:
            raise RuntimeError(f"worker/1 ended with code {code}")
    return metrics


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:  # this process is worker/1; its environment says where to join
        asyncio.run(run_role(task=task(lr=0.1, momentum=0.5)))
    else:
        print(asyncio.run(main()))
