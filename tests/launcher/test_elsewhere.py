"""Files that mean other machines are not run here."""

from __future__ import annotations

import socket

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.launcher.elsewhere import require_here
from zmqtrain.topology.load import parse_topology

JOB = '[job]\ntask = "task.py"\n'


def test_addresses_of_other_machines_need_an_engine() -> None:
    hosts = '[[hosts]]\nname = "n[1-6]"\naddress = "198.51.100.[1-6]"\nslots = 1\n'
    with pytest.raises(UsageError, match=r"n1 \(198.51.100.1\), .*, n4 \(198.51.100.4\) and 2 more: not this .* kind = \"ssh\""):
        require_here(parse_topology(JOB + hosts))
    require_here(parse_topology(JOB + '[engine]\nkind = "local"\n' + hosts))
    require_here(parse_topology(JOB + '[engine]\nkind = "ssh"\n' + hosts))


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1", socket.gethostname()])
def test_this_machines_own_do_not(address: str) -> None:
    require_here(parse_topology(JOB + f'[[hosts]]\nname = "here"\naddress = "{address}"\nslots = 1\n'))
    require_here(parse_topology(JOB))


@pytest.mark.parametrize("line", ['python = "/other/python"', 'folder = "/work"', 'ssh = { user = "me" }'])
def test_settings_for_other_machines_are_not_passed_over(line: str) -> None:
    hosts = f'[[hosts]]\nname = "n[1-2]"\naddress = "198.51.100.[1-2]"\nslots = 1\n{line}\n'
    with pytest.raises(UsageError, match=f"host n1 has `{line.partition(' ')[0]}`, which the local engine would ignore"):
        require_here(parse_topology(JOB + '[engine]\nkind = "local"\n' + hosts))
    require_here(parse_topology(JOB + '[engine]\nkind = "ssh"\n' + hosts))
