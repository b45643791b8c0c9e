"""The examples with a loop of their own, as a person starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples import own_scheduler, script_join, script_session
from tests.launcher.launched import Launched
from zmqtrain.topology.schema import Topology

ROOT = Path(__file__).parents[2]
#: A tenth is chance. Of groups that run apart: how late each is depends on the machine, and six epochs may give much more.
LEARNT = 0.3


def test_a_plain_script_runs_alone() -> None:
    assert script_session.main(epochs=8) > 0.9


async def test_an_asynchronous_script_runs_alone() -> None:
    assert await script_join.main(epochs=8) > 0.9


async def test_own_scheduler_trains_on_coroutines_and_a_process() -> None:
    whole = own_scheduler.TOPOLOGY.to_dict()
    metrics = await own_scheduler.main(Topology.from_dict({**whole, "job": {**whole["job"], "epochs": 6}}))
    assert metrics["eval_accuracy"] > LEARNT


@pytest.mark.parametrize("script", ["script_session.py", "script_join.py"])
def test_scripts_run_on_groups_and_servers(script: str, tmp_path: Path) -> None:
    with Launched(tmp_path, str(ROOT / "launch" / "script.toml"), str(ROOT / "examples" / script), "6") as run:
        assert run.end() == 0, run
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done"
    logs = "".join(file.read_text() for file in (tmp_path / "run" / "logs").glob("*.log"))
    assert float(logs.split("test accuracy ")[1].split("%")[0]) > 100 * LEARNT
