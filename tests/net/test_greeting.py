"""What two peers say first: all of it, or nothing."""

from __future__ import annotations

import msgpack
import pytest

from zmqtrain.errors import WireError
from zmqtrain.net.greeting import Hello, Refusal, decode_greeting, encode_greeting

HELLO = Hello("worker/0", "coordinator", "tcp://10.0.0.1:5000", "token", 5, 6, 7, True, 1 << 20, 1 << 24, 3, 4, 5)
REFUSAL = Refusal("coordinator", "worker/0", 6, "epoch", "epoch 4 is over")


@pytest.mark.parametrize("greeting", [HELLO, REFUSAL])
def test_a_flipped_bit_does_not_make_another_greeting(greeting: Hello | Refusal) -> None:
    """Else a process could believe in an epoch, and a launcher, that there is not."""
    header, body = encode_greeting(greeting)
    assert decode_greeting([header, body]) == greeting
    for bit in range(8 * len(body)):
        damaged = bytearray(body)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert decode_greeting([header, bytes(damaged)]) == greeting, bit  # the name of the checksum, which is unknown then
        except WireError:
            continue


def test_a_release_that_sends_no_checksum_is_understood() -> None:
    header, body = encode_greeting(HELLO)
    values = msgpack.unpackb(body)
    del values["check"]
    assert decode_greeting([header, msgpack.packb(values)]) == HELLO
