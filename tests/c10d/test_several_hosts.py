"""What ranks of several hosts send each other for one operation: as few messages as possible."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.c10d.test_process_group import content, groups_of, options
from zmqtrain.arena import shared_memory_missing
from zmqtrain.c10d import ZmqProcessGroup, several_hosts
from zmqtrain.c10d.several_hosts import EAGER_BYTES, PIECE_BYTES, SeveralHosts
from zmqtrain.errors import PeerLostError

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))


def messages(group: ZmqProcessGroup) -> int:
    transport = group._transport
    assert isinstance(transport, SeveralHosts)
    return transport._node.statistics()["messages_received"] + sum(transport._direct._received.values())


def broadcast(group: ZmqProcessGroup) -> None:
    tensor = torch.full((50,), float(group.rank()))
    group.broadcast([tensor], options(dist.BroadcastOptions, rootRank=1)).wait()
    assert torch.equal(tensor, torch.ones(50))


def all_reduce(group: ZmqProcessGroup) -> None:
    tensor = content(group.rank(), 5000)
    group.allreduce([tensor]).wait()
    assert torch.equal(tensor, sum(content(rank, 5000) for rank in range(group.size())))


def all_gather(group: ZmqProcessGroup) -> None:
    parts = [torch.empty(50) for _ in range(group.size())]
    group.allgather([parts], [content(group.rank(), 50)]).wait()
    assert all(torch.equal(part, content(rank, 50)) for rank, part in enumerate(parts))


def barrier(group: ZmqProcessGroup) -> None:
    group.barrier().wait()


@pytest.mark.parametrize("call", [broadcast, all_reduce, all_gather, barrier])
@pytest.mark.parametrize("hosts", ["ab", "abc"])
def test_a_small_operation_is_one_message_to_each_other_host(hosts: str, call: Callable[[ZmqProcessGroup], None]) -> None:
    groups = groups_of(len(hosts), hosts=hosts)

    def received(group: ZmqProcessGroup) -> int:
        before = messages(group)
        for _ in range(5):
            call(group)
        return messages(group) - before

    with ThreadPoolExecutor(len(hosts)) as pool:
        assert list(pool.map(received, groups)) == [5 * (len(hosts) - 1)] * len(hosts)
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("hosts", ["ab", "aab", "abc", "aabb"])
def test_sizes_about_the_most_that_goes_directly(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_hosts, "PIECE_BYTES", 16 * 1024)
    groups, most = groups_of(len(hosts), hosts=hosts), 2048

    def work(group: ZmqProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        for numel in (most - 1, most, most + 1, 2 * most + 1):
            found: Any = content(rank, numel, torch.float64)
            group.allreduce([found]).wait()
            assert torch.equal(found, sum(content(other, numel, torch.float64) for other in range(size)))
            group.broadcast([found.add_(rank)]).wait()
            assert torch.equal(found, sum(content(other, numel, torch.float64) for other in range(size)))
            parts = [torch.empty(numel, dtype=torch.float64) for _ in range(size)]
            group.allgather([parts], [content(rank, numel, torch.float64)]).wait()
            assert all(torch.equal(part, content(other, numel, torch.float64)) for other, part in enumerate(parts))

    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(work, groups))
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("hosts", ["ab", "aab"])
def test_a_program_may_resize_the_storage_of_what_was_received_and_sent(hosts: str) -> None:
    groups = groups_of(len(hosts), hosts=hosts)

    def work(group: ZmqProcessGroup) -> None:
        for numel in (3, PIECE_BYTES):
            own, whole = content(group.rank(), numel), torch.empty(group.size() * numel)
            group._allgather_base(whole, own).wait()
            group.allreduce([own]).wait()
            group.broadcast([own]).wait()
            for each in (own, whole):  # as FSDP frees what it has gathered
                each.untyped_storage().resize_(0)

    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(work, groups))
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("hosts", ["ab", "aabb"])
def test_messages_travel_while_a_collective_is_called(hosts: str) -> None:
    """They are sent in threads of their own."""
    groups = groups_of(len(hosts), hosts=hosts)

    def work(group: ZmqProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        for step in range(30):
            tensor, received = content(rank + step, 10), torch.empty(10)
            handles = [group.allreduce([tensor])]
            handles += [group.send([content(rank + step, 10)], (rank + 1) % size), group.recv([received], (rank - 1) % size)]
            for handle in handles:
                handle.wait()
            assert torch.equal(tensor, sum(content(other + step, 10) for other in range(size)))
            assert torch.equal(received, content((rank - 1) % size + step, 10))

    with ThreadPoolExecutor(len(hosts)) as pool:
        list(pool.map(work, groups))
    for group in groups:
        group.shutdown()


def test_a_process_that_ends_lets_arrive_what_it_has_sent() -> None:
    """Its program has not destroyed the group. Others that wait for it later hear of its end at once."""
    one, other = groups_of(2, hosts="ab")
    late = other.allreduce([torch.ones(3)])
    one.allreduce([torch.ones(3)]).wait()
    transport: Any = one._transport
    transport._at_exit()  # the interpreter, and multiprocessing's children, call it in the end
    assert not transport._network._thread.is_alive()
    late.wait()
    with pytest.raises(PeerLostError, match="rank 0"):
        other.barrier().wait()
    one.shutdown()
    other.shutdown()


def test_a_rank_that_leaves_before_its_first_operation_is_missed() -> None:
    one, other = groups_of(2, hosts="ab")
    one.shutdown()
    with pytest.raises(PeerLostError, match="lost rank 0 while waiting for barrier"):
        other.barrier().wait()
    other.shutdown()


def test_a_rank_of_another_host_whose_process_has_ended_is_lost_at_once() -> None:
    """Not only after the time for which a host that does not answer is waited for."""
    one, other = groups_of(2, hosts="ab")
    late = other.allreduce([torch.ones(3)])
    receiving = other.recv([torch.ones(3)], 0, 5)
    transport: Any = one._transport
    transport._network.call(transport._node._transport.close())  # as by a signal: without a word
    for handle in (late, receiving):
        with pytest.raises(PeerLostError, match=r"lost rank 0 while waiting for .*: its process has ended: nobody listens"):
            handle.wait()
    for group in (one, other):
        group.abort()


def test_ranks_of_other_hosts_are_told_who_is_lost() -> None:
    """Ranks 1 and 3 compare their calls, so rank 3 does not notice the end of rank 0 itself."""
    groups = groups_of(4, hosts="aabb")
    groups[0].shutdown()
    handles = [group.allreduce([torch.ones(3)]) for group in groups[1:]]
    with pytest.raises(PeerLostError, match=r"lost rank 0 while waiting for all_reduce .*: it has left"):
        handles[0].wait()
    with pytest.raises(PeerLostError, match=r"lost rank 0 while waiting for all_reduce .*: it has left \(seen by rank 1\)"):
        handles[2].wait()
    with pytest.raises(PeerLostError, match="lost rank 0"):
        handles[1].wait()
    for group in groups[1:]:
        group.abort()


def test_a_message_of_a_rank_of_the_same_host_that_is_lost() -> None:
    groups = groups_of(3, hosts="aab")
    groups[1].shutdown()  # no connection tells that: there has been none
    with pytest.raises(PeerLostError, match="lost rank 1 while waiting for receive from rank 1"):
        groups[0].recv([torch.zeros(3)], 1, 5).wait()
    for group in (groups[0], groups[2]):
        group.abort()


def test_what_a_rank_of_the_same_host_has_sent_before_it_left_arrives() -> None:
    groups = groups_of(3, hosts="aab")
    groups[1].send([torch.ones(3)], 0, 5).wait()
    groups[1].shutdown()
    received = torch.zeros(3)
    groups[0].recv([received], 1, 5).wait()
    assert torch.equal(received, torch.ones(3))
    for group in (groups[0], groups[2]):
        group.shutdown()


@pytest.mark.parametrize("numel", [1, EAGER_BYTES // 4, EAGER_BYTES // 4 + 1])
def test_what_was_sent_may_be_overwritten_before_it_is_received(numel: int) -> None:
    groups = groups_of(2, hosts="ab")
    for _ in range(3):
        tensor, received = content(0, numel), torch.empty(numel)
        groups[0].send([tensor], 1, 5).wait()
        tensor.zero_()
        groups[1].recv([received], 0, 5).wait()
        assert torch.equal(received, content(0, numel))
    for group in groups:
        group.shutdown()
