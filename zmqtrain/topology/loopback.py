"""Which addresses lead to the machine itself."""

from __future__ import annotations

from ipaddress import ip_address

from zmqtrain.topology import ranges

LOCAL_ADDRESSES = ("127.0.0.1", "localhost", "::1")


def is_loopback(address: str) -> bool:
    """Whether an address, or every address of a range, is a loopback address. Names are not looked up."""
    try:
        return ip_address(ranges.last(address)).is_loopback
    except ValueError:
        return address in LOCAL_ADDRESSES or address.endswith(".localhost")
