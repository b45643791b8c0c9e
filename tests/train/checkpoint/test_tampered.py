"""Checkpoints that say what is not so: `CheckpointError`, whatever it is, and nothing is allocated for it."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.train.checkpoint.test_folder import SHAPE, TENSORS, write
from tests.train.world import Recipe, run, topology_of
from zmqtrain.errors import CheckpointError
from zmqtrain.train.checkpoint.folder import META, Checkpoint, find_checkpoints, find_latest, read_safetensors
from zmqtrain.train.checkpoint.meta import Meta

DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    None, True, "x", b"x", "", -1, -5, 2**63, 2**64 - 1, 1.5, float("nan"), [], [1], [[]], {}, {"a": 1}, DEEP, "a\0b", "../x",
    "é" * 500,
]  # fmt: skip
#: Beyond this a small checkpoint's reading has been led to allocate something.
MOST_BYTES = 8 << 20
values = st.recursive(
    st.sampled_from(HOSTILE) | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)


def refused(action: Callable[[], object]) -> bool:
    """Whether it raises `CheckpointError`; nothing else may be, and nothing large be allocated."""
    tracemalloc.start()
    gc.disable()  # at the limit of recursion its callbacks could only be ignored, and pytest would tell of that in another test
    try:
        action()
    except CheckpointError as error:
        said = str(error)
    else:
        return False
    finally:
        gc.enable()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES
    assert len(said) < 2000
    return True


def rewritten(folder: Path, name: str, content: bytes) -> Path:
    """The checkpoint with another content of a file, and a size and CRC that agree with it."""
    (folder / name).write_bytes(content)
    meta = msgpack.unpackb((folder / META).read_bytes())
    meta["files"][name] = [len(content), zlib.crc32(content)]
    (folder / META).write_bytes(msgpack.packb(meta))
    return folder


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    checkpoint.require(SHAPE)
    for part in SHAPE.parts():
        checkpoint.part(part)


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return dict(msgpack.unpackb((write(Path(folder)) / META).read_bytes()))


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: f"{value!r:.20}".replace("\0", "0"))
@pytest.mark.parametrize(
    "where",
    [
        ("format",), ("step",), ("shape",), ("shape", "kind"), ("shape", "groups"), ("shape", "group_size"), ("shape", "servers"),
        ("shape", "more"), ("files",), ("files", "model.safetensors"), ("files", "model.msgpack"), ("workers",),
    ],
    ids="/".join,
)  # fmt: skip
def test_hostile_meta_is_refused(where: tuple[str, ...], value: Any, tmp_path: Path) -> None:
    folder = write(tmp_path)
    meta = msgpack.unpackb((folder / META).read_bytes())
    inner = meta
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    try:
        (folder / META).write_bytes(msgpack.packb(meta))
    except (ValueError, OverflowError):
        return  # nobody can have written it
    harmless = (where, value) == (("workers",), None)
    assert refused(lambda: read_all(folder)) == (not harmless)


@pytest.mark.parametrize("key", ["format", "step", "shape", "files"])
def test_missing_keys_are_refused(key: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    meta = msgpack.unpackb((folder / META).read_bytes())
    del meta[key]
    (folder / META).write_bytes(msgpack.packb(meta))
    assert refused(lambda: read_all(folder))


@pytest.mark.parametrize(
    "name",
    ["../outside.msgpack", "a/b.msgpack", "a\0b.msgpack", "/etc/passwd", "..", ".", "", "model.safetensors\n", "MODEL.msgpack"],
)
def test_files_lie_in_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    (tmp_path / "outside.msgpack").write_bytes(b"")
    meta = msgpack.unpackb((folder / META).read_bytes())
    meta["files"][name] = [0, 0]
    (folder / META).write_bytes(msgpack.packb(meta))
    assert refused(lambda: read_all(folder))


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Who opens it waits for ever."""
    for step, name in enumerate(("model.msgpack", META)):
        folder = write(tmp_path, step)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert refused(lambda folder=folder: read_all(folder))


def test_a_folder_that_cannot_be_looked_through(tmp_path: Path) -> None:
    for path in ("a\0b", "x" * 5000):
        assert refused(lambda path=path: find_latest(Path(path)))
    (tmp_path / "step-٠٠٠٠٠٠٠٠").mkdir()
    assert find_checkpoints(tmp_path) == []


@given(values)
def test_any_meta(value: Any) -> None:
    try:
        data = msgpack.packb(value)
    except (ValueError, OverflowError):
        return
    with pytest.raises(ValueError, match=r"."):
        Meta.parse(data)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Meta.parse(data)


