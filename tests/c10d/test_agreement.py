"""Ranks that disagree get an error on all of them; a mistake of one call fails that call alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.c10d.test_process_group import groups_of, options
from zmqtrain.arena import shared_memory_missing
from zmqtrain.c10d import ZmqProcessGroup
from zmqtrain.c10d.errors import BrokenGroupError, MismatchError

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))

AVG = dist.ReduceOp.AVG
Work = Callable[[ZmqProcessGroup], Any]


def told(hosts: str, work: Work) -> list[BaseException | None]:
    """The error that each rank's call ends with; afterwards, on one host, all can go on."""
    groups = groups_of(len(hosts), hosts=hosts, timeout_s=20.0)

    def call(group: ZmqProcessGroup) -> BaseException | None:
        try:
            work(group).wait()
        except RuntimeError as error:
            return error
        return None

    with ThreadPoolExecutor(len(hosts)) as pool:
        errors = list(pool.map(call, groups))
        if len(set(hosts)) == 1:

            def again(group: ZmqProcessGroup) -> Tensor:
                tensor = torch.ones(3)
                group.allreduce([tensor]).wait()
                return tensor

            assert all(torch.equal(each, torch.full((3,), float(len(hosts)))) for each in pool.map(again, groups))
    for group in groups:
        group.abort()
    return errors


def parts(group: ZmqProcessGroup, *numels: int) -> list[Tensor]:
    return [torch.ones(numels[rank % len(numels)]) for rank in range(group.size())]


def all_to_all_of(group: ZmqProcessGroup) -> Any:
    size, extra = group.size(), int(group.rank() == 0)
    splits = [2] * size
    return group.alltoall_base(
        torch.empty(sum(splits)), torch.ones(sum(splits) + extra), splits, [*splits[:-1], splits[-1] + extra]
    )


WRONG: dict[str, Work] = {
    "sizes": lambda group: group.allreduce([torch.ones(10 + group.rank())]),
    "dtypes": lambda group: group.allreduce([torch.ones(8, dtype=torch.float32 if group.rank() else torch.float64)]),
    "sizes of the same bytes": lambda group: group.allreduce(
        [torch.ones(8, dtype=torch.float32) if group.rank() else torch.ones(4, dtype=torch.float64)]
    ),
    "operations": lambda group: group.barrier() if group.rank() == 0 else group.allreduce([torch.ones(3)]),
    "reduce operations": lambda group: group.allreduce(
        [torch.ones(3)], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX if group.rank() else dist.ReduceOp.SUM)
    ),
    "roots": lambda group: group.broadcast([torch.ones(3)], options(dist.BroadcastOptions, rootRank=min(group.rank(), 1))),
    "reduce roots": lambda group: group.reduce([torch.ones(3)], options(dist.ReduceOptions, rootRank=min(group.rank(), 1))),
    "sizes of a broadcast": lambda group: group.broadcast([torch.ones(3 + group.rank())]),
    "sizes to gather": lambda group: group.gather(
        [[torch.empty(3) for _ in range(group.size())]] if not group.rank() else [], [torch.ones(3 + group.rank())]
    ),
    "sizes to scatter": lambda group: group.scatter(
        [torch.empty(3 + group.rank())], [[torch.empty(3) for _ in range(group.size())]] if not group.rank() else []
    ),
    "sizes to gather everywhere": lambda group: group.allgather(
        [parts(group, *(3 + rank * int(group.rank() > 0) for rank in range(group.size())))],
        [torch.ones(3 + group.rank() * int(group.rank() > 0))],
    ),
    "whole tensors to gather": lambda group: group._allgather_base(
        torch.empty(group.size() * (3 + group.rank())), torch.ones(3 + group.rank())
    ),
    "whole tensors to scatter": lambda group: group._reduce_scatter_base(
        torch.empty(3 + group.rank()), torch.ones(group.size() * (3 + group.rank()))
    ),
    "splits": all_to_all_of,
    "numbers of tensors": lambda group: group.allreduce_coalesced([torch.ones(2)] * (1 + group.rank())),
    "sparse and dense": lambda group: group.allreduce([torch.eye(3) if group.rank() else torch.eye(3).to_sparse()]),
}


