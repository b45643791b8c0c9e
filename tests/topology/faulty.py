"""Topology files with a fault."""

from __future__ import annotations

import pytest

from zmqtrain.topology.faults import FileFault, TopologyFaultsError
from zmqtrain.topology.load import parse_topology


def only(text: str) -> FileFault:
    """The one fault of the file with this text."""
    with pytest.raises(TopologyFaultsError) as caught:
        parse_topology(text)
    assert len(caught.value.faults) == 1, str(caught.value)
    return caught.value.faults[0]
