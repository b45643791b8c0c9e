"""The cut of the model: every element once, balanced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.collectives.group import bounds
from zmqtrain.exchange.pieces import BucketSize, pieces

buckets = st.lists(st.builds(BucketSize, st.integers(1, 500), st.sampled_from([1, 2, 4, 8])), min_size=1, max_size=8)


@given(buckets, st.integers(1, 5), st.integers(1, 4), st.integers(1, 400), st.none() | st.integers(1, 400))
def test_pieces(sizes: list[BucketSize], group_size: int, servers: int, split_bytes: int, least_bytes: int | None) -> None:
    cut = pieces(sizes, group_size, servers, split_bytes, least_bytes)
    assert [piece.index for piece in cut] == list(range(len(cut)))
    for index, bucket in enumerate(sizes):
        here = [piece for piece in cut if piece.bucket == index]
        edges = [0, *(piece.stop for piece in here)]
        assert [piece.start for piece in here] == edges[:-1], "pieces follow each other without gap or overlap"
        assert edges[-1] == bucket.numel
        parts = bounds(bucket.numel, group_size)
        for piece in here:
            assert piece.numel > 0
            assert piece.numel * bucket.itemsize <= max(split_bytes, bucket.itemsize)
            assert parts[piece.position][0] <= piece.start
            assert piece.stop <= parts[piece.position][1]
    loads = [
        sum(piece.numel * sizes[piece.bucket].itemsize for piece in cut if piece.server == server) for server in range(servers)
    ]
    assert sum(load > 0 for load in loads) == min(servers, sum(bucket.numel for bucket in sizes)), "no server is idle for nothing"
    largest = max(piece.numel * sizes[piece.bucket].itemsize for piece in cut)
    assert max(loads) - min(loads) <= largest


def test_a_large_bucket_that_the_bound_does_not_divide() -> None:
    cut = pieces([BucketSize(1001, 4)], 1, 2, 1000)
    assert [piece.numel for piece in cut] == [201, 200, 200, 200, 200]
    assert [piece.server for piece in cut] == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("positions", [None, (0, 1)])
def test_a_small_model_is_cut_finer_so_that_every_server_has_a_piece(positions: tuple[int, ...] | None) -> None:
    cut = pieces([BucketSize(100, 4, positions)], 2 if positions else 1, 3, 4 << 20)
    assert {piece.server for piece in cut} == {0, 1, 2}
    assert len(cut) <= 4
    tiny = pieces([BucketSize(2, 4)], 1, 3, 4 << 20)
    assert [(piece.numel, piece.server) for piece in tiny] == [(1, 0), (1, 1)]


def test_a_cut_that_leaves_no_server_without_a_piece_stays_as_it_was() -> None:
    """Checkpoints of before go on."""
    cut = pieces([BucketSize(1000, 4), BucketSize(10, 4)], 1, 2, 4 << 20)
    assert [(piece.numel, piece.server) for piece in cut] == [(1000, 0), (10, 1)]


def test_every_bucket_goes_to_all_servers_in_equal_parts() -> None:
    cut = pieces([BucketSize(1200, 4), BucketSize(400, 4), BucketSize(4, 4)], 2, 2, 1200, 40)
    assert [(piece.bucket, piece.numel, piece.server) for piece in cut[:4]] == [(0, 300, number % 2) for number in range(4)]
    assert [(piece.bucket, piece.numel, piece.server) for piece in cut[4:8]] == [(1, 100, number % 2) for number in range(4)]
    assert [(piece.bucket, piece.numel) for piece in cut[8:]] == [(2, 2), (2, 2)], "not smaller than 40 bytes without need"
