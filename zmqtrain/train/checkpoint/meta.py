"""A checkpoint's ``checkpoint.msgpack``, checked: it may be damaged, of another release, or tampered with. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

FORMAT = 1
#: The part with the model's state_dict.
MODEL = "model"
KINDS = ("allreduce", "model_server", "gossip", "averaging")
#: No such file that we write is longer than this many bytes.
LARGEST_META = 64 << 20
#: The values beside the tensors are lists and tables nested at most this deep.
DEEPEST = 32
_LARGEST_STEP = 2**53
_LARGEST_COUNT = 1 << 20
_FILE = re.compile(r"[a-z0-9][a-z0-9-]{0,63}\.(safetensors|msgpack)")


class AnotherFormatError(ValueError):
    """The checkpoint was written by a release with another format."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """The settings that must be equal for a checkpoint to fit a run."""

    kind: str
    groups: int
    group_size: int
    servers: int
    fc_servers: int = 0
    """FC servers that keep a part: the first one keeps all layers, however many servers divide them."""

    @property
    def world_size(self) -> int:
        return self.groups * self.group_size

    def parts(self, workers: Collection[int] | None = None) -> tuple[str, ...]:
        """The names of the parts of a complete checkpoint. ``workers``: the ranks present in an elastic run; ``None`` for all.

        ``model`` is rank 0's state_dict. ``group-G`` is what the workers of a group share (the optimizer's state, and the
        parameters if groups differ). Servers have the parameters and optimizer state of their pieces, FC servers those of their
        layers, and workers the rest (random states, buffers).
        """
        groups = {"allreduce": 1, "averaging": self.groups, "gossip": self.groups}.get(self.kind, 0)
        ranks = range(self.world_size) if workers is None else sorted(workers)
        apart = workers is not None and self.kind != "allreduce"
        there = sorted({rank // self.group_size for rank in ranks} & set(range(groups))) if apart else range(groups)
        return (
            MODEL,
            *(f"group-{group}" for group in there),
            *(f"worker-{rank}" for rank in ranks),
            *(f"server-{index}" for index in range(self.servers)),
            *(f"fc-{index}" for index in range(self.fc_servers)),
        )


@dataclass(frozen=True, slots=True)
class Meta:
    """The content of ``checkpoint.msgpack``."""

    step: int
    shape: RunShape
    files: Mapping[str, tuple[int, int]]
    """Size and CRC of each file."""
    workers: frozenset[int] | None = None
    """The ranks that were present, if an elastic run had lost some, or others had come; ``None``: those with which it began."""

    def packed(self) -> bytes:
        values: dict[str, Any] = {"format": FORMAT, "step": self.step, "shape": asdict(self.shape)}
        values["files"] = {name: list(size_and_crc) for name, size_and_crc in self.files.items()}
        if self.workers is not None:
            values["workers"] = sorted(self.workers)
        return bytes(msgpack.packb(values))

    @classmethod
    def parse(cls, data: bytes) -> Meta:
        """Raises `ValueError` that says what is wrong: `AnotherFormatError` if only the release differs."""
        values = unpack(data)
        version = values.get("format")
        if not isinstance(version, int) or isinstance(version, bool):
            raise ValueError(f"format is {version!r:.60}")
        if version != FORMAT:
            raise AnotherFormatError(str(version))
        step = _number(values, "step", _LARGEST_STEP)
        shape = _shape(_table(values, "shape"))
        files = {_file(name): _size_and_crc(name, entry) for name, entry in _table(values, "files").items()}
        return cls(step, shape, files, _workers(values.get("workers")))


def unpack(data: bytes) -> dict[str, Any]:
    """The table of plain values that ``data`` holds. Raises `ValueError` for anything else."""
    try:
        values = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"it is not msgpack ({type(error).__name__}: {error!s:.100})") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"it is not a table, but {values!r:.60}")
    _require_plain(values, DEEPEST)
    return values


def _require_plain(value: object, depth: int) -> None:
    if depth < 0:
        raise ValueError("its values are nested too deeply")
    if isinstance(value, dict):
        for key, each in value.items():
            _require_plain(key, 0)
            _require_plain(each, depth - 1)
    elif isinstance(value, list):
        for each in value:
            _require_plain(each, depth - 1)
    elif not (value is None or isinstance(value, bool | int | float | str | bytes)):
        raise ValueError(f"it contains {value!r:.60}")


def _number(values: Mapping[str, Any], name: str, most: int, least: int = 0) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def _table(values: Mapping[str, Any], name: str) -> dict[Any, Any]:
    value = values.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.60}")
    return value


def _shape(values: Mapping[str, Any]) -> RunShape:
    known = {field.name for field in fields(RunShape)}
    if not known >= values.keys() or values.get("kind") not in KINDS:
        raise ValueError(f"shape is {values!r:.100}")
    counts = {name: _number(values, name, _LARGEST_COUNT) for name in values if name != "kind"}
    if min(counts.get("groups", 0), counts.get("group_size", 0)) < 1 or "servers" not in counts:
        raise ValueError(f"shape is {values!r:.100}")
    return RunShape(values["kind"], **counts)


def _file(name: object) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{name!r:.60} is not a valid file name")
    return name


def _size_and_crc(name: str, entry: object) -> tuple[int, int]:
    match entry:
        case [int(size), int(crc)] if 0 <= size < 2**63 and 0 <= crc < 2**32 and not isinstance(size, bool):
            return size, crc
    raise ValueError(f"{name} has {entry!r:.60} for its size and CRC")


def _workers(value: object) -> frozenset[int] | None:
    if value is None:
        return None
    match value:
        case list() if value and all(
            isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < _LARGEST_COUNT for rank in value
        ):
            return frozenset(value)
    raise ValueError(f"workers is {value!r:.60}")
