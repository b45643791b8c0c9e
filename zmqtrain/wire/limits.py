"""Limits on messages. Everything is checked against them before memory is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one message. Both sides of a link must agree on them, so they are constants of a release, not settings."""

    header_bytes: int = 64 * 1024
    """A header is a few dozen bytes and a small ``meta``; anything larger belongs in a tensor or a value's body."""

    inline_value_bytes: int = 4 * 1024
    """A value of up to this size is part of the header; a larger one is sent as a body, chunked and under credit like a tensor."""

    value_bytes: int = 64 * 1024 * 1024
    """A value is unpacked on the event loop, object by object: a larger one would block it for seconds."""

    items: int = 4096
    """Members of one list or map in a header. msgpack allocates a list at its announced length, and lists nest up to 1024 deep."""

    value_items: int = 65536
    """The same in a value's body, which only peers can send that have shown the run's token."""

    depth: int = 16
    """Nesting depth of a ``meta``, which protects code that walks it recursively."""

    tag_items: int = 16
    """Members of a tag; the longest in use has half as many."""

    tag_characters: int = 256
    """Length of each string in a tag, and of ``kind``: these are names of topics, not content."""

    dimensions: int = 32
    """Dimensions of a shape; numpy allows at most 64, and no layer comes near that."""

    message_bytes: int = 16 * 1024**3
    """Bytes of one message: above any bucket or shard in use, and below what could overflow an offset."""

    frames: int = 64
    """Frames of one message, including the header: enough for any division of a body, few enough to store."""


DEFAULT_LIMITS = Limits()
