"""Which flags a piece may have."""

from __future__ import annotations

import pytest

from zmqtrain.errors import WireError
from zmqtrain.net.flags import BEYOND, CHUNK, FOLLOWS, LASTING, SHARED, check_flags
from zmqtrain.net.link import ACK, BYE, PROBE, RESUME
from zmqtrain.wire.message import PHANTOM, TENSOR, VALUE


@pytest.mark.parametrize("kind", [TENSOR, PHANTOM, VALUE, CHUNK])
@pytest.mark.parametrize("flags", [BEYOND, SHARED, SHARED | LASTING, BEYOND | SHARED | LASTING])
def test_every_piece_may_come_beyond_the_window_and_by_shared_memory(kind: str, flags: int) -> None:
    check_flags(kind, flags)


def test_only_a_phantom_is_followed_by_its_bytes() -> None:
    check_flags(PHANTOM, FOLLOWS)
    check_flags(PHANTOM, FOLLOWS | BEYOND)
    for kind in (TENSOR, VALUE, CHUNK):
        with pytest.raises(WireError, match=f"{kind}.* has the invalid flags {FOLLOWS}"):
            check_flags(kind, FOLLOWS)


@pytest.mark.parametrize("flags", [LASTING, LASTING | BEYOND, 16, 1 << 40, 16 | SHARED])
def test_flags_without_meaning_are_refused(flags: int) -> None:
    with pytest.raises(WireError, match="has the invalid flags"):
        check_flags(TENSOR, flags)


@pytest.mark.parametrize("kind", [ACK, PROBE, RESUME, BYE, "want", "unwant", "hello", "other"])
def test_what_is_no_piece_has_no_flags(kind: str) -> None:
    with pytest.raises(WireError, match="has the invalid flags"):
        check_flags(kind, BEYOND)