@pytest.mark.parametrize("hosts", ["aa", "aaa", "ab", "aab", "aabb"])
@pytest.mark.parametrize("case", [*WRONG])
def test_ranks_that_disagree_are_told_so_on_all_of_them(case: str, hosts: str) -> None:
    if case == "numbers of tensors":  # the ranks with more go on to one that the others never call
        hosts = "ab" if len(set(hosts)) > 1 else "aa"
        groups = groups_of(2, hosts=hosts, timeout_s=20.0)
        first, second = (WRONG[case](group) for group in groups)
        first.wait()
        later = groups[0].barrier()
        with pytest.raises(MismatchError, match=r"barrier .*all_reduce_coalesced|all_reduce_coalesced .*barrier"):
            later.wait()
        with pytest.raises(MismatchError):
            second.wait()
        for group in groups:
            group.abort()
        return
    errors = told(hosts, WRONG[case])
    assert all(isinstance(error, MismatchError) for error in errors), errors
    if case == "sizes" and hosts != "aabb":  # where the ranks of a host disagree, they are told of these
        for text in map(str, errors):
            assert "all_reduce of 10 x float32 (collective 1)" in text
            assert "rank 0" in text


def test_in_detail_the_error_has_shapes_and_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    errors = told("aa", WRONG["sizes"])
    assert "tensors of shapes [10], and called at " in str(errors[0])
    assert "test_agreement.py:" in str(errors[0])
    assert "tensors of shapes [11]" in str(errors[1])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda group: group.alltoall_base(torch.empty(4), torch.ones(4), [1, 2], [2, 2]), "output splits"),
        (lambda group: group.alltoall_base(torch.empty(4), torch.ones(4), [2, 2], [4]), "input splits"),
        (lambda group: group.alltoall_base(torch.empty(3), torch.ones(4), [], []), "3 rows of the output"),
        (lambda group: group.alltoall([torch.empty(1)], [torch.ones(1)] * 2), "1 outputs over 2 ranks"),
        (lambda group: group.allgather([[torch.empty(2)]], [torch.ones(2)]), "1 tensors over 2 ranks"),
        (lambda group: group.allgather([[torch.empty(3)] * 2], [torch.ones(2)]), "part has 3 elements"),
        (lambda group: group.allgather([[torch.empty(2).double()] * 2], [torch.ones(2)]), "one dtype"),
        (lambda group: group._allgather_base(torch.empty(4).double(), torch.ones(2)), "one dtype"),
        (lambda group: group._reduce_scatter_base(torch.empty(2), torch.ones(5)), "reduce_scatter of 5"),
        (lambda group: group.send([torch.ones(1)], 2), "another rank's number"),
        (lambda group: group.recv([torch.ones(1)], group.rank()), "another rank's number"),
        (lambda group: group.allreduce([torch.ones(2, dtype=torch.bool)], options(dist.AllreduceOptions, reduceOp=AVG)), "boolean"),
    ],
)
def test_a_mistake_of_one_call_fails_that_call_alone(call: Work, text: str) -> None:
    groups = groups_of(2)
    with pytest.raises((ValueError, TypeError), match=text) as raised:
        call(groups[0])
    assert isinstance(raised.value, dist.DistError)  # a RuntimeError, as with gloo
    tensors = [torch.ones(2), torch.ones(2)]
    handles = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
    for handle, tensor in zip(handles, tensors, strict=True):
        handle.wait()
        assert torch.equal(tensor, torch.full((2,), 2.0))
    for group in groups:
        group.shutdown()


def test_what_is_not_carried_out_says_so_and_is_a_runtime_error() -> None:
    one, other = groups_of(2, timeout_s=0.2)
    with pytest.raises(dist.DistError, match=" timeout "):
        one.allreduce([torch.ones(1)]).wait()
    with pytest.raises(BrokenGroupError, match=r"broadcast \(operation 2 .* is not carried out: an earlier operation"):
        one.broadcast([torch.ones(1)]).wait()
    one.abort()
    other.abort()


