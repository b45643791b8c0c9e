"""Writes docs/topology.md from the schema: ``make docs``. A test compares the two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from zmqtrain.topology.schema import Topology

HEAD = """\
# The topology file

The topology file is written in TOML. Every key except a host's `name` has a default; a file with nothing but `[job] task`
trains on this machine. `zmqtrain check FILE` lists all faults at once, each with its line, and shows what would run where;
`zmqtrain schema` prints the JSON Schema. Sizes, times and bandwidths are written with a unit (`"4 MiB"`, `"200 us"`,
`"1 Gbit/s"`). Wherever a host is named, a range may stand for several: `"node[01-16]"` is `node01` to `node16`.
`zmqtrain launch FILE --set section.key=value` replaces a value for one run. Examples are in [launch/](../launch/), and
the words are explained in the [glossary](glossary.md).

A value that would change nothing in the training that the file describes, such as `split_size` without model servers, is
refused. Settings of another `[engine]` than the run's, and of commands other than the one that you use, are not: a launch warns of
`[[faults]]`, `noise` and keys of other engines.
"""


def document() -> str:
    """The whole text."""
    return "\n".join([HEAD, *(text for name, field in Topology.model_fields.items() for text in tables(name, field, "##"))])


def tables(name: str, field: FieldInfo, level: str) -> Iterator[str]:
    """One table of the file, and those inside it."""
    section, many = section_of(field.annotation)
    if section is None:
        return
    yield table(f"{level} `{f'[[{name}]]' if many else f'[{name}]'}`", field.description or "", section)
    for key, inner in section.model_fields.items():
        yield from tables(f"{name}.{key}", inner, "###")


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field holds, and whether it holds many of them. None for a value, also one that may be a table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    inner = [argument for argument in get_args(annotation) if argument not in (NoneType, Ellipsis)]
    many = get_origin(annotation) is tuple
    if len(inner) != 1 or not (many or get_origin(annotation) is UnionType):
        return None, False
    return section_of(inner[0])[0], many


def table(title: str, description: str, section: type[BaseModel]) -> str:
    """The rows of one section."""
    lines = [title, "", description, "", "| key | default | meaning |", "|---|---|---|"]
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else "" if default is None else f"`{written(section, name, default)}`"
        meaning = (field.description or "").replace("|", "\\|")
        assert meaning, f"{title} {name} has no description"
        lines.append(f"| `{field.alias or name}` | {shown} | {meaning} |")
    return "\n".join([*lines, ""])


def written(section: type[BaseModel], name: str, default: Any) -> str:
    """A default as one would write it in the file."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return str(list(default))
    if isinstance(default, dict | BaseModel):
        return "{}"
    field = section.model_fields[name]
    adapter = TypeAdapter(Annotated[field.annotation, *field.metadata, name])  # the name means nothing; some have no metadata
    value = adapter.dump_python(default, mode="json")
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    (Path(__file__).parent / "topology.md").write_text(document())
