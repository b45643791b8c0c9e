"""Addresses of endpoints: ``tcp://HOST:PORT,PORT`` (control and bulk), with ``#KEY`` behind where connections are encrypted.

KEY is the public key of the process that listens there, in hexadecimal digits. So a process that hands out an address (the
launcher in an environment variable, the coordinator in its views) says with it whom to expect there.
"""

from __future__ import annotations

KEY_BYTES = 32
_MARK = "#"


def split_address(address: str) -> tuple[str, str]:
    """What ZeroMQ connects to for both lanes. Raises `ValueError` for what is no address."""
    host, _, ports = without_key(address).rpartition(":")
    control, _, bulk = ports.partition(",")
    if not host.startswith("tcp://") or len(host) < 7 or not (control.isdecimal() and bulk.isdecimal()):
        raise ValueError(f"{without_key(address)!r} is no address of an endpoint: 'tcp://HOST:PORT,PORT' is")
    return f"{host}:{control}", f"{host}:{bulk}"


def key_in(address: str) -> bytes | None:
    """The public key of who listens there; ``None``: they do not encrypt. Raises `ValueError` for a key that is none."""
    where, mark, digits = address.partition(_MARK)
    if not mark:
        return None
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"{where} is followed by {_MARK} and something that is no key: {2 * KEY_BYTES} hexadecimal digits are")
    return key


def with_key(address: str, key: bytes) -> str:
    """The address, and whom to expect there."""
    return f"{address}{_MARK}{key.hex()}"


def without_key(address: str) -> str:
    """The address as logs show it."""
    return address.partition(_MARK)[0]