def both(groups: list[ZmqProcessGroup], work: Callable[[ZmqProcessGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups))


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_inference_tensors_and_versions(hosts: str) -> None:
    groups = groups_of(2, hosts=hosts)

    def work(group: ZmqProcessGroup) -> None:
        with torch.inference_mode():
            inside = torch.ones(3)
            group.allreduce([inside]).wait()
            part = torch.empty(3)
            group._reduce_scatter_base(part, torch.ones(6)).wait()
            group.reduce([inside]).wait()
        assert part.tolist() == [2.0] * 3
        assert inside.tolist() == ([4.0] * 3 if group.rank() == 0 else [2.0] * 3)
        outside = torch.ones(3)
        group.allreduce([outside]).wait()
        assert outside.tolist() == [2.0] * 3
        assert outside._version == 0  # as with gloo
        spread = torch.full((1,), float(group.rank())).expand(4)
        group.broadcast([spread if group.rank() == 0 else torch.ones(4)]).wait()
        conjugate = torch.tensor([1 + 2j]).conj()
        group.allreduce([conjugate]).wait()
        assert conjugate.tolist() == [2 - 4j]

    both(groups, work)
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8])
def test_averages_of_integers_are_quotients(dtype: torch.dtype) -> None:
    groups = groups_of(2)

    def work(group: ZmqProcessGroup) -> Tensor:
        tensor = torch.tensor([-7, 3, 4], dtype=dtype) if group.rank() else torch.tensor([0, 2, -1], dtype=dtype)
        group.allreduce([tensor], options(dist.AllreduceOptions, reduceOp=AVG)).wait()
        return tensor

    assert [each.tolist() for each in both(groups, work)] == [[-3, 2, 1]] * 2
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("hosts", ["aa", "aaa", "ab"])
@pytest.mark.parametrize("numels", [(3, 3), (0, 2), (0, 0)])
def test_sums_of_sparse_tensors(hosts: str, numels: tuple[int, int]) -> None:
    groups = groups_of(len(hosts), hosts=hosts)

    def sparse(rank: int) -> Tensor:
        count = numels[rank % 2]
        generator = torch.Generator().manual_seed(rank)
        rows = torch.randint(0, 6, (1, count), generator=generator)
        return torch.sparse_coo_tensor(rows, torch.randn(count, 2, generator=generator).double(), (6, 2), check_invariants=True)

    def work(group: ZmqProcessGroup) -> Tensor:
        tensor = sparse(group.rank())
        group.allreduce([tensor]).wait()
        return tensor

    wanted = sum(sparse(rank).to_dense() for rank in range(len(hosts)))
    results = both(groups, work)
    for result in results:
        assert torch.equal(result.to_dense(), results[0].to_dense())
        torch.testing.assert_close(result.to_dense(), wanted, rtol=1e-14, atol=1e-14)
    for group in groups:
        group.shutdown()


def test_a_callback_may_wait_for_another_operation() -> None:
    groups = groups_of(2)

    def work(group: ZmqProcessGroup) -> float:
        def callback(future: torch.futures.Future[list[Tensor]]) -> float:
            tensor = future.value()[0]
            group.allreduce([tensor]).wait()
            inner = group.allreduce([tensor]).get_future().then(lambda done: float(done.value()[0].sum()))
            return float(inner.wait())

        return float(group.allreduce([torch.ones(1)]).get_future().then(callback).wait())

    assert both(groups, work) == [8.0, 8.0]
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("hosts", ["aaa", "abc", "aab"])
def test_receives_of_different_tags_do_not_wait_for_each_other(hosts: str) -> None:
    groups = groups_of(3, hosts=hosts)
    first, second, third = (torch.zeros(2) for _ in range(3))
    waiting = groups[0].recv([first], 1, 1)  # nothing comes with this tag before the others have arrived
    others = groups[0].recv([second], 1, 2), groups[0].recv_anysource([third], 3)
    sent = [
        groups[1].send([torch.full((2,), 9.0)], 0, 4),  # nobody wants it yet
        groups[2].send([torch.full((2,), 8.0)], 0, 4),
        groups[1].send([torch.full((2,), 2.0)], 0, 2),
        groups[2].send([torch.full((2,), 3.0)], 0, 3),
    ]
    for handle in others:
        handle.wait(timedelta(seconds=60))
    assert not waiting.is_completed()
    assert second.tolist() == [2.0, 2.0]
    assert third.tolist() == [3.0, 3.0]
    assert others[1].source_rank() == 2
    sent.append(groups[1].send([torch.full((2,), 1.0)], 0, 1))
    waiting.wait()
    assert first.tolist() == [1.0, 1.0]
    found = []
    for _ in range(2):
        last = torch.zeros(2)
        handle = groups[0].recv_anysource([last], 4)
        handle.wait()
        found.append((handle.source_rank(), last[0].item()))
    assert sorted(found) == [(1, 9.0), (2, 8.0)]
    for each in sent:
        each.wait()
    for group in groups:
        group.shutdown()


