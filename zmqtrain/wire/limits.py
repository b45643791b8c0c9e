"""What a message may be at most. Everything is checked against these before memory is taken for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one message. Both sides of a link must agree on them, so they are constants of a release, not settings."""

    header_bytes: int = 64 * 1024
    """A header is a few dozen bytes and a small ``meta``; what is larger belongs into a tensor or a value's body."""

    inline_value_bytes: int = 4 * 1024
    """A value up to this size rides in the header; a larger one travels as a body, chunked and under credit like a tensor."""

    value_bytes: int = 64 * 1024 * 1024
    """A value is unpacked on the event loop, object by object: more than this would stop it for seconds."""

    items: int = 4096
    """Members of one list or map in a header. msgpack makes a list at its declared length, and lists nest up to 1024 deep."""

    value_items: int = 65536
    """The same in a value's body, which only peers send that have shown the run's token."""

    depth: int = 16
    """Nesting of a ``meta``: code that walks it recursively must not meet a tower of lists."""

    tag_items: int = 16
    """Members of a tag; the longest in use has half as many."""

    tag_characters: int = 256
    """Length of each string in a tag, and of ``kind``: names of topics, not content."""

    dimensions: int = 32
    """Dimensions of a shape; numpy knows at most 64, and no layer comes near."""

    message_bytes: int = 16 * 1024**3
    """Elements of one message. Above any bucket or shard in use, and below what could overflow an offset."""

    frames: int = 64
    """Frames that make one message, the header among them: enough for any way of cutting a body, few enough to hold."""


DEFAULT_LIMITS = Limits()