@given(st.data())
def test_any_change_of_meta_is_refused_or_means_the_same(kept: dict[str, Any], data: st.DataObject) -> None:
    meta = {key: dict(value) if isinstance(value, dict) else value for key, value in kept.items()}
    where = data.draw(st.sampled_from(sorted(meta)))
    inner = meta[where]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        inner[data.draw(st.sampled_from(sorted(inner)) | st.text(max_size=10))] = data.draw(values)
    else:
        meta[where] = data.draw(values)
    try:
        packed = msgpack.packb(meta)
    except (ValueError, OverflowError):
        return
    try:
        parsed = Meta.parse(packed)
    except ValueError:
        return
    assert msgpack.unpackb(parsed.packed()) == msgpack.unpackb(packed)


@given(st.data())
def test_any_change_of_a_tensors_header(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name)) / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        tensor = data.draw(st.sampled_from(sorted(TENSORS)))
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "all"]))
        hostile = data.draw(
            values
            | st.lists(st.integers(-3, 40) | st.sampled_from([2**31, 2**62, 2**63, -(2**63), True, 1.0]), max_size=4)
            | st.sampled_from(["F32", "F64", "I64", "BF16", "BOOL", "U8", "F8_E4M3", "f32", "C128"])
        )
        if field == "all":
            header[tensor] = hostile
        else:
            header[tensor][field] = hostile
        try:
            packed = json.dumps(header).encode()
        except (TypeError, ValueError):
            return
        path.write_bytes(len(packed).to_bytes(8, "little") + packed + content[8 + length :])

        def read() -> None:
            for each in read_safetensors(path).values():
                assert each.nbytes == sum(frame.nbytes for frame in each.frames())
                assert each.tensor.numel() == each.numel

        refused(read)


@pytest.mark.parametrize(
    "header",
    [
        '{"a":' * 100_000,
        '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        '{"a": {"dtype": "F32", "shape": [1099511627776, 0, 1099511627776], "data_offsets": [0, 0]}}',
        '{"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [1' + "0" * 5000 + '], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}',
        "[" * 100_000,
    ],
    ids=["deep", "twice", "overlap", "gap", "huge", "negative", "digits", "no list", "three", "lists"],
)
def test_headers_that_lie(header: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))
    assert refused(lambda: read_safetensors(path))