def test_a_receive_that_times_out_fails_alone() -> None:
    one, other = groups_of(2, timeout_s=0.3)
    with pytest.raises(dist.DistError, match=r"rank 1 did not answer within the timeout of 0.3 s .*receive from rank 1 \(tag 7\)"):
        one.recv([torch.zeros(1)], 1, 7).wait()
    with pytest.raises(dist.DistError, match="receive from any rank"):
        one.recv_anysource([torch.zeros(1)], 7).wait()
    tensor = torch.zeros(1)
    handle = one.recv([tensor], 1, 8)
    other.send([torch.ones(1)], 0, 8).wait()
    handle.wait()
    assert tensor.item() == 1.0
    other.send([torch.ones(2)], 0, 8).wait()
    with pytest.raises(MismatchError, match="8 bytes were sent, but 4 were expected"):
        one.recv([tensor], 1, 8).wait()
    one.shutdown()
    other.shutdown()


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_a_message_of_another_size_is_an_error_of_its_receive_alone(hosts: str) -> None:
    one, other = groups_of(2, hosts=hosts)
    for numel in (1, 3, 100_000):
        sent = other.send([torch.ones(numel)], 0, 8)
        with pytest.raises(MismatchError, match=r"receive from rank 1 \(tag 8\): .*expected"):
            one.recv([torch.zeros(2)], 1, 8).wait()
        sent.wait()
    sent = other.send([torch.ones(3)], 0, 8)
    with pytest.raises(MismatchError, match=r"receive from any rank \(tag 8, .*expected"):
        one.recv_anysource([torch.zeros(2)], 8).wait()
    tensor = torch.zeros(2)
    sent = other.send([torch.ones(2)], 0, 8)
    one.recv([tensor], 1, 8).wait()
    sent.wait()
    assert tensor.tolist() == [1.0, 1.0]
    for group in (one, other):
        group.shutdown()


def test_a_group_can_be_made_again_while_another_rank_still_has_the_old_one() -> None:
    """As a program under torchrun does, whose store outlives the group."""
    from zmqtrain.c10d.rendezvous import rendezvous

    store, names = dist.HashStore(), ["rank 0", "rank 1"]

    def make(rank: int) -> ZmqProcessGroup:
        return ZmqProcessGroup(rendezvous(store, rank, names, timedelta(seconds=30)), rank, 2, names)

    with ThreadPoolExecutor(2) as pool:
        old = list(pool.map(make, range(2)))
        old[1].shutdown()
        again = pool.submit(make, 1)
        old[0].shutdown()
        new = [make(0), again.result()]

        def work(group: ZmqProcessGroup) -> float:
            tensor = torch.ones(1)
            group.allreduce([tensor]).wait()
            return tensor.item()

        assert list(pool.map(work, new)) == [2.0, 2.0]
    for group in new:
        group.shutdown()


def test_the_profiler_shows_operations() -> None:
    groups = groups_of(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        handles = [group.allreduce([torch.ones(4)]) for group in groups]
        for handle in handles:
            handle.wait()
            handle.get_future().wait()
        received = groups[1].recv([torch.empty(2)], 0)
        for handle in (groups[0].send([torch.ones(2)], 1), received):
            handle.wait()
            handle.get_future().wait()
    assert sorted(event.name for event in profile.events() if event.name.startswith("zmq:")) == [
        *("zmq:all_reduce", "zmq:all_reduce"),
        *("zmq:recv", "zmq:send"),
    ]
    for group in groups:
        group.shutdown()
