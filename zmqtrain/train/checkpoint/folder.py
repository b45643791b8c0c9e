"""Checkpoints on disk: one folder per step, which exists completely or not at all.

::

    checkpoints/step-00000100/
        checkpoint.msgpack        format version, step, shape of the run, and size and CRC of every file
        model.safetensors         the model's ordinary state_dict, which any program can read
        NAME.safetensors, NAME.msgpack    tensors and plain values of each part: worker-0, server-1, ...

A folder is written under a temporary name and renamed once it is complete. No pickle, and torch is not needed.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from zmqtrain.durable import sync_folder
from zmqtrain.errors import CheckpointError, WireError
from zmqtrain.exchange.checkpoint_part import COURSE
from zmqtrain.train.checkpoint.meta import FORMAT, LARGEST_META, MODEL, AnotherFormatError, Meta, RunShape, unpack
from zmqtrain.wire.dtypes import DTYPES, dtype_named
from zmqtrain.wire.tensor import TensorPayload

__all__ = [
    "META",
    "MODEL",
    "Checkpoint",
    "CheckpointWriter",
    "PartWriter",
    "RunShape",
    "find_checkpoints",
    "find_latest",
    "prune",
    "read_safetensors",
    "step_of",
]

META = "checkpoint.msgpack"
_NAME = re.compile(r"step-(\d{8,})")
_PART = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
_WIRE = {theirs: ours for ours, theirs in _SAFETENSORS.items() if ours in DTYPES}
#: None of our headers comes near this size; a larger one belongs to a torn or foreign file.
_LARGEST_HEADER = 100 << 20
Listed = Sequence[tuple[str, str, tuple[int, ...]]]


class PartWriter:
    """Writes one part, tensor by tensor, in the listed order."""

    def __init__(self, folder: Path, name: str, listed: Listed, sidecar: Mapping[str, Any]) -> None:
        if not _PART.fullmatch(name):
            raise CheckpointError(f"{name!r} is not a valid name for a part of a checkpoint")
        self._folder, self._name, self._left = folder, name, list(listed)
        header = _header(listed)
        self._tensors = _File(folder / f"{name}.safetensors")
        try:
            self._tensors.write(header)
            self._files = {f"{name}.msgpack": _write(folder / f"{name}.msgpack", msgpack.packb(dict(sidecar)))}
        except BaseException:
            self._tensors.abandon()
            raise

    @property
    def complete(self) -> bool:
        return not self._left

    def write(self, frames: Iterable[memoryview], dtype: str, numel: int) -> None:
        """Write the next listed tensor: its bytes, dtype and number of elements. Raises `CheckpointError` unless it is as
        listed."""
        if not self._left:
            raise CheckpointError(f"more tensors of checkpoint part {self._name} arrived than it listed")
        name, expected, shape = self._left.pop(0)
        if (dtype, numel) != (expected, _numel(shape)):
            raise CheckpointError(
                f"checkpoint part {self._name} listed {name} as {expected} {list(shape)}, but {numel} elements of {dtype} arrived"
            )
        for frame in frames:
            self._tensors.write(frame)

    def close(self) -> dict[str, tuple[int, int]]:
        """Flush everything to disk. Returns size and CRC of each file."""
        assert self.complete
        return {**self._files, f"{self._name}.safetensors": self._tensors.close()}

    def leave(self) -> None:
        """Abandon the part that is being written; its files stay, for another process that begins it anew."""
        self._tensors.abandon()

    def discard(self) -> None:
        """Abandon the part that is being written, and remove its files."""
        self._tensors.abandon()
        for kind in ("safetensors", "msgpack"):
            (self._folder / f"{self._name}.{kind}").unlink(missing_ok=True)


class CheckpointWriter:
    """One checkpoint while it is being written."""

    def __init__(self, checkpoints: Path, step: int, shape: RunShape, files: Mapping[str, tuple[int, int]] | None = None) -> None:
        """``files``: those that another process has left on disk for this checkpoint, which goes on; ``None``: it begins."""
        self._final = checkpoints / f"step-{step:08d}"
        self._partial = checkpoints / f".step-{step:08d}.partial"
        self._step, self._shape = step, shape
        self._files: dict[str, tuple[int, int]] = dict(files or {})
        if files is None:
            shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True, exist_ok=True)

    def part(self, name: str, listed: Listed, sidecar: Mapping[str, Any]) -> PartWriter:
        return PartWriter(self._partial, name, listed, sidecar)

    def add(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Record the files of a part that is on disk."""
        self._files.update(files)

    def commit(self, workers: Collection[int] | None = None) -> Path:
        """Give the folder its final name: the checkpoint exists from now on. ``workers``: the ranks whose parts it has, if not all.
        Returns the folder."""
        there = None if workers is None or set(workers) == set(range(self._shape.world_size)) else frozenset(workers)
        _write(self._partial / META, Meta(self._step, self._shape, self._files, there).packed())
        sync_folder(self._partial)
        before = self._partial.with_suffix(".old")
        if self._final.exists():  # the run was resumed from an earlier step and has reached this one again
            shutil.rmtree(before, ignore_errors=True)
            self._final.rename(before)
        self._partial.rename(self._final)
        shutil.rmtree(before, ignore_errors=True)
        sync_folder(self._final.parent)
        return self._final

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)


