"""Addresses of endpoints: ``tcp://HOST:PORT,PORT`` (control and bulk), followed by ``#KEY`` if connections are encrypted.

KEY is the public key of the process that listens there, in hexadecimal digits. So a process that hands out an address (the
launcher in an environment variable, the coordinator in its views) also says which process to expect there.
"""

from __future__ import annotations

KEY_BYTES = 32
_MARK = "#"


def split_address(address: str) -> tuple[str, str]:
    """The addresses to which ZeroMQ connects for both lanes. Raises `ValueError` if ``address`` is not an address."""
    host, _, ports = without_key(address).rpartition(":")
    control, _, bulk = ports.partition(",")
    if not host.startswith("tcp://") or len(host) < 7 or not (control.isdecimal() and bulk.isdecimal()):
        raise ValueError(f"{without_key(address)!r} is not an address of an endpoint, such as 'tcp://HOST:PORT,PORT'")
    return f"{host}:{control}", f"{host}:{bulk}"


def key_in(address: str) -> bytes | None:
    """The public key of the process that listens there; ``None`` if it does not encrypt. Raises `ValueError` for an invalid key."""
    where, mark, digits = address.partition(_MARK)
    if not mark:
        return None
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"{where} is followed by {_MARK} and an invalid key: a key has {2 * KEY_BYTES} hexadecimal digits")
    return key


def with_key(address: str, key: bytes) -> str:
    """The address together with the key of the process to expect there."""
    return f"{address}{_MARK}{key.hex()}"


def with_port(address: str, port: int) -> str:
    """The same process at another port, for both lanes. Raises `ValueError` if ``address`` is not an address."""
    split_address(address)
    where, mark, key = address.partition(_MARK)
    return f"{where.rpartition(':')[0]}:{port},{port}{mark}{key}"


def without_key(address: str) -> str:
    """The address without its key, for logs."""
    return address.partition(_MARK)[0]
