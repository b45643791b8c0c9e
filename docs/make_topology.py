"""Writes docs/topology.md from the schema: ``make docs``. A test compares the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from zmqtrain.topology.hosts import Host
from zmqtrain.topology.schema import Topology

HEAD = """\
# The topology file

TOML. Every key has a default, but for `name` of a host; a file with `[job] task` alone trains on this machine.
`zmqtrain check FILE` shows all faults at once, each with its line, and what would run where; `zmqtrain schema` prints the
JSON Schema. Sizes, times and bandwidths are written with a unit (`"4 MiB"`, `"200 us"`, `"1 Gbit/s"`).
`zmqtrain launch FILE --set section.key=value` replaces a value for one run. Examples are in [launch/](../launch/).
"""


def document() -> str:
    """The whole text."""
    parts = [HEAD]
    for name, field in Topology.model_fields.items():
        if name == "hosts":
            parts.append(table("[[hosts]]", field.description or "", Host))
        else:
            assert isinstance(field.annotation, type)
            parts.append(table(f"[{name}]", field.description or "", field.annotation))
    return "\n".join(parts)


def table(title: str, description: str, section: type[BaseModel]) -> str:
    """One section of the file."""
    lines = [f"## `{title}`", "", description, "", "| key | default | meaning |", "|---|---|---|"]
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else "" if default is None else f"`{written(section, name, default)}`"
        meaning = (field.description or "").replace("|", "\\|")
        assert meaning, f"{title} {name} has no description"
        lines.append(f"| `{name}` | {shown} | {meaning} |")
    return "\n".join([*lines, ""])


def written(section: type[BaseModel], name: str, default: Any) -> str:
    """A default as one would write it in the file."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return "[]"
    if isinstance(default, dict):
        return "{}"
    value = section.model_construct(**{name: default}).model_dump(mode="json", include={name}, warnings=False)[name]
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    (Path(__file__).parent / "topology.md").write_text(document())
