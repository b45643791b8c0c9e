"""What all sections of the topology file share: strict, frozen, no unknown keys; and the field types for quantities with units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, PlainSerializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from zmqtrain.topology import units

#: More steps, epochs and the like than any run needs, and few enough for every format that carries them.
MOST = 2**48


class Section(BaseModel):
    """One table of the topology file."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=False, allow_inf_nan=False
    )


@dataclass(frozen=True, slots=True)
class Written:
    """How a quantity looks in the JSON Schema. (pydantic's own ``WithJsonSchema`` is not hashable, so it cannot be in a union.)"""

    examples: tuple[str, ...]

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, {"type": "number"}], "examples": list(self.examples)}


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def is_plain(value: Any) -> bool:
    """Whether a value consists of strings, numbers, booleans, arrays and tables only."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, float | bool):
        return math.isfinite(value)
    return isinstance(value, str | bool) or (isinstance(value, int) and -(2**63) <= value < 2**63)


#: A tuple, which is written as an array.
Texts = Annotated[tuple[str, ...], BeforeValidator(_tuple)]

#: A time that a user waits: from a tenth of a second to a day.
Timeout = Annotated[
    float, BeforeValidator(units.duration(0.1, 86_400)), PlainSerializer(units.format_duration), Written(("60 s", "2 min"))
]
#: How long something may be away: from zero to a day.
Alone = Annotated[
    float, BeforeValidator(units.duration(0, 86_400)), PlainSerializer(units.format_duration), Written(("10 min", "60 s"))
]
#: A network delay: from zero to ten seconds.
Latency = Annotated[
    float, BeforeValidator(units.duration(0, 10)), PlainSerializer(units.format_duration), Written(("200 us", "1 ms"))
]
#: A network bandwidth in bits per second.
Bandwidth = Annotated[
    float, BeforeValidator(units.rate(1e3, 1e13)), PlainSerializer(units.format_rate), Written(("1 Gbit/s", "100 Mbit/s"))
]
#: A number of bytes of a tensor that travel together.
ByteSize = Annotated[int, BeforeValidator(units.size(64, 2**32)), PlainSerializer(units.format_size), Written(("4 MiB", "512 KiB"))]


def _every(value: object) -> object:
    """A number of steps unchanged, or a time after a check."""
    if isinstance(value, str):
        _PERIOD(value)
        return " ".join(value.split())
    if isinstance(value, float | bool):
        raise ValueError('must be a whole number of steps, like 500, or a time, like "10 min"')
    return value


_PERIOD = units.duration(0.1, 7 * 86_400)


@dataclass(frozen=True, slots=True)
class WrittenEvery:
    """How steps or a time look in the JSON Schema."""

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0, "maximum": MOST}], "examples": ["10 min", 500]}


#: How often something happens: a number of steps (0: never), or a time.
Every = Annotated[int | str, BeforeValidator(_every), WrittenEvery()]


def seconds_of(every: int | str) -> float | None:
    """The time of an `Every` in seconds; ``None`` if it is a number of steps."""
    return _PERIOD(every) if isinstance(every, str) else None


def not_yet(what: str, instead: str) -> PydanticCustomError:
    """The error for a value that a later release will support."""
    return PydanticCustomError("not_in_this_release", f"{what} is not supported in this release: {instead}")


def later(choices: dict[str, str]) -> BeforeValidator:
    """A validator that refuses the keys of ``choices`` and says what to use instead, rather than calling them unknown."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value in choices:
            raise not_yet(repr(value), choices[value])
        return value

    return BeforeValidator(check)
