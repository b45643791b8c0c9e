"""torch's process group, carried by zmqtrain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zmqtrain.c10d.operations import Reduction, reduction_of
from zmqtrain.c10d.transport import Transport
from zmqtrain.c10d.work import Handle, Lane

#: How often a receive from any rank looks at all of them.
ANY_S = 0.0005
#: How long destroying the group waits for operations that are under way.
CLOSE_S = 5.0


#: Typed as anything: torch's own description of the class overloads its methods in more ways than it calls them.
_ProcessGroup: Any = dist.ProcessGroup


class ZmqProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Implements every operation of `torch.distributed` for CPU tensors; those on a GPU are staged through host memory.

    Operations of one group are carried out one after another, in the order of the calls, in a thread beside the caller's; messages
    between two ranks in threads of their own. Results are the same bits on all ranks, and on every run.
    """

    def __init__(self, transport: Transport, rank: int, size: int, names: Sequence[str]) -> None:
        super().__init__(rank, size)
        self._transport, self._rank_here, self._size_here, self._names = transport, rank, size, names
        self._lane = Lane("zmqtrain-c10d")
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._opening = threading.Lock()
        self._count = 0
        self._closed = False
        self._group_name = self._group_description = ""

    # Who this is.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "zmq"

    def name(self) -> str:
        return "zmq"

    def rank(self) -> int:
        return self._rank_here

    def size(self) -> int:
        return self._size_here

    # Torch keeps names in backends written in C++; a group that has none keeps its own.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._group_description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_description

    # All ranks together.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        return self._all_reduce(tensors, _operation(opts), "all_reduce")

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        return self._all_reduce(tensors, _operation(opts), "all_reduce_coalesced")

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        opts = dist.ReduceOptions() if opts is None else opts
        return self._all_reduce(tensors, opts.reduceOp, "reduce", root=opts.rootRank)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Handle:
        root = 0 if opts is None else opts.rootRank

        def do(what: str) -> None:
            for tensor in tensors:
                with _Flat(tensor) as flat:
                    self._transport.broadcast(flat, root, what)

        return self._submit(tensors, "broadcast", do)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        def do(what: str) -> None:
            for targets, own in zip(outputs, inputs, strict=True):
                with _Flats(targets) as flats, _Flat(own, write=False) as flat:
                    self._transport.all_gather(flats, flat, what)

        return self._submit([target for targets in outputs for target in targets], "all_gather", do)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        # `outputs[r][i]` is rank r's `inputs[i]`.
        return self.allgather([list(column) for column in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        def do(what: str) -> None:
            for output, own in zip(outputs, inputs, strict=True):
                with _Flat(output) as target, _Flat(own, write=False) as flat:
                    self._transport.all_gather(target.chunk(self._size_here), flat, what)

        for output, own in zip(outputs, inputs, strict=True):
            if output.numel() != own.numel() * self._size_here:
                raise ValueError(
                    f"all_gather of {own.numel()} elements over {self._size_here} ranks into {output.numel()} elements"
                )
        return self._submit(outputs, "all_gather_into_tensor", do)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Handle:
        return self.all_gather_single_coalesced([output], [own], opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Handle:
        root = 0 if opts is None else opts.rootRank
        targets = outputs[0] if self._rank_here == root else None

        def do(what: str) -> None:
            with _Flats(targets or []) as flats, _Flat(inputs[0], write=False) as flat:
                self._transport.gather(flats if targets is not None else None, flat, root, what)

        return self._submit(targets or [], "gather", do, reads=inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Handle:
        root = 0 if opts is None else opts.rootRank
        parts = inputs[0] if self._rank_here == root else None

        def do(what: str) -> None:
            with _Flat(outputs[0]) as target, _Flats(parts or [], write=False) as flats:
                self._transport.scatter(target, flats if parts is not None else None, root, what)

        return self._submit(outputs, "scatter", do)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Handle:
        reduction = reduction_of(_operation(opts), outputs[0].dtype, self._size_here)

        def do(what: str) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                with _Flat(output) as target, _Flats(parts, write=False) as flats:
                    self._reduce_scatter(target, flats, reduction, what)

        return self._submit(outputs, "reduce_scatter", do)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        reduction = reduction_of(_operation(opts), outputs[0].dtype, self._size_here)

        def do(what: str) -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                with _Flat(output) as target, _Flat(whole, write=False) as flat:
                    self._reduce_scatter(target, flat.chunk(self._size_here), reduction, what)

        for output, whole in zip(outputs, inputs, strict=True):
            if whole.numel() != output.numel() * self._size_here:
                raise ValueError(f"reduce_scatter of {whole.numel()} elements over {self._size_here} ranks into {output.numel()}")
        return self._submit(outputs, "reduce_scatter_tensor", do)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Handle:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Handle:
        def do(what: str) -> None:
            with _Flats(outputs) as targets, _Flats(inputs, write=False) as flats:
                self._transport.all_to_all(targets, flats, what)

        return self._submit(outputs, "all_to_all", do)

    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Handle:
        def do(what: str) -> None:
            with _Flat(output) as target, _Flat(whole, write=False) as flat:
                self._transport.all_to_all(self._split(target, output, output_splits), self._split(flat, whole, input_splits), what)

        return self._submit([output], "all_to_all_single", do)

    def barrier(self, opts: Any = None) -> Handle:
        return self._submit([], "barrier", self._transport.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier; the error names a rank that is missing."""
        self.barrier().wait(timeout)

    # Two ranks.

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Handle:
        def do(what: str) -> None:
            for tensor in tensors:
                with _Flat(tensor, write=False) as flat:
                    self._transport.send(to, tag, flat, what)

        return self._submit(tensors, f"send to {self._names[to]}", do, lane=self._lane_of("send", to))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Handle:
        handle = self._submit(
            tensors, f"receive from {self._names[source]}", lambda what: self._receive(tensors, source, tag, what),
            lane=self._lane_of("receive", source),
        )  # fmt: skip
        handle.source = source
        return handle

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Handle:
        """Receive from any rank. Meanwhile no receive from a named rank may be under way."""
        holder: list[Handle] = []
        known = threading.Event()

        def do(what: str) -> None:
            known.wait()
            others = [rank for rank in range(self._size_here) if rank != self._rank_here]
            while True:
                for source in others:
                    if self._transport.waiting(source):
                        holder[0].source = source
                        self._receive(tensors, source, tag, what)
                        return
                time.sleep(ANY_S)  # there is no waiting at the words of all ranks at once

        holder.append(self._submit(tensors, "receive from any rank", do, lane=self._lane_of("receive", -1)))
        known.set()
        return holder[0]

    # The end.

    def shutdown(self) -> None:
        """End what is under way, and leave the group. Called by `torch.distributed.destroy_process_group`."""
        self._close(None)

    def abort(self) -> None:
        """Give up what is under way at once, and leave."""
        self._close(RuntimeError("the process group was aborted"))

    # Names of earlier releases of torch.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _all_reduce(self, tensors: list[Tensor], operation: dist.ReduceOp, name: str, root: int | None = None) -> Handle:
        reductions = [reduction_of(operation, tensor.dtype, self._size_here) for tensor in tensors]

        def do(what: str) -> None:
            for tensor, reduction in zip(tensors, reductions, strict=True):
                receives = root is None or root == self._rank_here
                with _Flat(tensor, write=receives) as flat:
                    own = reduction.before(flat)
                    self._transport.all_reduce(own, reduction.combine, what, root=root)
                    if receives:
                        reduction.after(own)
                        if own is not flat:
                            flat.copy_(own)

        return self._submit(tensors, name, do)

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], reduction: Reduction, what: str) -> None:
        self._transport.reduce_scatter(output, [reduction.before(part) for part in parts], reduction.combine, what)
        reduction.after(output)

    def _receive(self, tensors: list[Tensor], source: int, tag: int, what: str) -> None:
        for tensor in tensors:
            with _Flat(tensor) as flat:
                self._transport.receive(source, tag, flat, what)

    def _split(self, flat: Tensor, tensor: Tensor, splits: list[int]) -> list[Tensor]:
        """The parts for each rank: equal, or with ``splits`` rows."""
        if not splits:
            return list(flat.chunk(self._size_here)) if flat.numel() else [flat] * self._size_here
        row = tensor[0].numel() if tensor.size(0) else 0
        return list(torch.split(flat, [row * each for each in splits]))

    def _submit(
        self,
        tensors: Sequence[Tensor],
        name: str,
        do: Callable[[str], None],
        *,
        lane: Lane | None = None,
        reads: Sequence[Tensor] = (),
    ) -> Handle:
        if self._closed:
            raise RuntimeError(f"{name}: the process group was destroyed")
        self._count += 1
        what = f"{name} (operation {self._count} of group {self._group_text()})"
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise TypeError(f"{name} of a tensor with layout {tensor.layout}: the zmq backend carries dense ones")
        return (lane or self._lane).submit(tensors, what, lambda: do(what), reads=reads)

    def _group_text(self) -> str:
        return ", ".join(self._names) if self._size_here <= 4 else f"{self._names[0]} ... {self._names[-1]}"

    def _lane_of(self, direction: str, peer: int) -> Lane:
        with self._opening:
            key = (direction, peer)
            if key not in self._lanes:
                self._lanes[key] = Lane(f"zmqtrain-c10d-{direction}-{peer}")
            return self._lanes[key]

    def _close(self, error: BaseException | None) -> None:
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


class _Flat:
    """A tensor as flat memory of the host, contiguous; what is written there goes back into the tensor at the end."""

    def __init__(self, tensor: Tensor, *, write: bool = True) -> None:
        self._tensor, self._write = tensor.detach(), write
        self._copied = tensor.device.type != "cpu" or not tensor.is_contiguous()
        self._flat = (self._tensor.cpu() if tensor.device.type != "cpu" else self._tensor).contiguous().view(-1)

    def __enter__(self) -> Tensor:
        return self._flat

    def __exit__(self, kind: object, *_: object) -> None:
        if self._copied and self._write and kind is None:
            self._tensor.copy_(self._flat.view(self._tensor.shape))


class _Flats:
    """Several tensors so."""

    def __init__(self, tensors: Sequence[Tensor], *, write: bool = True) -> None:
        self._flats = [_Flat(tensor, write=write) for tensor in tensors]

    def __enter__(self) -> list[Tensor]:
        return [flat.__enter__() for flat in self._flats]

    def __exit__(self, *what: object) -> None:
        for flat in self._flats:
            flat.__exit__(*what)


def _operation(opts: Any) -> dist.ReduceOp:
    operation: dist.ReduceOp = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
    return operation
