"""Messages from thread to thread: what a broken connection loses comes all the same, and who is missing is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import zmqtrain.c10d.direct
from tests.c10d.test_process_group import content, groups_of
from zmqtrain.arena import shared_memory_missing
from zmqtrain.c10d import ZmqProcessGroup, several_hosts
from zmqtrain.c10d.direct import copied
from zmqtrain.c10d.several_hosts import _blocks
from zmqtrain.errors import PeerLostError, PeerTimeoutError

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmqtrain.c10d.direct, "AGAIN_S", 0.05)


class Loses:
    """What one rank sends, of which a broken connection loses some messages, or delivers them later."""

    def __init__(self, group: ZmqProcessGroup, lost: Callable[[int], bool]) -> None:
        transport: Any = group._transport
        self._send, self._lost, self.late, self._count = transport._direct._sockets.send, lost, list[Any](), 0
        transport._direct._sockets.send = self

    def __call__(self, *message: Any) -> None:
        self._count += 1
        if self._lost(self._count):
            self.late.append(message)
        else:
            self._send(*message)

    def deliver(self) -> None:
        for message in self.late:
            self._send(*message)


def sums(groups: list[ZmqProcessGroup], numel: int, times: int) -> None:
    def work(group: ZmqProcessGroup) -> None:
        for step in range(times):
            tensor = content(group.rank() + step, numel)
            group.allreduce([tensor]).wait()
            assert torch.equal(tensor, sum(content(rank + step, numel) for rank in range(group.size())))

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(work, groups))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ZmqProcessGroup]]:
    monkeypatch.setattr(several_hosts, "PIECE_BYTES", 4096)
    groups = groups_of(2, hosts="ab", timeout_s=20.0)
    yield groups
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("numel", [3, 5000])  # in one exchange, and in blocks
def test_what_is_lost_on_the_way_comes_all_the_same(pair: list[ZmqProcessGroup], numel: int) -> None:
    ways = [Loses(group, lambda count: count in (2, 3, 4)) for group in pair]
    sums(pair, numel, 4)
    for way in ways:
        assert len(way.late) == 3
        way.deliver()  # when it has come by another way
    sums(pair, numel, 4)


def test_a_rank_that_leaves_hands_over_what_may_not_have_come() -> None:
    one, other = groups_of(2, hosts="ab", timeout_s=20.0)
    Loses(one, lambda count: True)
    late = other.allreduce([tensor := torch.ones(3)])
    Loses(other, lambda count: False)
    one.allreduce([torch.ones(3)])
    one.shutdown()  # it has waited for the other's call
    late.wait()
    assert torch.equal(tensor, torch.full((3,), 2.0))
    with pytest.raises(PeerLostError, match=r"lost rank 0 while waiting for barrier .*: it has finished"):
        other.barrier().wait()
    other.shutdown()


def test_the_rank_that_is_late_is_named() -> None:
    groups = groups_of(3, hosts="abc", timeout_s=0.3)
    handles = [groups[rank].allreduce([torch.ones(3)]) for rank in (0, 2)]
    for handle in handles:
        with pytest.raises(PeerTimeoutError, match=r"rank 1 did not answer within the timeout of 0.3 s .* all_reduce"):
            handle.wait()
    for group in groups:
        group.abort()


def test_a_rank_that_aborts_does_not_wait_for_others() -> None:
    one, other = groups_of(2, hosts="ab", timeout_s=60.0)
    waits = one.allreduce([torch.ones(3)])
    one.abort()
    with pytest.raises(PeerLostError, match="its process group was destroyed"):
        waits.wait()
    with pytest.raises(PeerLostError, match="lost rank 0 while waiting for barrier"):
        other.barrier().wait()
    other.abort()


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abc"])
def test_sizes_about_those_at_which_sums_are_made_in_another_way(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have the same bits of sums, and all of them take the same way from one size to the next."""
    together, piece, most = 4096, 16384, 131072
    for name, nbytes in (("TOGETHER_BYTES", together), ("PIECE_BYTES", piece), ("DIRECT_BYTES", most)):
        monkeypatch.setattr(several_hosts, name, nbytes)
    groups = groups_of(len(hosts), hosts=hosts)
    slices = min(hosts.count(host) for host in set(hosts))

    def random(rank: int, numel: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(rank))

    def work(group: ZmqProcessGroup) -> list[Tensor]:
        found = []
        for nbytes in (together, together + 4, piece + 4, 2 * piece * len(set(hosts)) + 4, most, most + 4):
            found.append(random(group.rank(), slices * nbytes // 4 + 1))  # of which one slice has one element more
            group.allreduce([found[-1]]).wait()
            parts = [torch.empty(nbytes // 4) for _ in range(group.size())]
            group.allgather([parts], [random(group.rank(), nbytes // 4)]).wait()
            group.reduce_scatter([output := torch.empty(nbytes // 4)], [parts]).wait()
            assert torch.allclose(output, parts[group.rank()] * group.size())
            assert all(torch.equal(part, random(rank, nbytes // 4)) for rank, part in enumerate(parts))
        return found

    with ThreadPoolExecutor(len(hosts)) as pool:
        first, *others = pool.map(work, groups)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    for each in first:
        expected = sum(random(rank, each.numel()).double() for rank in range(len(hosts)))
        assert torch.allclose(each.double(), expected, atol=1e-5)
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize(("numel", "count"), [(1, 2), (5, 3), (100, 3), (99, 2)])
def test_blocks_are_all_of_a_tensor(numel: int, count: int) -> None:
    part = torch.arange(numel, dtype=torch.float32)
    blocks = _blocks(part, count, 40)
    assert torch.equal(torch.cat([torch.cat(pieces) for pieces in zip(*blocks, strict=True)]), part)
    assert max(piece.numel() for block in blocks for piece in block) <= 10


def test_a_copy_leaves_the_storage_as_it_is() -> None:
    tensor = torch.arange(5.0)
    frame = copied(tensor[1:3])
    tensor.zero_()
    tensor.untyped_storage().resize_(0)
    assert torch.equal(torch.frombuffer(frame.buffer, dtype=torch.float32), torch.tensor([1.0, 2.0]))
