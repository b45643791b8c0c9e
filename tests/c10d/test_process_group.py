"""The zmq backend of torch.distributed, against gloo's results or arithmetic, in threads that each are a rank."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tests.launcher.ready import PYTHON, Program
from tests.patience import PATIENCE_S
from zmqtrain.arena import shared_memory_missing
from zmqtrain.c10d import ZmqProcessGroup
from zmqtrain.c10d.errors import BrokenGroupError, MismatchError
from zmqtrain.c10d.rendezvous import listening_address, rendezvous, settings_here
from zmqtrain.errors import PeerLostError, PeerTimeoutError

pytestmark = pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
T = TypeVar("T")
Ranks = Callable[[Callable[[ZmqProcessGroup], T]], list[T]]


def groups_of(size: int, timeout_s: float = 30.0, hosts: str | None = None) -> list[ZmqProcessGroup]:
    """The ranks of a group, all in this process. ``hosts``: a letter a rank; those with the same share memory."""
    store, names = dist.HashStore(), [f"rank {rank}" for rank in range(size)]

    def make(rank: int) -> ZmqProcessGroup:
        transport = rendezvous(store, rank, names, timedelta(seconds=timeout_s), host=hosts and hosts[rank])
        return ZmqProcessGroup(transport, rank, size, names)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


@pytest.fixture(params=["a", "aaa", "ab", "aabbb"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[ZmqProcessGroup], Any]], list[Any]]]:
    """Calls a function for each rank of a group on these hosts, in as many threads."""
    hosts: str = request.param
    size, groups = len(hosts), groups_of(len(hosts), hosts=hosts)
    with ThreadPoolExecutor(size) as pool:
        yield lambda work: list(pool.map(work, groups))
    for group in groups:
        group.shutdown()


def content(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that differ from rank to rank, and from place to place."""
    numbers = torch.arange(numel) * (rank + 2) % 13 + rank - 3
    return numbers.bool() if dtype is torch.bool else numbers.to(dtype)


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
#: By type, what its values can be reduced by.
OPERATIONS = {
    dtype: [
        *(dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT),
        *(ORDERED if not dtype.is_complex else ()),
        *(BITS if dtype in WHOLE else (dist.ReduceOp.AVG,)),
    ]
    for dtype in (*FLOATS, *WHOLE)
}
COMBINE = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def combined(op: Any, tensors: Sequence[Tensor]) -> Tensor:
    result = tensors[0].clone()
    for each in tensors[1:]:
        result = COMBINE[op](result, each)
    return result / len(tensors) if op == dist.ReduceOp.AVG else result


