"""The errors of a topology file: taken from pydantic's errors and worded for users, each with its path, line and value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from zmqtrain.errors import TopologyError
from zmqtrain.topology.broken_rule import BrokenRule, Path
from zmqtrain.topology.schema import RULES_ERROR, Topology
from zmqtrain.topology.suggest import did_you_mean
from zmqtrain.topology.toml_lines import line_of
from zmqtrain.topology.toml_writer import write_value

_QUOTED = re.compile(r"'([^']*)'")
_LONGEST_VALUE = 60

NOT_TEXT = "must be a string in quotes"
_TYPES = {
    "string_type": NOT_TEXT,
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "dict_type": "must be a table, like [name] or { key = value }",
    "model_type": "must be a table, like [name] or { key = value }",
    "tuple_type": "must be an array, like [1, 2]",
    "missing": "is missing",
}


@dataclass(frozen=True, slots=True)
class FileFault:
    """One error in a topology file."""

    file: str
    path: str
    """Dotted, like ``hosts[1].slots``; empty for the file itself."""
    line: int | None
    message: str
    value: str | None = None
    """The wrong value as it is written in the file, shortened."""
    suggestion: str | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        value = f" = {self.value}" if self.value is not None else ""
        path = f"{self.path}{value}: " if self.path else ""
        hint = f'; did you mean "{self.suggestion}"?' if self.suggestion else ""
        return f"{place}: {path}{self.message}{hint}"

    def to_dict(self) -> dict[str, Any]:
        """The fault as a dictionary of plain values, for ``--json``."""
        return asdict(self)


class TopologyFaultsError(TopologyError):
    """All errors of a topology file; ``faults`` holds them as data."""

    def __init__(self, faults: Iterable[FileFault]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        head = "the topology file has an error:" if count == 1 else f"the topology file has {count} errors:"
        super().__init__("\n".join([head, *(f"  {fault}" for fault in self.faults)]))


def dotted(path: Path) -> str:
    """``("hosts", 1, "slots")`` as ``hosts[1].slots``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def show(value: object) -> str:
    """A value as it would be written in the file, shortened."""
    try:
        text = write_value(value)
    except (TypeError, ValueError):  # no TOML value (not read from a file), or an integer of thousands of digits
        text = f"(a very long {type(value).__name__})"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def clean_path(location: tuple[int | str, ...], document: Mapping[str, Any]) -> Path:
    """pydantic's location without the steps that it adds for unions: all steps but the last exist in the document."""
    node: Any = document
    path: Path = ()
    for number, part in enumerate(location):
        if _has(node, part):
            node = node[part]
        elif number < len(location) - 1 or not isinstance(node, Mapping) or isinstance(part, int):
            continue
        path = (*path, part)
    return path


def _has(node: Any, part: int | str) -> bool:
    if isinstance(node, Mapping):
        return part in node
    return isinstance(node, list) and isinstance(part, int) and part < len(node)


def faults_of(
    error: ValidationError, document: Mapping[str, Any], file: str, lines: Mapping[Path, int]
) -> list[tuple[FileFault, BrokenRule | None]]:
    """All faults in a pydantic error, each with the broken rule that it comes from, if any."""
    found: list[tuple[FileFault, BrokenRule | None]] = []
    for detail in error.errors(include_url=False):
        if detail["type"] == RULES_ERROR:
            for rule in detail["ctx"]["rules"]:
                value = _value_at(document, rule.path)
                found.append(
                    (FileFault(file, dotted(rule.path), line_of(lines, rule.path), rule.message, value, rule.suggestion), rule)
                )
            continue
        path = clean_path(detail["loc"], document)
        message, suggestion = _worded(detail, path)
        value = None if detail["type"] in ("missing", "extra_forbidden") else show(detail["input"])
        found.append((FileFault(file, dotted(path), line_of(lines, path), message, value, suggestion), None))
    return found


def _value_at(document: Any, path: Path) -> str | None:
    for part in path:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return None
    return show(document)


def _worded(detail: ErrorDetails, path: Path) -> tuple[str, str | None]:
    """The message for one of pydantic's errors, and the word that the user may have meant."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        known = fields_at(path[:-1])
        near = did_you_mean(str(path[-1]), known)
        return "unknown key" if near else f"unknown key (known: {', '.join(known)})", near
    if kind in ("literal_error", "enum"):
        allowed = _QUOTED.findall(str(context.get("expected", "")))
        return f"must be one of {', '.join(allowed)}", did_you_mean(str(detail["input"]), allowed)
    if kind == "value_error":
        return str(context.get("error", detail["msg"])), None
    if kind in _TYPES:
        return _TYPES[kind], None
    if kind == "string_pattern_mismatch":
        allowed_in = "be a name made of letters, digits, '.', '_' and '-'" if path[-1:] == ("name",) else "not contain spaces"
        return f"must {allowed_in}", None
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return message, None


def fields_at(path: Path) -> list[str]:
    """The keys that the schema knows in the table at ``path``."""
    model: type[BaseModel] = Topology
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = None if field is None else _model_in(field.annotation)
        if inner is None:
            return []
        model = inner
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        model = _model_in(argument)
        if model is not None:
            return model
    return None
