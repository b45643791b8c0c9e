"""A resumed run trains on from where the checkpoint's has stopped, or says why it would not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.world import Recipe, data_of, run, topology_of
from zmqtrain.errors import CheckpointError
from zmqtrain.topology.schema import Topology
from zmqtrain.train.checkpoint.folder import find_latest

ALLREDUCE, AVERAGING = {"kind": "allreduce"}, {"kind": "averaging", "every": 2}
TOP = {"kind": "model_server", "staleness": "sync", "compression": "topk"}


def topology(steps: int, kind: dict[str, Any], **changed: dict[str, Any]) -> Topology:
    sections: dict[str, dict[str, Any]] = {
        "job": {"steps": steps, "elastic": False},
        "compute": {"groups": 2, "batch_size": 8},
        "exchange": kind,
        "data": {"shuffle": "global"},
    }
    return topology_of(**{name: {**values, **changed.get(name, {})} for name, values in sections.items()})


REFUSED: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Any], str]] = {
    "seed": (ALLREDUCE, {"job": {"seed": 7}}, {}, r"\[job\] seed = 1, but this run has 7"),
    "order": (ALLREDUCE, {"data": {"shuffle": "none"}}, {}, r"\[data\] shuffle = 'global', but this run has 'none'"),
    "data": (ALLREDUCE, {}, {"train_data": data_of(112)}, r"len\(Task.train_data\) = 96, but this run has 112"),
    "method": (
        {**AVERAGING, "averaging": {"method": "elastic"}},
        {"exchange": {"averaging": {"method": "average"}}},
        {},
        r"\[exchange.averaging\] method = 'elastic', but this run has 'average'",
    ),
    "optimizer": (ALLREDUCE, {}, {"optimizer": lambda p: torch.optim.Adam(p)}, r"the optimizer = 'SGD', but this run has 'Adam'"),
    "not sent": (TOP, {"exchange": {"compression": "none"}}, {}, "gradients that compression has not sent yet"),
}
ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "batches": (ALLREDUCE, {"compute": {"batch_size": 4}}),
    "rates": (ALLREDUCE, {"optimizer": {"lr": 0.5}}),
    "buckets": ({"kind": "model_server", "staleness": "sync"}, {"compute": {"bucket_size": 4096}}),
    "staleness": ({"kind": "model_server", "staleness": "sync"}, {"exchange": {"staleness": "async"}}),
    "smaller numbers": (ALLREDUCE, {"compute": {"precision": "bfloat16"}}),
}


async def resumed(exchange: dict[str, Any], changed: dict[str, dict[str, Any]], fields: dict[str, Any], folder: Path) -> Any:
    first = await run(topology(3, exchange), Recipe(), folder=folder)
    assert not first.errors, first.errors
    return await run(topology(5, exchange, **changed), Recipe(**fields), folder=folder, resume=find_latest(folder))


@pytest.mark.parametrize("name", REFUSED)
async def test_what_would_train_something_else_is_refused(name: str, tmp_path: Path) -> None:
    exchange, changed, fields, said = REFUSED[name]
    result = await resumed(exchange, changed, fields, tmp_path)
    errors = [error for error in result.errors.values() if isinstance(error, CheckpointError)]
    assert errors, result.errors
    with pytest.raises(CheckpointError, match=said):
        raise errors[0]


@pytest.mark.parametrize("name", ACCEPTED)
async def test_what_a_person_may_change_is_not(name: str, tmp_path: Path) -> None:
    result = await resumed(*ACCEPTED[name], {}, tmp_path)
    assert not result.errors, result.errors
    assert [event["step"] for event in result.recorders["worker/0"].of("step")] == [3, 4]
