"""The way to another machine, as this one's kernel knows it."""

from __future__ import annotations

import socket

import pytest

from zmqtrain.net.routes import own_address


def test_the_address_on_the_way_to_this_machine_is_its_own() -> None:
    assert own_address(socket.getaddrinfo("127.0.0.1", 9, type=socket.SOCK_DGRAM)) == "127.0.0.1"


def test_what_has_no_route_is_passed_over() -> None:
    nowhere = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("255.255.255.255", 9))  # a broadcast, which a plain socket may not send
    here = (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.0.1", 9))
    assert own_address([nowhere, here]) == "127.0.0.1"
    with pytest.raises(PermissionError):
        own_address([nowhere])
