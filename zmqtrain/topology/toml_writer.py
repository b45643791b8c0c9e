"""Write plain values as TOML: only the types that a resolved topology consists of (strings, numbers, booleans, lists and tables of
these)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def write_toml(document: Mapping[str, Any]) -> str:
    """``document`` as TOML: a table for each mapping in it, an array of tables for each list of mappings, also within such a table;
    the rest inline."""
    plain = {key: value for key, value in document.items() if not isinstance(value, Mapping) and not _is_tables(value)}
    blocks = ["".join(_lines(plain))] if plain else []
    for key, value in document.items():
        if isinstance(value, Mapping):
            inner = {name: tables for name, tables in value.items() if _is_tables(tables)}
            blocks.append(f"[{_key(key)}]\n" + "".join(_lines({k: v for k, v in value.items() if k not in inner})))
            for name, tables in inner.items():
                blocks.extend(_tables(f"{_key(key)}.{_key(name)}", tables))
        elif _is_tables(value):
            blocks.extend(_tables(_key(key), value))
    return "\n".join(blocks)


def _tables(path: str, tables: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for table in tables:
        yield f"[[{path}]]\n" + "".join(_lines(table))


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {write_value(value)}\n" for key, value in table.items() if value is not None]


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    escaped = (_ESCAPES.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 0x20 or ord(c) == 0x7F else c) for c in text)
    return '"' + "".join(escaped) + '"'


def write_value(value: Any) -> str:
    """One value as it is written after a key. Raises ``TypeError`` for a type that TOML does not have."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)  # also inf and nan, which TOML writes like Python
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {write_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(write_value(item) for item in value) + "]"
    if hasattr(value, "isoformat"):  # TOML's own dates and times, which may stand in [job] args
        return str(value.isoformat())
    raise TypeError(f"TOML has no type for {type(value).__name__}")