class Checkpoint:
    """A complete checkpoint on disk, checked."""

    def __init__(self, folder: Path) -> None:
        """Raises `CheckpointError` if it is missing, damaged, or in the format of another release."""
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(f"there is no checkpoint {folder}; --resume takes the folder of a checkpoint or a run, or latest")
        try:
            meta = Meta.parse(_content(folder / META, LARGEST_META))
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {META}") from None
        except AnotherFormatError as error:
            raise CheckpointError(
                f"{folder} has format {error}, but this zmqtrain reads {FORMAT}: use the release that wrote it"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / META} cannot be read: {error}; use an earlier checkpoint") from error
        self.step, self.shape, self._files, self._workers = meta.step, meta.shape, meta.files, meta.workers
        for name, (size, crc) in self._files.items():
            self._check(folder / name, size, crc)

    def require(self, shape: RunShape) -> None:
        """Raise `CheckpointError` unless the checkpoint was written by a run of this shape."""
        for name, mine in asdict(self.shape).items():
            if name == "groups" and self._says_course():
                continue
            if name == "group_size" and not shape.fc_servers and self._workers is None:
                continue  # models may be divided in another way
            if name == "servers" and self.shape.servers and shape.servers:
                continue  # and among more or fewer servers
            if mine != (now := getattr(shape, name)):
                was, has = (str(bool(each)).lower() if name == "fc_servers" else repr(each) for each in (mine, now))
                raise CheckpointError(
                    f"{self.folder} was written with {_SETTINGS[name]} = {was}, but this run has {has}: "
                    f"restore the old value, or {WITHOUT_RESUME}"
                )
        if shape.kind == "model_server" and self._incomplete_groups():
            raise CheckpointError(
                f"{self.folder} lacks the parts of lost workers, and with model servers groups of which some were there cannot "
                "continue from that: use an earlier checkpoint"
            )
        for part in self.shape.parts(self._workers):
            self._require_part(part)

    def _incomplete_groups(self) -> bool:
        """Whether some workers of a group were lost, and not all."""
        there = Counter(rank // self.shape.group_size for rank in self._workers or ())
        return any(number != self.shape.group_size for number in there.values())

    def _says_course(self) -> bool:
        """Whether other groups can know where these have stopped: earlier releases did not say it."""
        ranks = range(self.shape.world_size) if self._workers is None else sorted(self._workers)
        return COURSE in self.part(f"worker-{ranks[0]}")[1]

    def counterpart(self, part: str, group_size: int) -> str:
        """The part with which a role of a run with groups of ``group_size`` workers begins: a worker's is that of its place in its
        group or, if it had no such place, of its group's first worker. Further groups begin as the first ones do."""
        kind, _, number = part.partition("-")
        was = self.shape
        if kind == "group":
            return f"group-{int(number) % was.groups}"
        if kind != "worker":
            return part
        group, position = divmod(int(number), group_size)
        return f"worker-{group % was.groups * was.group_size + (position if position < was.group_size else 0)}"

    def stands_in(self, part: str) -> int | None:
        """The rank of the worker whose part replaces ``part``, if its own worker was lost; ``None`` if the part exists."""
        kind, _, text = part.partition("-")
        if self._workers is None or kind not in ("worker", "group"):
            return None
        if kind == "group" and self.shape.kind == "allreduce":  # of all, kept by the first that was there
            return None
        size = self.shape.group_size
        group = int(text) // size if kind == "worker" else int(text)
        own = [rank for rank in self._workers if rank // size == group]
        if kind == "group" and own:  # kept by the first of it that was there
            return None
        rank = int(text) if kind == "worker" else group * size
        if rank in self._workers:
            return None
        apart = self.shape.kind in ("averaging", "gossip")  # each group has a model of its own
        there = own if apart and own else self._workers
        if not own and self.shape.kind != "allreduce":  # of a model that groups divide, others have the same parts
            there = [other for other in there if other % size == rank % size] or there
        return max((other for other in there if other < rank), default=max(there))

    def part(self, name: str) -> tuple[dict[str, TensorPayload], dict[str, Any]]:
        """The tensors of a part, which alias the mapped file, and its plain values."""
        self._require_part(name)
        path = self.folder / f"{name}.msgpack"
        try:
            sidecar = unpack(_content(path, self._files[path.name][0]))
            if sidecar.get("step", self.step) != self.step:
                raise ValueError(f"it belongs to step {sidecar['step']!r:.60}, but the checkpoint to step {self.step}")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; use an earlier checkpoint") from error
        return read_safetensors(self.folder / f"{name}.safetensors"), sidecar

    def _require_part(self, name: str) -> None:
        if not {f"{name}.safetensors", f"{name}.msgpack"} <= self._files.keys():
            raise CheckpointError(f"{self.folder} has no part {name}: use an earlier checkpoint")

    @staticmethod
    def _check(path: Path, size: int, crc: int) -> None:
        try:
            _require_file(path)
            with path.open("rb") as file:
                found, now = 0, 0
                while block := file.read(4 << 20):
                    found, now = found + len(block), zlib.crc32(block, now)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; use an earlier checkpoint") from error
        if (found, now) != (size, crc):
            what = f"it has {found:,} bytes instead of {size:,}" if found != size else "its CRC is wrong"
            raise CheckpointError(f"{path} is damaged: {what}; use an earlier checkpoint")


#: What to do with a checkpoint of a run that was trained in another way.
WITHOUT_RESUME = "begin with its model alone ([job] weights names its folder, without --resume)"

_SETTINGS = {
    "kind": "[exchange] kind",
    "groups": "[compute] groups",
    "group_size": "[compute] group_size",
    "servers": "[exchange] shards",
    "fc_servers": "[exchange] merged_fc",
}


def read_safetensors(path: Path) -> dict[str, TensorPayload]:
    """The tensors of a safetensors file, by name, memory-mapped. Raises `CheckpointError` for any other file."""
    try:
        _require_file(path)
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        if bytes(mapped[:4]) == b"PK\x03\x04":
            raise CheckpointError(
                f"{path} is a file of torch.save, which is not loaded, as it may run code. Write one of its tensors with "
                "safetensors.torch.save_file(torch.load(...), ...)"
            )
        length = int.from_bytes(mapped[:8], "little")
        if length > min(_LARGEST_HEADER, len(mapped) - 8):
            raise ValueError(f"its header claims to have {length:,} bytes")
        header = json.loads(bytes(mapped[8 : 8 + length]), object_pairs_hook=_once)
        data = mapped[8 + length :]
        tensors, before = {}, 0
        # The format demands that tensors follow one another without gap or overlap.
        entries = [(name, _entry(name, entry)) for name, entry in header.items() if name != "__metadata__"]
        for name, (start, stop, dtype, shape) in sorted(entries, key=lambda each: each[1][:2]):
            if start != before or stop > len(data):
                raise ValueError(f"{name} lies beyond its end" if stop > len(data) else f"{name} is not where it must be")
            before = stop
            tensors[name] = TensorPayload.received(data[start:stop], dtype, shape)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, WireError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {type(error).__name__}: {error!s:.200}") from error
    return {name: tensors[name] for name, _ in entries}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[int, int, str, tuple[int, ...]]:
    """Start, stop, dtype and shape of a tensor. Raises `ValueError`, `KeyError` and `TypeError`."""
    (start, stop), dtype, shape = entry["data_offsets"], _WIRE[entry["dtype"]], tuple(entry["shape"])
    numbers = (start, stop, *shape)
    if not all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"{name} has shape {shape!r:.60} and offsets {entry['data_offsets']!r:.60}")
    if _numel([max(1, size) for size in shape]) >= 2**63 or stop - start != _numel(shape) * dtype_named(dtype).itemsize:
        raise ValueError(f"{name}, {dtype} of shape {shape!r:.60}, has {stop - start} bytes")
    return start, stop, dtype, shape


def _content(path: Path, most: int) -> bytes:
    """A file's content. Raises `OSError`, and `ValueError` if it is not a file or is larger than ``most`` bytes."""
    _require_file(path)
    with path.open("rb") as file:
        content = file.read(min(path.stat().st_size, most) + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def _require_file(path: Path) -> None:
    """Raise `OSError` if ``path`` exists but is not a regular file: opening a pipe would wait for ever."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is not a regular file")


def find_checkpoints(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in a folder, the latest last."""
    found = [path for path in checkpoints.glob("step-*") if _NAME.fullmatch(path.name) and (path / META).is_file()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint in a folder of checkpoints, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def find_latest(folder: Path) -> Path:
    """The latest checkpoint in a run's folder, in its ``checkpoints`` folder, or in any run below ``folder``.

    Raises `CheckpointError` if there is none.
    """
    try:
        if (folder / META).is_file():
            return folder
        for checkpoints in (folder, folder / "checkpoints"):
            if found := find_checkpoints(checkpoints):
                return found[-1]
        runs = [found[-1] for checkpoints in folder.glob("*/checkpoints") if (found := find_checkpoints(checkpoints))]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(folder)!r:.300} cannot be searched for checkpoints: {error!s:.300}") from error
    if not runs:
        if not folder.is_dir():
            raise CheckpointError(f"there is no run directory or checkpoint {folder}")
        raise CheckpointError(
            f"there is no complete checkpoint in {folder}: a run keeps none before its first step, "
            "nor between its checkpoints ([job] checkpoint_every) if it is killed"
        )
    return max(runs, key=lambda path: path.stat().st_mtime_ns)


def prune(checkpoints: Path, keep: int) -> list[Path]:
    """Remove all but the latest ``keep`` checkpoints. Returns those removed."""
    removed = find_checkpoints(checkpoints)[:-keep]
    for path in removed:
        # Rename it first, so that an interrupted removal leaves no damaged checkpoint behind.
        (path / META).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return removed


class _File:
    """A file that counts its bytes and their CRC, and is flushed to disk when closed."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._size, self._crc = 0, 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._size += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def close(self) -> tuple[int, int]:
        """Close the file. Returns its size and its CRC."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._size, self._crc

    def abandon(self) -> None:
        with suppress(OSError):  # on a full disk, closing may fail again
            self._file.close()


def _write(path: Path, data: bytes) -> tuple[int, int]:
    """Write a whole file. Returns its size and its CRC."""
    file = _File(path)
    try:
        file.write(data)
        return file.close()
    finally:
        file.abandon()


def can_hold(dtype: str) -> bool:
    """Whether tensors of the type of this name can be sent and kept."""
    return dtype in _WIRE.values()


def _header(listed: Listed) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in listed:
        if dtype not in _SAFETENSORS:
            raise CheckpointError(f"{name} has type {dtype}, which a checkpoint cannot hold")
        nbytes = _numel(shape) * dtype_named(dtype).itemsize
        entries[name] = {"dtype": _SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # so that the tensors are aligned
    return len(header).to_bytes(8, "little") + header


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel
