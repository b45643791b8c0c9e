"""What encryption itself takes: libsodium, as ZeroMQ's CURVE calls it, from pyzmq's own package."""

from __future__ import annotations

import ctypes
import statistics
import time
from pathlib import Path

import zmq

#: Of a frame; the sender's chunks have this size where connections are encrypted.
NBYTES = 1024 * 1024
ROUNDS, CALLS = 9, 16
#: Of libsodium: a key, a nonce, the zeros before what is encrypted, and those before what is decrypted.
KEY_BYTES, NONCE_BYTES, ZERO_BYTES = 32, 24, 32


def encryption_s(nbytes: int) -> float | None:
    """Seconds of processor time to encrypt ``nbytes`` and to decrypt as many, in frames. ``None`` if pyzmq brings no libsodium."""
    found = sorted((Path(zmq.__file__).parents[1] / "pyzmq.libs").glob("libsodium*"))
    if not found:
        return None
    sodium = ctypes.CDLL(str(found[0]))
    sodium.sodium_init()
    for call in (sodium.crypto_box_afternm, sodium.crypto_box_open_afternm):
        call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p, ctypes.c_void_p]
    key, nonce = ctypes.create_string_buffer(KEY_BYTES), ctypes.create_string_buffer(NONCE_BYTES)
    size = NBYTES + ZERO_BYTES
    plain, encrypted, decrypted = (ctypes.create_string_buffer(size) for _ in range(3))
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(CALLS):
            sodium.crypto_box_afternm(encrypted, plain, size, nonce, key)
            if sodium.crypto_box_open_afternm(decrypted, encrypted, size, nonce, key):
                raise AssertionError("libsodium refused what it had encrypted")
        times.append((time.process_time() - began) / CALLS)
    return statistics.median(times) * nbytes / NBYTES
