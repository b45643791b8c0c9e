"""Write plain values as YAML, in its block form.

Kubernetes accepts JSON, too, but users read and change a manifest before they apply it, and in JSON the topology file within it
would be one long line. PyYAML would be one more dependency of every installation for a single command; only the tests use it, to
read what is written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Words that mean a string in every version of YAML without quotes. Others are quoted.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NOT_TEXTS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def write_yaml(*documents: Mapping[str, Any]) -> str:
    """The documents as YAML, one after another."""
    return "---\n".join("".join(f"{line.rstrip()}\n" for line in _block(document)) for document in documents)


def _block(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{_word(str(key))}:", item)
    else:
        for item in value:
            first, *rest = _block(item) if _nested(item) else [_scalar(item)]
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _entry(head: str, value: Any) -> Iterator[str]:
    if isinstance(value, str) and "\n" in value.rstrip("\n") and value.endswith("\n") and not value.endswith("\n\n"):
        yield f"{head} |"
        yield from (f"  {line}" if line else "" for line in value.splitlines())
    elif _nested(value):
        yield head
        yield from (f"  {line}" for line in _block(value))
    else:
        yield f"{head} {_scalar(value)}"


def _nested(value: Any) -> bool:
    """Whether a value takes lines of its own; empty values and lists of plain values do not."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(item, Mapping | list) for item in value)


def _scalar(value: Any) -> str:
    match value:
        case bool() | None:
            return json.dumps(value)
        case str():
            return _word(value)
        case Mapping():
            return "{}"
        case Sequence():
            return f"[{', '.join(map(_scalar, value))}]"
    return str(value)


def _word(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXTS:
        return text
    return '"' + "".join(map(_character, text)) + '"'


def _character(character: str) -> str:
    """A character as in JSON, except those that JSON writes as surrogate pairs, or leaves unescaped though they are not
    printable."""
    code = ord(character)
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\x{code:02x}" if code == 0x7F else json.dumps(character)[1:-1]
