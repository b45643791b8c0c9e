"""A checkpoint whose parts arrive, and some of which never do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zmqtrain.exchange.checkpoint_part import MEMBERS, pack_manifest
from zmqtrain.train.checkpoint.folder import META, Checkpoint, CheckpointWriter, RunShape
from zmqtrain.train.checkpoint.incoming import IncomingCheckpoint
from zmqtrain.wire.tensor import TensorPayload

LISTED = [("weights", "float32", (3,))]


@pytest.mark.filterwarnings("error")
def test_what_a_lost_worker_has_half_sent_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    shape = RunShape("averaging", 2, 1, 0)
    incoming = IncomingCheckpoint(tmp_path, 4, shape, 0.0)
    tensor = TensorPayload.of(torch.zeros(3))

    def send(rank: int, name: str, *, whole: bool) -> None:
        incoming.take(f"worker/{rank}", name, pack_manifest({"weights": tensor}, {"step": 4, MEMBERS: [0, 1]}))
        if whole:
            incoming.take(f"worker/{rank}", name, tensor)

    def there(rank: int) -> bool:
        return rank == 0

    send(1, "group-1", whole=False)
    for name in ("model", "group-0", "worker-0"):
        send(0, name, whole=True)
    assert incoming.missing((), there) == []
    folder = incoming.commit({}, there)
    checkpoint = Checkpoint(folder)
    names = {f"{name}.{kind}" for name in ("model", "group-0", "worker-0") for kind in ("safetensors", "msgpack")}
    assert {path.name for path in folder.iterdir()} == names | {META}
    assert checkpoint.step == 4


@pytest.mark.filterwarnings("error")
def test_a_part_that_cannot_be_begun_leaves_no_open_file(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 4, RunShape("allreduce", 1, 1, 0))
    with pytest.raises(TypeError):
        writer.part("model", LISTED, {"step": object()})


def test_parts_of_a_group_that_divides_its_model_count_all_or_none(tmp_path: Path) -> None:
    shape = RunShape("averaging", 2, 2, 0)
    incoming = IncomingCheckpoint(tmp_path, 4, shape, 0.0, whole_groups=True)
    tensor = TensorPayload.of(torch.zeros(3))

    def send(rank: int, name: str) -> None:
        incoming.take(f"worker/{rank}", name, pack_manifest({"weights": tensor}, {"step": 4, MEMBERS: [0, 1, 2, 3]}))
        incoming.take(f"worker/{rank}", name, tensor)

    def there(rank: int) -> bool:
        return rank < 2

    for rank, names in enumerate((("model", "group-0", "worker-0"), ("worker-1",), ("worker-2",))):
        for name in names:
            send(rank, name)
    assert incoming.missing((), lambda rank: True) == ["group-1", "worker-3"]
    assert incoming.missing((), there) == []
    checkpoint = Checkpoint(incoming.commit({}, there))
    assert [checkpoint.stands_in(f"worker-{rank}") for rank in range(4)] == [None, None, 0, 1], (
        "each has the state of its own place"
    )
    assert checkpoint.stands_in("group-1") == 0