def options(kind: type[Any], **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("dtype", OPERATIONS, ids=str)
def test_reductions_of_all_types(ranks: Ranks[Any], dtype: torch.dtype) -> None:
    """One operation after another in one group, which takes longer to make than they take."""

    def work(group: ZmqProcessGroup, op: Any) -> tuple[Tensor, Tensor, Tensor]:
        size, rank = group.size(), group.rank()
        everywhere, at_last, whole = content(rank, 7, dtype), content(rank, 7, dtype), content(rank, 3 * size, dtype)
        part = torch.empty(3, dtype=dtype)
        group.allreduce([everywhere], options(dist.AllreduceOptions, reduceOp=op)).wait()
        group.reduce([at_last], options(dist.ReduceOptions, reduceOp=op, rootRank=size - 1)).wait()
        group._reduce_scatter_base(part, whole, options(dist.ReduceScatterOptions, reduceOp=op)).wait()
        return everywhere, at_last, part

    for op in OPERATIONS[dtype]:
        results = ranks(partial(work, op=op))
        size = len(results)
        wanted = combined(op, [content(rank, 7, dtype) for rank in range(size)])
        parts = combined(op, [content(rank, 3 * size, dtype) for rank in range(size)]).chunk(size)
        for rank, (everywhere, at_last, part) in enumerate(results):
            assert torch.equal(everywhere, wanted), op
            assert torch.equal(at_last, wanted if rank == size - 1 else content(rank, 7, dtype)), op
            assert torch.equal(part, parts[rank]), op


@pytest.mark.parametrize("numel", [0, 1, 1_000_003])
def test_sizes_that_do_not_divide(ranks: Ranks[Any], numel: int) -> None:
    def work(group: ZmqProcessGroup) -> Tensor:
        tensor = content(group.rank(), numel)
        group.allreduce([tensor]).wait()
        return tensor

    results = ranks(work)
    wanted = combined(dist.ReduceOp.SUM, [content(rank, numel) for rank in range(len(results))])
    assert all(torch.equal(result, wanted) for result in results)


@pytest.mark.parametrize("numel", [0, 5, 800_001])
def test_every_way_to_move_tensors(ranks: Ranks[Any], numel: int) -> None:
    def work(group: ZmqProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        all_of = [content(each, numel) for each in range(size)]
        mine, root = all_of[rank].clone(), size - 1

        spread = torch.zeros(numel) if rank != root else all_of[root].clone()
        group.broadcast([spread], options(dist.BroadcastOptions, rootRank=root)).wait()
        assert torch.equal(spread, all_of[root])

        gathered = [torch.zeros(numel) for _ in range(size)]
        group.allgather([gathered], [mine]).wait()
        assert all(map(torch.equal, gathered, all_of))

        flat = torch.zeros(size * numel)
        group._allgather_base(flat, mine).wait()
        assert torch.equal(flat, torch.cat(all_of))

        kept = [torch.zeros(numel) for _ in range(size)]
        group.gather([kept] if rank == root else [], [mine], options(dist.GatherOptions, rootRank=root)).wait()
        assert rank != root or all(map(torch.equal, kept, all_of))

        received = torch.zeros(numel)
        group.scatter([received], [all_of] if rank == root else [], options(dist.ScatterOptions, rootRank=root)).wait()
        assert torch.equal(received, mine)

        there = [content(10 * rank + each, numel) for each in range(size)]
        here = [torch.zeros(numel) for _ in range(size)]
        group.alltoall(here, there).wait()
        assert all(torch.equal(here[each], content(10 * each + rank, numel)) for each in range(size))
        assert torch.equal(mine, all_of[rank])

    ranks(work)


def test_uneven_parts(ranks: Ranks[Any]) -> None:
    """Rank r sends r + s + 1 rows to rank s."""

    def work(group: ZmqProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        splits = [rank + each + 1 for each in range(size)]
        whole = torch.cat([torch.full((count, 2), 10.0 * rank + to) for to, count in enumerate(splits)])
        output = torch.empty(sum(splits), 2)
        group.alltoall_base(output, whole, splits, splits).wait()
        assert torch.equal(output, torch.cat([torch.full((count, 2), 10.0 * source + rank) for source, count in enumerate(splits)]))
        outputs = [torch.empty(each + 1) for each in range(size)]
        group.allgather([outputs], [torch.full((rank + 1,), float(rank))]).wait()
        assert all(torch.equal(outputs[each], torch.full((each + 1,), float(each))) for each in range(size))
        total = torch.empty(rank + 1)
        group.reduce_scatter([total], [[torch.ones(each + 1) for each in range(size)]]).wait()
        assert torch.equal(total, torch.full((rank + 1,), float(size)))

    ranks(work)


def test_several_tensors_at_once(ranks: Ranks[Any]) -> None:
    def work(group: ZmqProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        tensors = [content(rank, 4), content(rank, 9, torch.float64)]
        group.allreduce_coalesced(tensors).wait()
        wanted = [
            combined(dist.ReduceOp.SUM, [content(r, n, t) for r in range(size)])
            for n, t in ((4, torch.float32), (9, torch.float64))
        ]
        assert all(map(torch.equal, tensors, wanted))
        gathered = [torch.empty(2 * size), torch.empty(3 * size)]
        group.allgather_into_tensor_coalesced(gathered, [content(rank, 2), content(rank, 3)]).wait()
        assert all(torch.equal(gathered[i], torch.cat([content(r, i + 2) for r in range(size)])) for i in range(2))
        parts = [torch.empty(2), torch.empty(1)]
        group.reduce_scatter_tensor_coalesced(parts, [torch.ones(2 * size), torch.ones(size)]).wait()
        assert all((part == size).all() for part in parts)

    ranks(work)


def test_memory_of_any_layout_and_with_gradients(ranks: Ranks[Any]) -> None:
    def work(group: ZmqProcessGroup) -> None:
        size = group.size()
        across = torch.ones(4, 6).t()[::2]
        group.allreduce([across]).wait()
        assert (across == size).all()
        parameter = torch.nn.Parameter(torch.ones(3))
        group.allreduce([parameter]).wait()
        assert (parameter == size).all()
        one = torch.full((2,), float(group.rank()))[::2]  # contiguous, although its stride is 2
        group.broadcast([one], options(dist.BroadcastOptions, rootRank=size - 1)).wait()
        assert one.item() == size - 1
        expanded = torch.ones(1).expand(4)  # four elements that are one in memory
        group.allreduce([expanded]).wait()
        assert expanded.tolist() == [size] * 4

    ranks(work)


@pytest.mark.parametrize("numel", [3, 300_007])
def test_what_is_read_may_lie_where_the_result_goes(ranks: Ranks[Any], numel: int) -> None:
    """At another place than that of this rank's own part, too."""

    def part(rank: int, other: int) -> Tensor:
        return content(rank, numel) + 100 * other

    def work(group: ZmqProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        whole = torch.cat([part(rank, other) for other in range(size)])
        group.all_to_all_single(whole, whole, [], []).wait()
        received = [part(other, rank) for other in range(size)]
        assert torch.equal(whole, torch.cat(received))
        mine = [part(rank, other) for other in range(size)]
        group.alltoall(mine[::-1], mine).wait()
        assert all(torch.equal(each, other) for each, other in zip(mine[::-1], received, strict=True))
        for shift in (0, 1):
            place = (rank + shift) % size * numel
            gathered = torch.zeros(size * numel)
            gathered[place : place + numel] = content(rank, numel)
            group.all_gather_single(gathered, gathered[place : place + numel]).wait()
            assert torch.equal(gathered, torch.cat([content(other, numel) for other in range(size)]))
            parts = [part(other, 0) for other in range(size)]
            if rank == 0:
                group.gather([parts], [parts[shift % size]]).wait()
                assert torch.equal(torch.cat(parts), torch.cat([part(shift % size, 0), *(part(r, r) for r in range(1, size))]))
                parts = [part(other, 0) for other in range(size)]
                group.scatter([parts[shift % size]], [parts]).wait()
                assert torch.equal(parts[shift % size], part(0, 0))
            else:
                group.gather([], [part(rank, rank)]).wait()
                group.scatter([mine[0]], []).wait()
                assert torch.equal(mine[0], part(rank, 0))
        for start in (rank * numel, 5):
            summed = torch.cat([part(rank, other) for other in range(size)] + [torch.zeros(5)])
            group.reduce_scatter_single(summed[start : start + numel], summed[: size * numel]).wait()
            assert torch.equal(summed[start : start + numel], sum(part(other, rank) for other in range(size)))

    ranks(work)


def test_an_expanded_tensor_cannot_take_different_values() -> None:
    groups = groups_of(2)
    sent = groups[0].broadcast([torch.arange(4.0)])
    with pytest.raises(ValueError, match="expanded"):
        groups[1].broadcast([torch.zeros(1).expand(4)]).wait()
    sent.wait()
    for group in groups:
        group.shutdown()


def test_operations_that_mean_nothing_are_refused_at_once(ranks: Ranks[Any]) -> None:
    def work(group: ZmqProcessGroup) -> None:
        for op, dtype in (
            (dist.ReduceOp.BXOR, torch.float32),
            (dist.ReduceOp.MAX, torch.complex64),
            (dist.ReduceOp.AVG, torch.bool),
            *((dist.ReduceOp.SUM, dtype) for dtype in (torch.uint16, torch.float8_e4m3fn, torch.float8_e8m0fnu)),
        ):
            with pytest.raises(TypeError):
                group.allreduce([torch.ones(2, dtype=dtype)], options(dist.AllreduceOptions, reduceOp=op))
        with pytest.raises(TypeError, match="layout"):
            group.broadcast([torch.ones(2, 2).to_sparse()])
        with pytest.raises(ValueError, match="all_gather of 3 elements"):
            group._allgather_base(torch.empty(3 * group.size() + 1), torch.ones(3))
        with pytest.raises(ValueError, match="tags are not negative"):
            group.recv_anysource([torch.ones(1)], -1)
        for root in (-1, group.size()):
            with pytest.raises(ValueError, match=f"broadcast of rank {root} in a group of {group.size()}"):
                group.broadcast([torch.ones(1)], options(dist.BroadcastOptions, rootRank=root))
            with pytest.raises(ValueError, match=f"reduce to rank {root}"):
                group.reduce([torch.ones(1)], options(dist.ReduceOptions, rootRank=root))
            with pytest.raises(ValueError, match=f"gather to rank {root}"):
                group.gather([], [torch.ones(1)], options(dist.GatherOptions, rootRank=root))
            with pytest.raises(ValueError, match=f"scatter of rank {root}"):
                group.scatter([torch.ones(1)], [], options(dist.ScatterOptions, rootRank=root))
        group.barrier().wait()

    ranks(work)


class Elsewhere(Tensor):
    """Its values are not in its memory, as those of a DTensor."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(function)


def test_tensors_without_memory_of_their_own(ranks: Ranks[Any]) -> None:
    """To read these would end the process."""

    def work(group: ZmqProcessGroup) -> None:
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        elsewhere = Tensor._make_wrapper_subclass(Elsewhere, (3,))
        for tensor in (freed, elsewhere, torch.ones(3, device="meta"), torch._efficientzerotensor((3,))):
            with pytest.raises(TypeError, match=r"all_reduce of a .* no memory of its own"):
                group.allreduce([tensor])
            with pytest.raises(TypeError, match="no memory of its own"):
                group.allgather([[torch.empty(3) for _ in range(group.size())]], [tensor])
            if group.size() > 1:
                with pytest.raises(TypeError, match=r"send of a .* no memory of its own"):
                    group.send([tensor], (group.rank() + 1) % group.size())
        pending = AsyncCollectiveTensor(torch.ones(3))  # of a functional collective
        group.allreduce([pending]).wait()
        assert pending.trigger_wait().tolist() == [group.size()] * 3

    ranks(work)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_messages_between_two_ranks(hosts: str) -> None:
    one, other = groups_of(2, hosts=hosts)
    big = content(1, 1_000_003)
    sent = [one.send([each], 1, tag) for tag, each in ((5, big), (6, torch.ones(3)), (5, torch.zeros(0)))]
    small, large, nothing = torch.empty(3), torch.empty_like(big), torch.empty(0)
    other.recv([small], 0, 6).wait()  # the one that was sent first is put aside
    other.recv([large], 0, 5).wait()
    other.recv([nothing], 0, 5).wait()
    assert torch.equal(large, big)
    assert (small == 1).all()
    for handle in sent:
        handle.wait()
    # Both send before either receives.
    both = [one.send([torch.full((4,), 1.0)], 1), other.send([torch.full((4,), 2.0)], 0)]
    mine, theirs = torch.empty(4), torch.empty(4)
    one.recv([mine], 1).wait()
    other.recv([theirs], 0).wait()
    assert (mine == 2).all()
    assert (theirs == 1).all()
    for handle in both:
        handle.wait()
    one.shutdown()
    other.shutdown()


def test_a_message_from_any_rank() -> None:
    groups = groups_of(3)
    groups[2].send([torch.full((2,), 7.0)], 0).wait()
    tensor = torch.empty(2)
    handle = groups[0].recv_anysource([tensor])
    handle.wait()
    assert (tensor == 7).all()
    assert handle.source_rank() == 2
    for group in groups:
        group.shutdown()


def test_handles_end_when_the_operation_does() -> None:
    one, other = groups_of(2)
    tensor = torch.ones(3)
    handle = one.allreduce([tensor])
    assert not handle.is_completed()
    with pytest.raises(TimeoutError, match=r"all_reduce \(operation 1 of group rank 0, rank 1\) has not ended within .* 0.01 s"):
        handle.wait(timedelta(seconds=0.01))
    told: list[float] = []
    future = handle.get_future().then(lambda done: told.append(float(done.value()[0].sum())))
    other.allreduce([torch.ones(3)]).wait()
    handle.wait()
    future.wait()
    assert told == [6.0]
    assert handle.is_success()
    assert handle.exception() is None
    one.shutdown()
    other.shutdown()


def test_callbacks_call_collectives_at_other_moments_on_each_rank(ranks: Ranks[Any]) -> None:
    """Of one size, so that values would be mixed without an error: the first rank's callback comes after the program's next call,
    and that of other ranks before it, in the thread that attaches it or in another one."""

    def work(group: ZmqProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        called, answered = threading.Event(), threading.Event()
        first, second, third = content(rank, 9), content(rank, 9) * 2, content(rank, 9) * 3

        def call(_done: Any) -> Tensor:
            if rank == 0:
                assert called.wait(PATIENCE_S)
            handle = group.allreduce([third])
            answered.set()
            handle.wait()
            return third

        handle = group.allreduce([first])
        if rank == size - 1:
            handle.wait()
        future = handle.get_future().then(call).then(lambda done: done.value() + 1)
        if rank:
            assert answered.wait(PATIENCE_S)
        group.allreduce([second]).wait()
        called.set()
        total = sum(content(each, 9) for each in range(size))
        assert torch.equal(future.wait(), 3 * total + 1)
        assert torch.equal(second, 2 * total)

    ranks(work)


def test_a_callback_that_only_one_rank_has() -> None:
    one, other = groups_of(2, timeout_s=0.3)
    mine = one.allreduce([torch.ones(1)]).get_future().then(lambda _done: one.allreduce([torch.ones(1)]).wait())
    with pytest.raises(MismatchError, match=r"barrier .*other ranks have called another operation before"):
        (other.allreduce([torch.ones(1)]), other.barrier())[1].wait()
    with pytest.raises(PeerTimeoutError, match=r"rank 1 did not answer .* all_reduce \(operation 1 of a callback"):
        mine.wait()
    one.abort()
    other.abort()


def test_a_rank_that_is_late_is_named() -> None:
    one, other = groups_of(2, timeout_s=0.2)
    with pytest.raises(
        PeerTimeoutError,
        match=r"rank 1 did not answer within the timeout of 0.2 s while waiting for broadcast .*raise timeout= of init_p",
    ):
        one.broadcast([torch.ones(1)]).wait()
    with pytest.raises(BrokenGroupError, match=r"barrier .* is not carried out: an earlier operation .* broadcast"):
        one.barrier().wait()  # it would be another operation of the other's
    with pytest.raises(PeerTimeoutError, match=r"rank 0 did not answer .* while waiting for receive from rank 0"):
        other.recv([torch.ones(1)], 0).wait()
    one.abort()
    other.abort()


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_the_timeout_of_later_operations_may_be_set(hosts: str) -> None:
    groups = groups_of(len(hosts), hosts=hosts)
    for group in groups:
        group.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(PeerTimeoutError, match=r"within the timeout of 0.2 s while waiting for receive"):
        groups[0].recv([torch.ones(1)], len(hosts) - 1).wait()
    with pytest.raises(PeerTimeoutError, match=r"within the timeout of 0.2 s"):
        groups[0].barrier().wait()
    for group in groups:
        group.abort()


def test_the_collectives_of_a_program_are_counted() -> None:
    [group] = groups_of(1)
    assert group._get_sequence_number_for_group() == 0
    for _ in range(2):
        group.barrier().wait()
    assert group._get_sequence_number_for_group() == 2
    group.shutdown()


def test_a_rank_that_has_gone_is_named() -> None:
    one, other = groups_of(2)
    other.shutdown()
    with pytest.raises(PeerLostError, match="lost rank 1 while waiting for barrier"):
        one.barrier().wait()
    one.shutdown()
    with pytest.raises(RuntimeError, match="the process group was destroyed"):
        one.barrier()


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(PeerTimeoutError, match=r"rank 1 did not answer within 0.2 s while waiting for it to join the process"):
        rendezvous(dist.HashStore(), 0, ["rank 0", "rank 1"], timedelta(seconds=0.2))


def test_a_rank_of_another_host_that_is_late_or_gone_is_named() -> None:
    one, other = groups_of(2, timeout_s=0.5, hosts="ab")
    with pytest.raises(PeerTimeoutError, match=r"while waiting for all_reduce .*raise timeout= of init_process_group"):
        one.allreduce([torch.ones(8)]).wait()
    one.abort()
    with pytest.raises((PeerLostError, MismatchError), match="rank 0"):  # whatever it has heard first
        other.barrier().wait()
    other.abort()


PROGRAM = Path(__file__).parent / "program.py"


def run_program(tmp_path: Path, *arguments: str) -> list[Program]:
    environ = {**os.environ, "WORLD_SIZE": "2", "STORE": str(tmp_path / "store")}
    return [Program((PYTHON, str(PROGRAM), *arguments), tmp_path, environ | {"RANK": str(rank)}) for rank in range(2)]


def run_whole_program(tmp_path: Path, what: str, *backends: str, ranks: int) -> dict[str, list[str]]:
    """What all ranks print, by backend."""
    program = Program((PYTHON, str(PROGRAM), what, str(tmp_path), str(ranks), *backends), tmp_path, os.environ)
    _, errors = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, errors
    return {backend: [(tmp_path / f"{backend}-{rank}").read_text() for rank in range(ranks)] for backend in backends}


def test_programs_give_what_they_give_with_gloo(tmp_path: Path) -> None:
    """DistributedDataParallel, FSDP2 and DTensor: what they print, digit by digit."""
    found = run_whole_program(tmp_path, "train", "gloo", "zmq", ranks=2)
    assert found["zmq"] == found["gloo"]
    assert all(found["zmq"])


def test_what_else_programs_and_frameworks_ask_of_a_backend(tmp_path: Path) -> None:
    """Inference mode, sparse gradients, compiled models, hooks whose callbacks wait, uneven inputs, checkpoints."""
    found = run_whole_program(tmp_path, "widely", "gloo", "zmq", ranks=2)
    assert found["zmq"] == found["gloo"]
    assert all("total 4.0" in text for text in found["zmq"])


def test_groups_of_ranks_exchange_beside_ddp(tmp_path: Path) -> None:
    """Two groups of two: by gossip the parameters of one process that does the same by the schedule, by synchronous servers those
    of one process on everybody's data, by averaging those that torch's own outer optimizer gives; to summation order in float64."""
    printed = run_whole_program(tmp_path, "hooks", "zmq", ranks=4)
    apart = "apart by less than 1e-12: True\n"
    assert set(printed["zmq"]) == {2 * apart + "learns: True\n" + apart + "refused: True\n"}


def test_a_rank_that_is_killed_ends_the_others_with_its_name(tmp_path: Path) -> None:
    one, other = run_program(tmp_path, "zmq", "wait")
    assert other.stdout.readline() == "waiting\n"
    other.send_signal(signal.SIGKILL)
    _, errors = one.communicate(timeout=PATIENCE_S)
    assert "lost rank 1 while waiting for all_reduce" in errors
    assert "its process has ended" in errors  # and not: the time-out, which is minutes
    other.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_threads_end_with_the_group(hosts: str) -> None:
    before = set(threading.enumerate())
    groups = groups_of(2, hosts=hosts)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda group: group.barrier().wait(), groups))
    received = torch.zeros(1)
    handles = [groups[0].send([torch.ones(1)], 1), groups[1].recv([received], 0)]
    for handle in handles:
        handle.wait()
    assert received == 1
    for group in groups:
        group.shutdown()
    assert set(threading.enumerate()) <= before


def test_where_a_rank_listens_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """At one address, unless the one that others connect to is none of its own."""
    for name in ("ZMQTRAIN_HOST", "ZMQTRAIN_BIND", "ZMQTRAIN_PORTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    settings = settings_here("token", 5.0, encrypted=False)
    assert (settings.host, settings.advertise, settings.ports) == ("127.0.0.1", "", None)
    monkeypatch.setenv("ZMQTRAIN_HOST", "203.0.113.7")  # behind a translation of addresses
    monkeypatch.setenv("ZMQTRAIN_PORTS", "29400-29499")
    settings = settings_here("token", 5.0, encrypted=False)
    assert settings.host in ("::", "0.0.0.0")
    assert (settings.advertise, settings.ports) == ("203.0.113.7", (29400, 29499))
    monkeypatch.setenv("ZMQTRAIN_BIND", "127.0.0.1")
    assert settings_here("token", 5.0, encrypted=False).host == "127.0.0.1"
    monkeypatch.delenv("ZMQTRAIN_BIND")
    monkeypatch.setenv("ZMQTRAIN_HOST", "gate.lab")
    assert settings_here("token", 5.0, encrypted=False).advertise == "gate.lab"


def test_an_address_is_that_of_the_way_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZMQTRAIN_HOST", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    store = dist.PrefixStore("group", dist.TCPStore("127.0.0.2", 0, is_master=True, wait_for_workers=False))
    assert listening_address(store) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.7")
    assert listening_address(store) == "127.0.0.1"  # init_method has another
    outward = listening_address(dist.HashStore())
    resolve = socket.getaddrinfo

    def loopback(name: str, *further: Any, **named: Any) -> Any:  # as /etc/hosts often does for the machine's own name
        return resolve("127.0.1.1" if name == "this-machine" else name, *further, **named)

    monkeypatch.setattr(socket, "getaddrinfo", loopback)
    monkeypatch.setenv("MASTER_ADDR", "this-machine")
    assert listening_address(dist.HashStore()) == outward
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert ip_address(listening_address(dist.HashStore())).is_loopback
