"""How busy a server is."""

from __future__ import annotations

from zmqtrain.server.load import LOAD_S, Load


def test_shares_and_means_since_the_previous_event() -> None:
    load = Load(10.0)
    assert load.handled(10.0, 10.5, waiting=3, nbytes=100) is None
    told = load.handled(12.0, 12.5, waiting=1, nbytes=50)
    assert told == {"seconds": 2.5, "messages": 2, "bytes": 150, "busy": 0.4, "waiting": 2.0, "waiting_most": 3}
    assert load.handled(12.5, 12.5 + LOAD_S, waiting=0) == {
        "seconds": LOAD_S, "messages": 1, "bytes": 0, "busy": 1.0, "waiting": 0.0, "waiting_most": 0,
    }  # fmt: skip
