"""The sample ring's promises, for any number of peers, samples and any batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.data.ring import Ring
from zmqtrain.errors import UsageError

RINGS = st.integers(1, 17).flatmap(
    lambda peers: st.builds(Ring.of, st.integers(peers, 200), st.just(peers), st.integers(1, 40), st.integers(0, 2**63 - 1))
)


@given(RINGS)
def test_a_lap_uses_each_sample_once_and_a_peer_sees_it_again_when_all_others_have(ring: Ring) -> None:
    samples = sum(map(len, ring.parts))
    seen: dict[tuple[int, int], int] = {}  # peer and sample -> the lap
    for lap in range(2 * ring.peers):
        used: list[int] = []
        for step in range(lap * ring.steps, (lap + 1) * ring.steps):
            batches = [ring.indices(step, peer) for peer in range(ring.peers)]
            assert ring.samples_at(step) == sum(map(len, batches))
            sizes = [len(batch) for batch in batches]
            assert max(sizes) <= ring.batch_size
            assert max(sizes) - min(sizes) <= 1
            for peer, batch in enumerate(batches):
                for sample in batch.tolist():
                    used.append(sample)
                    assert lap - seen.get((peer, sample), lap - ring.peers) == ring.peers
                    seen[peer, sample] = lap
        assert sorted(used) == list(range(samples))


@given(RINGS, st.integers(0, 100))
def test_what_peers_hold_is_everything_once(ring: Ring, step: int) -> None:
    held = np.concatenate([ring.held(step, peer) for peer in range(ring.peers)])
    assert sorted(held.tolist()) == list(range(sum(map(len, ring.parts))))


@given(RINGS, st.integers(0, 60))
def test_a_batch_is_what_the_one_before_used_a_lap_ago(ring: Ring, step: int) -> None:
    for peer in range(ring.peers):
        mine = ring.indices(step + ring.steps, peer)
        assert np.array_equal(mine, ring.indices(step, (peer - 1) % ring.peers))


@given(RINGS, st.integers(0, 60), st.data())
def test_a_change_keeps_every_sample_and_moves_few(ring: Ring, step: int, data: st.DataObject) -> None:
    left = data.draw(st.lists(st.integers(0, ring.peers - 1), unique=True, min_size=1).map(sorted))
    new = data.draw(st.integers(0, 2))
    members = [*left, *[None] * new]
    if len(members) > sum(map(len, ring.parts)):
        return
    after = ring.changed(step, members)
    sizes = [len(part) for part in after.parts]
    assert sorted(np.concatenate(after.parts).tolist()) == list(range(sum(map(len, ring.parts))))
    assert max(sizes) - min(sizes) <= 1
    assert after.place(step) == (0, 0)
    for place, before in enumerate(left):  # whoever has too little keeps all, whoever has too much its first
        held = ring.held(step, before)
        kept = min(len(held), sizes[place])
        assert np.array_equal(after.parts[place][:kept], held[:kept])


def test_parts_and_orders() -> None:
    ring = Ring.of(10, 3, 2, seed=4)
    assert [len(part) for part in ring.parts] == [4, 3, 3]
    assert ring.steps == 2
    assert [len(ring.indices(step, 1)) for step in range(6)] == [2, 1, 2, 2, 2, 1]
    assert not np.array_equal(ring.parts[0], Ring.of(10, 3, 2, seed=5).parts[0])
    with pytest.raises(UsageError, match="too few for a ring of 3"):
        Ring.of(2, 3, 1, 0)
