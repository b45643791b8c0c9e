"""``python -m benchmarks merged``: what it runs, and what it makes of what the roles say."""

from __future__ import annotations

import pytest

from benchmarks.merged import Setting, run_simulated
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place


@pytest.mark.parametrize("merged", [True, False])
def test_the_jobs(merged: bool) -> None:
    topology = parse_topology(Setting(4, merged, noise=0.1).text(6, dilation=10.0, address="localhost"))
    placement = place(topology)
    assert (placement.world_size, placement.servers, placement.fc_servers) == (8, 9, int(merged))
    assert len({role.host for role in placement.workers}) == 8
    if merged:
        assert placement.fc_roles[0].host not in {role.host for role in placement.workers}
    piped = place(parse_topology(Setting(2, True, workers=16, pipeline=2).text(6, dilation=1.0, address="localhost")))
    assert len({role.host for role in piped.workers}) == 8


def test_what_is_measured() -> None:
    found = run_simulated(Setting(2, True), 6)
    assert 0.15 < found.step_s < 0.5
    # A batch's activations and their gradients, and the convolutions' parameters and gradients of four workers.
    assert 2 * 256 * 9216 * 4 < found.sent_bytes < 2 * 256 * 9216 * 4 + 10 * 9.4e6
    assert found.fc_staleness == 0
    assert found.staleness == pytest.approx(1, abs=0.2)
