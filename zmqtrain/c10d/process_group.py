"""torch's process group, carried by zmqtrain."""

from __future__ import annotations

import itertools
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from zmqtrain.c10d.descriptor import Descriptor, checksum
from zmqtrain.c10d.eager import never_compiled
from zmqtrain.c10d.errors import UnsupportedError, WrongCallError, of_torch
from zmqtrain.c10d.flat import Flat, Flats, apart, with_memory
from zmqtrain.c10d.operations import Reduction, reduction_of
from zmqtrain.c10d.order import PROGRAM, Following, next_call
from zmqtrain.c10d.sparse import add_sparse
from zmqtrain.c10d.transport import RankTransport
from zmqtrain.c10d.work import Handle, Lane, after_the_device

#: Results of one element whose handles stay: `DistributedDataParallel.join` gives the handle of its flag to torch's C++ code, which
#: finds a Python handle's future only while the Python object lives.
KEPT_HANDLES = 16
#: How long destroying the group waits for pending operations.
CLOSE_S = 5.0


#: Typed as Any: torch's own description of the class has more overloads than it calls.
_ProcessGroup: Any = dist.ProcessGroup


@never_compiled
class ZmqProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Implements every operation of `torch.distributed` for CPU tensors; those on a GPU are staged through host memory.

    Operations of one group are carried out one after another, in the order of the calls: in a thread of their own, or where the
    caller waits at once and nothing else is pending, in the caller's. Messages between two ranks have further threads. Results have
    the same bits on all ranks, and in every run.
    """

    def __init__(self, transport: RankTransport, rank: int, size: int, names: Sequence[str]) -> None:
        super().__init__(rank, size)
        self._transport, self._rank_here, self._size_here, self._names = transport, rank, size, names
        self._lane = Lane("zmqtrain-c10d", transport.goes_on, transport.look, transport.timeout_s)
        self._lanes: dict[int, Lane] = {}  # receiver -> its messages
        self._opening = threading.Lock()
        self._kept: deque[Handle] = deque(maxlen=KEPT_HANDLES)
        self._count = itertools.count(1)
        self._number = 0  # the last one of the count
        self.callbacks = False
        """Whether a future of this group has a callback (`zmqtrain.c10d.order`)."""
        self._closed = False
        self._group_name = self._group_description = ""

    # This rank.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "zmq"

    def name(self) -> str:
        return "zmq"

    def rank(self) -> int:
        return self._rank_here

    def size(self) -> int:
        return self._size_here

    # Torch asks a group of its own for the backend of a device. This one is the backend of all of its devices itself.

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> ZmqProcessGroup:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    # Torch keeps names in backends written in C++; a Python group keeps its own.

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations that are called from now on wait for other ranks. All ranks set the same.

        `torch.distributed.distributed_c10d._set_pg_timeout` warns, and does nothing, for every backend but gloo and NCCL.
        """
        self._transport.timeout_s = self._lane.timeout_s = timeout.total_seconds()

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives the program has called."""
        return self._number

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: all ranks begin with 0."""

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._group_description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_description

    # Collectives.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        return self._all_reduce(tensors, _operation(opts), "all_reduce", opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        return self._all_reduce(tensors, _operation(opts), "all_reduce_coalesced", opts)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        opts = dist.ReduceOptions() if opts is None else opts
        self._require_rank("reduce to", opts.rootRank)
        return self._all_reduce(tensors, opts.reduceOp, "reduce", opts, root=opts.rootRank)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        root = 0 if opts is None else opts.rootRank
        self._require_rank("broadcast of", root)

        def do(call: _Call) -> None:
            for tensor in tensors:
                with Flat(tensor, write=self._rank_here != root) as flat:
                    call.begin(flat.dtype, flat.numel(), root=root)
                    self._transport.broadcast(flat, root, call.what)

        return self._submit(tensors, "broadcast", do, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        for targets, own in zip(outputs, inputs, strict=True):
            self._require_parts("all_gather", targets, own, of_rank=self._rank_here)

        def do(call: _Call) -> None:
            for targets, own in zip(outputs, inputs, strict=True):
                with Flats(targets) as flats, Flat(own, write=False) as flat:
                    call.begin_parts(flats)
                    self._all_gather(flats, flat, call.what)

        return self._submit([target for targets in outputs for target in targets], "all_gather", do, opts, reads=inputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        # `outputs[r][i]` is rank r's `inputs[i]`.
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        for output, own in zip(outputs, inputs, strict=True):
            if output.numel() != own.numel() * self._size_here:
                raise WrongCallError(
                    f"all_gather of {own.numel()} elements over {self._size_here} ranks into {output.numel()} elements"
                )
            _require_dtype("all_gather_into_tensor", [output, own])

        def do(call: _Call) -> None:
            for output, own in zip(outputs, inputs, strict=True):
                with Flat(output) as target, Flat(own, write=False) as flat:
                    call.begin(flat.dtype, flat.numel())
                    self._all_gather(self._equal_parts(target), flat, call.what)

        return self._submit(outputs, "all_gather_into_tensor", do, opts, reads=inputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Handle:
        return self.all_gather_single_coalesced([output], [own], opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        root = 0 if opts is None else opts.rootRank
        self._require_rank("gather to", root)
        targets = outputs[0] if self._rank_here == root else None
        if targets is not None:
            self._require_parts("gather", targets, inputs[0])

        def do(call: _Call) -> None:
            with Flats(targets or []) as flats, Flat(inputs[0], write=False) as flat:
                call.begin(flat.dtype, flat.numel(), root=root)
                [own] = apart([flat], flats, (0, self._rank_here))
                self._transport.gather(flats if targets is not None else None, own, root, call.what)

        return self._submit(targets or [], "gather", do, opts, reads=inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Handle:
        root = 0 if opts is None else opts.rootRank
        self._require_rank("scatter of", root)
        parts = inputs[0] if self._rank_here == root else None
        if parts is not None:
            self._require_parts("scatter", parts, outputs[0])

        def do(call: _Call) -> None:
            with Flat(outputs[0]) as target, Flats(parts or [], write=False) as flats:
                call.begin(target.dtype, target.numel(), root=root)
                given = apart(flats, [target], (self._rank_here, 0))
                self._transport.scatter(target, given if parts is not None else None, root, call.what)

        return self._submit(outputs, "scatter", do, opts, reads=parts or [])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Handle:
        operation = _operation(opts)
        reduction = reduction_of(operation, outputs[0].dtype, self._size_here)
        for output, parts in zip(outputs, inputs, strict=True):
            self._require_parts("reduce_scatter", parts, output, of_rank=self._rank_here)

        def do(call: _Call) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                with Flat(output) as target, Flats(parts, write=False) as flats:
                    call.begin_parts(flats, detail=(reduction.name,))
                    self._reduce_scatter(target, flats, reduction, call.what)

        return self._submit(outputs, "reduce_scatter", do, opts, reads=[part for parts in inputs for part in parts])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        reduction = reduction_of(_operation(opts), outputs[0].dtype, self._size_here)
        for output, whole in zip(outputs, inputs, strict=True):
            if whole.numel() != output.numel() * self._size_here:
                raise WrongCallError(
                    f"reduce_scatter of {whole.numel()} elements over {self._size_here} ranks into {output.numel()}"
                )
            _require_dtype("reduce_scatter_tensor", [output, whole])

        def do(call: _Call) -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                with Flat(output) as target, Flat(whole, write=False) as flat:
                    call.begin(flat.dtype, flat.numel(), detail=(reduction.name,))
                    self._reduce_scatter(target, self._equal_parts(flat), reduction, call.what)

        return self._submit(outputs, "reduce_scatter_tensor", do, opts, reads=inputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Handle:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        for name, tensors in (("outputs", outputs), ("inputs", inputs)):
            if len(tensors) != self._size_here:
                raise WrongCallError(f"all_to_all of {len(tensors)} {name} over {self._size_here} ranks: give one for each rank")
        _require_dtype("all_to_all", [*outputs, *inputs])

        def do(call: _Call) -> None:
            with Flats(outputs) as targets, Flats(inputs, write=False) as flats:
                call.begin(flats[0].dtype)
                self._all_to_all(targets, flats, call.what)

        return self._submit(outputs, "all_to_all", do, opts, reads=inputs)

    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Handle:
        _require_dtype("all_to_all_single", [output, whole])
        self._require_splits("output", output, output_splits)
        self._require_splits("input", whole, input_splits)

        def do(call: _Call) -> None:
            with Flat(output) as target, Flat(whole, write=False) as flat:
                call.begin(flat.dtype)
                self._all_to_all(self._split(target, output, output_splits), self._split(flat, whole, input_splits), call.what)

        return self._submit([output], "all_to_all_single", do, opts, reads=[whole])

    def barrier(self, opts: Any = None) -> Handle:
        def do(call: _Call) -> None:
            call.begin()
            self._transport.barrier(call.what)

        return self._submit([], "barrier", do, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names a missing rank.

        Every barrier does. `torch.distributed.monitored_barrier` refuses all backends but gloo: call this one as
        ``torch.distributed.group.WORLD.monitored_barrier()``. ``wait_all_ranks`` has no effect: one rank is named.
        """
        self.barrier().wait(timeout)

    # Messages between two ranks.

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Handle:
        self._require_open("send")
        for tensor in tensors:
            _require_kind("send", tensor)
        what = self._message("send to", to, tag)

        def do() -> None:
            for tensor in tensors:
                with Flat(tensor, write=False) as flat:
                    self._transport.send(to, tag, flat, what)

        handle = Handle(tensors, what)
        with _in_profile("send", handle):
            return self._lane_of(to).submit(handle, do)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Handle:
        return self._receive("recv", tensors, [source], tag, self._message("receive from", source, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Handle:
        """Receive the next message with this tag, of any rank."""
        _require_tag("recv", tag)
        others = [rank for rank in range(self._size_here) if rank != self._rank_here]
        what = f"receive from any rank (tag {tag}, group {self._group_text()})"
        return self._receive("recv_any_source", tensors, others, tag, what)

    # The end.

    def shutdown(self) -> None:
        """End pending operations, and leave the group. Called by `torch.distributed.destroy_process_group`."""
        self._close(None)

    def abort(self) -> None:
        """Abandon pending operations at once, and leave."""
        self._close(RuntimeError("the process group was aborted"))

    # Names of earlier releases of torch.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _all_reduce(
        self, tensors: list[Tensor], operation: dist.ReduceOp, name: str, opts: Any, *, root: int | None = None
    ) -> Handle:
        reductions = [reduction_of(operation, tensor.dtype, self._size_here) for tensor in tensors]
        for tensor in tensors:
            _require_kind(name, tensor, sparse=root is None)
            if tensor.is_sparse and reduction_of(operation, tensor.dtype, 1).name != str(dist.ReduceOp.SUM):
                raise WrongCallError(f"{name} of a sparse tensor: only SUM is defined, not {operation}")

        def do(call: _Call) -> None:
            for tensor, reduction in zip(tensors, reductions, strict=True):
                if tensor.is_sparse:
                    add_sparse(tensor, self._size_here, partial(self._gather_uneven, call))
                    continue
                receives = root is None or root == self._rank_here
                with Flat(tensor, write=receives) as flat:
                    call.begin(flat.dtype, flat.numel(), root=-1 if root is None else root, detail=(reduction.name,))
                    own = reduction.before(flat)
                    self._transport.all_reduce(own, reduction.combine, call.what, root=root)
                    if receives:
                        reduction.after(own)
                        if own is not flat:
                            flat.copy_(own)

        return self._submit(tensors, name, do, opts)

    def _gather_uneven(self, call: _Call, own: Tensor, numels: Sequence[int]) -> list[Tensor]:
        """All ranks' flat tensors, of these lengths."""
        outputs = [torch.empty(numel, dtype=own.dtype) for numel in numels]
        call.begin_parts(outputs)
        self._transport.all_gather(outputs, own, call.what)
        return outputs

    def _all_gather(self, outputs: Sequence[Tensor], own: Tensor, what: str) -> None:
        [own] = apart([own], outputs, (0, self._rank_here))
        self._transport.all_gather(outputs, own, what)

    def _all_to_all(self, outputs: Sequence[Tensor], parts: Sequence[Tensor], what: str) -> None:
        self._transport.all_to_all(outputs, apart(parts, outputs, (self._rank_here, self._rank_here)), what)

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], reduction: Reduction, what: str) -> None:
        parts = apart(parts, [output], (self._rank_here, 0))
        self._transport.reduce_scatter(output, [reduction.before(part) for part in parts], reduction.combine, what)
        reduction.after(output)

    def _receive(self, name: str, tensors: list[Tensor], sources: list[int], tag: int, what: str) -> Handle:
        self._require_open(name)
        if len(tensors) != 1:
            raise WrongCallError(f"a receive of {len(tensors)} tensors: one message has one")
        _require_kind(name, tensors[0])
        if not sources:
            raise WrongCallError("a receive from any rank: there is no other rank in the group")
        handle, flat = Handle(tensors, what), Flat(tensors[0])
        finish = after_the_device(tensors, flat.write_back)

        def done(source: int, error: Exception | None) -> None:
            handle.source = source
            try:
                if error is None:
                    finish()
            except Exception as failed:  # noqa: BLE001 - passed to those who wait for the message
                error = failed
            handle.end(None if error is None else of_torch(error))

        with _in_profile(name, handle):
            self._transport.post(sources, tag, flat.flat, what, done)
        return handle

    def _message(self, name: str, peer: int, tag: int) -> str:
        _require_tag(name, tag)
        if not 0 <= peer < self._size_here or peer == self._rank_here:
            raise WrongCallError(
                f"{name} rank {peer} by rank {self._rank_here} of a group of {self._size_here}: give another rank's number"
            )
        return f"{name} {self._names[peer]} (tag {tag})"

    def _require_rank(self, name: str, root: int) -> None:
        if not 0 <= root < self._size_here:
            raise WrongCallError(f"{name} rank {root} in a group of {self._size_here}: give the number of one of its ranks")

    def _equal_parts(self, flat: Tensor) -> list[Tensor]:
        """A part for each rank."""
        numel = flat.numel() // self._size_here
        return [flat[numel * rank : numel * (rank + 1)] for rank in range(self._size_here)]

    def _require_parts(self, name: str, parts: Sequence[Tensor], own: Tensor, *, of_rank: int | None = None) -> None:
        """Raise `ValueError` unless there is a part for each rank: all of ``own``'s size, or only that of ``of_rank``."""
        if len(parts) != self._size_here:
            raise WrongCallError(f"{name} with {len(parts)} tensors over {self._size_here} ranks: give one for each rank")
        _require_dtype(name, [own, *parts])
        for rank, part in enumerate(parts):
            if part.numel() != own.numel() and of_rank in (None, rank):
                raise WrongCallError(
                    f"{name}: rank {rank}'s part has {part.numel()} elements, and this rank's tensor {own.numel()}"
                )

    def _require_splits(self, side: str, tensor: Tensor, splits: Sequence[int]) -> None:
        rows = tensor.size(0) if tensor.dim() else 0
        if not splits:
            if rows % self._size_here:
                raise WrongCallError(f"all_to_all_single: {rows} rows of the {side} cannot be divided by {self._size_here} ranks")
        elif len(splits) != self._size_here or sum(splits) != rows or min(splits) < 0:
            raise WrongCallError(
                f"all_to_all_single: {side} splits {list(splits)} for {self._size_here} ranks and {rows} rows: give one for each "
                "rank, which together are all rows"
            )

    def _split(self, flat: Tensor, tensor: Tensor, splits: list[int]) -> list[Tensor]:
        """The parts for each rank: equal, or with ``splits`` rows."""
        if not splits:
            return self._equal_parts(flat)
        row = tensor[0].numel() if tensor.size(0) else 0
        return list(torch.split(flat, [row * each for each in splits]))

    def _submit(
        self, tensors: Sequence[Tensor], name: str, do: Callable[[_Call], None], opts: Any, *, reads: Sequence[Tensor] = ()
    ) -> Handle:
        self._require_open(name)
        for tensor in (*tensors, *reads):
            _require_kind(name, tensor, sparse=name.startswith("all_reduce"))
        stream, number = next_call(self, self._count.__next__)
        if stream == PROGRAM:
            self._number = number
        what = f"{name} (operation {number} of {'a callback, ' * (stream != PROGRAM)}group {self._group_text()})"
        before = self.callbacks or stream != PROGRAM
        call = _Call(self._transport, name, stream, number, what, _described(tensors, reads) if _in_detail() else "", before)
        handle = Handle(tensors, what, lambda: Following(self, (stream, number)))
        if not _profiler_enabled():
            waits = not getattr(opts, "asyncOp", True)  # torch says whether it waits at once
            self._lane.submit(handle, lambda: do(call), reads=reads, waits=waits, stream=stream)
            if len(tensors) == 1 and tensors[0].numel() == 1:
                self._kept.append(handle)
            return handle
        with _in_profile(name, handle):
            return self._lane.submit(handle, lambda: do(call), reads=reads, stream=stream)

    def _require_open(self, name: str) -> None:
        if self._closed:
            raise RuntimeError(f"{name}: the process group was destroyed")

    def _group_text(self) -> str:
        return ", ".join(self._names) if self._size_here <= 4 else f"{self._names[0]} ... {self._names[-1]}"

    def _lane_of(self, to: int) -> Lane:
        with self._opening:
            if to not in self._lanes:
                self._lanes[to] = Lane(f"zmqtrain-c10d-send-{to}")
            return self._lanes[to]

    def _close(self, error: Exception | None) -> None:
        if self._closed:
            return
        self._closed = True
        lanes = [self._lane, *self._lanes.values()]
        for lane in lanes:
            lane.close()
        if error is None:
            deadline = time.monotonic() + CLOSE_S
            for lane in lanes:
                lane.join(max(0.0, deadline - time.monotonic()))
        self._transport.close(error)


class _Call:
    """A collective in progress, as this rank describes it to the others."""

    def __init__(self, transport: RankTransport, name: str, stream: int, number: int, what: str, more: str, before: bool) -> None:
        self._transport, self._name, self._stream, self._number = transport, name, stream, number
        self.what, self._more, self._before = what, more, before

    def begin(self, dtype: torch.dtype | None = None, numel: int = -1, *, root: int = -1, detail: tuple[object, ...] = ()) -> None:
        """Before each use of the transport. The arguments are those of `Descriptor`."""
        descriptor = Descriptor(self._name, self._number, dtype, numel, root, checksum(*detail), self._stream)
        self._transport.begin(descriptor, self._more, before=self._before)

    def begin_parts(self, parts: Sequence[Tensor], *, detail: tuple[object, ...] = ()) -> None:
        """The same for parts whose lengths all ranks know."""
        numels = [part.numel() for part in parts]
        self.begin(parts[0].dtype, numels[0] if len(set(numels)) == 1 else -1, detail=(*numels, *detail))


@contextmanager
def _in_profile(name: str, handle: Handle) -> Iterator[None]:
    """The operation is called here; torch's profiler, if it runs, shows it from now until it ends."""
    if not _profiler_enabled():
        yield
        return
    with torch.profiler.record_function(f"zmq:{name}") as span:
        yield
        span._call_end_callbacks_on_future(handle.get_future())


def _require_kind(name: str, tensor: Tensor, *, sparse: bool = False) -> None:
    if tensor.layout is not torch.strided and not (sparse and tensor.layout is torch.sparse_coo):
        raise UnsupportedError(
            f"{name} of a tensor with layout {tensor.layout}: the zmq backend supports dense tensors, and sums of sparse_coo"
        )
    if tensor.layout is torch.strided:
        try:
            with_memory(tensor)  # in the caller's thread, which may have to wait
        except UnsupportedError as error:
            raise UnsupportedError(f"{name} of {error}") from None


def _require_tag(name: str, tag: int) -> None:
    if tag < 0:
        raise WrongCallError(f"{name} with tag {tag}: tags are not negative")


def _require_dtype(name: str, tensors: Sequence[Tensor]) -> None:
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    if len(dtypes) > 1:
        raise UnsupportedError(f"{name} of tensors of {' and '.join(map(str, dtypes))}: all must have one dtype")


def _in_detail() -> bool:
    return os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"


def _described(tensors: Sequence[Tensor], reads: Sequence[Tensor]) -> str:
    """Shapes, and the line of the program that called."""
    shapes = ", ".join(str(list(tensor.shape)) for tensor in (*tensors, *reads))
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(ours)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
    return f"This rank has tensors of shapes {shapes or 'none'}, and called at {where}"


def _operation(opts: Any) -> dist.ReduceOp:
    operation: dist.ReduceOp = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
    return operation