@given(values)
def test_any_sidecar(value: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        try:
            packed = msgpack.packb(value)
        except (ValueError, OverflowError):
            return
        folder = rewritten(write(Path(name)), "worker-0.msgpack", packed)
        harmless = isinstance(value, dict) and "step" not in value
        assert refused(lambda: read_all(folder)) or harmless


def _of(kind: str) -> Any:
    exchange: dict[str, Any] = {"kind": kind}
    if kind == "model_server":
        exchange |= {"staleness": "sync", "shards": 2, "compression": "topk", "compression_ratio": 0.2}
    if kind == "averaging":
        exchange |= {"every": 2, "averaging": {"method": "outer", "deltas": "int8", "overlap_steps": 1}}
    if kind == "allreduce":
        exchange |= {"every": 3, "compression": "powersgd", "compression_rank": 1}
    return topology_of(
        job={"steps": 4, "checkpoint_every": 2, "elastic": False, "timeout": 5.0},
        compute={"groups": 2, "batch_size": 12},
        exchange=exchange,
    )


_MOMENTUM = "optimizer/momentum_buffer/0.bias"
#: Of which kind of run, which part, and what is done to its sidecar and tensors.
SPOILED: list[tuple[str, str, Callable[[dict[str, Any], dict[str, torch.Tensor]], None]]] = [
    ("allreduce", "worker-0", lambda sidecar, _: sidecar.pop("random")),
    ("allreduce", "worker-1", lambda sidecar, _: sidecar.pop("exchange")),
    ("allreduce", "worker-1", lambda sidecar, _: sidecar.update(random=[1, 2])),
    ("allreduce", "worker-1", lambda sidecar, _: sidecar["random"].update(numpy=["MT19937", 10**9, 0, 0.0])),
    ("allreduce", "worker-1", lambda sidecar, _: sidecar["random"].update(python=[3, [2**40] * 625, None])),
    ("allreduce", "worker-1", lambda sidecar, _: sidecar["random"].update(python=[3, [1], None])),
    ("allreduce", "worker-1", lambda sidecar, _: sidecar.update({"added up": "x"})),
    ("allreduce", "worker-1", lambda sidecar, _: sidecar.update({"stands in": 7})),
    ("allreduce", "worker-0", lambda _, tensors: tensors.update({"random/torch": torch.zeros(3)})),
    ("allreduce", "worker-0", lambda _, tensors: tensors.update({"gradient/0.weight": torch.zeros(3)})),
    ("allreduce", "worker-0", lambda _, tensors: tensors.update({"gradient/none": torch.zeros(3)})),
    ("allreduce", "model", lambda _, tensors: tensors.update({"0.weight": tensors["0.weight"].t().contiguous()})),
    ("allreduce", "model", lambda _, tensors: tensors.update({"0.weight": tensors["0.weight"].float()})),
    ("gossip", "group-1", lambda _, tensors: tensors.update({"optimizer": torch.zeros(3)})),
    ("gossip", "group-1", lambda _, tensors: tensors.update({"optimizer/momentum_buffer/none": torch.zeros(3)})),
    ("gossip", "group-1", lambda _, tensors: tensors.update({"optimizer/momentum_buffer/0.weight": torch.zeros(3).double()})),
    ("gossip", "group-1", lambda _, tensors: tensors.update({"optimizer/a/0.bias": tensors.pop(_MOMENTUM)})),
    ("gossip", "group-0", lambda _, tensors: tensors.pop("parameter/0.weight")),
    ("averaging", "worker-1", lambda sidecar, _: sidecar["exchange"].update({"last/0": ["float64", bytes(8)]})),
    ("averaging", "worker-1", lambda sidecar, _: sidecar["exchange"].update({"last/0": ["float99", bytes(8)]})),
    ("averaging", "worker-1", lambda sidecar, _: sidecar["exchange"].update({"last/0": 3})),
    ("averaging", "worker-1", lambda sidecar, _: sidecar["exchange"].update({"own/x": ["float64", bytes(8)]})),
    ("averaging", "worker-1", lambda sidecar, _: sidecar["exchange"].update({"lost/sent/9/0": ["float64", bytes(8)]})),
    ("averaging", "worker-1", lambda sidecar, _: sidecar["exchange"].pop("momentum/0")),
    ("averaging", "worker-1", lambda sidecar, _: sidecar.update(exchange=[])),
    ("model_server", "server-0", lambda sidecar, _: sidecar.pop("versions")),
    ("model_server", "server-0", lambda sidecar, _: sidecar.update(versions={"0": "x"})),
    ("model_server", "server-1", lambda sidecar, _: sidecar.update(versions={"0": -5})),
    ("model_server", "server-0", lambda _, tensors: tensors.update({"x.values": torch.zeros(3)})),
    ("model_server", "server-0", lambda _, tensors: tensors.update({"0.values": torch.zeros(3)})),
    ("model_server", "server-0", lambda _, tensors: tensors.update({"0.optimizer.momentum_buffer": torch.zeros(3)})),
    ("model_server", "worker-1", lambda sidecar, _: sidecar["exchange"].update(residuals={"0": ["float64", bytes(16)]})),
    ("model_server", "worker-1", lambda sidecar, _: sidecar["exchange"].update(residuals={"99": ["float64", bytes(16)]})),
    ("model_server", "worker-1", lambda sidecar, _: sidecar["exchange"].update(residuals={"0": [1, 2]})),
]  # fmt: skip


_MADE: dict[str, Path] = {}


async def _checkpoint_of(kind: str, folders: pytest.TempPathFactory) -> Path:
    """One of step 2, of each kind of run."""
    if kind not in _MADE:
        folder = folders.mktemp(kind)
        assert not (await run(_of(kind), Recipe(), folder=folder)).errors
        _MADE[kind] = folder / "step-00000002"
    return _MADE[kind]


@pytest.mark.parametrize(("kind", "part", "spoil"), SPOILED)
async def test_parts_that_lie_end_the_run_with_a_checkpoint_error(
    kind: str,
    part: str,
    spoil: Callable[[dict[str, Any], dict[str, torch.Tensor]], None],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    import shutil

    from safetensors.torch import load_file, save

    folder = tmp_path / "step-00000002"
    shutil.copytree(await _checkpoint_of(kind, tmp_path_factory), folder)
    sidecar = msgpack.unpackb((folder / f"{part}.msgpack").read_bytes())
    tensors = load_file(folder / f"{part}.safetensors")
    spoil(sidecar, tensors)
    rewritten(folder, f"{part}.msgpack", msgpack.packb(sidecar))
    rewritten(folder, f"{part}.safetensors", save(tensors))
    result = await run(_of(kind), Recipe(), folder=tmp_path / "again", resume=folder)
    causes = [error for error in result.errors.values() if not getattr(error, "consequence", False)]
    assert causes
    assert all(isinstance(error, CheckpointError) for error in causes), causes
    assert {error.exit_code for error in causes} == {66}  # type: ignore[attr-defined]
