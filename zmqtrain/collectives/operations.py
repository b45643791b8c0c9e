"""The collectives: every member of the group awaits the same call, and the payload is changed in place.

All of them guarantee the following. Every rank ends with identical bits, and the order of additions is fixed by sizes and ranks,
not by timing. On return everything this rank sent was delivered or copied, and the memory is the caller's again. Beyond the payload
they need only the memory that the endpoint's byte credit lets peers fill ahead. Many may run at once; ``tag`` must be unique among
those of the group. They raise `PeerLostError` that names the first lost member, on every rank; after an error or a cancellation the
content of the payload is undefined. They work with any `Payload`, including phantoms.
"""

from __future__ import annotations

from collections.abc import Callable

from zmqtrain.collectives.call import carry_out, collective, pieces
from zmqtrain.collectives.choose import (
    AllGatherAlgorithm,
    AllReduceAlgorithm,
    ReduceScatterAlgorithm,
    choose_all_gather,
    choose_all_reduce,
    choose_reduce_scatter,
    piece_bytes,
)
from zmqtrain.collectives.group import Group
from zmqtrain.collectives.schedule import (
    Schedule,
    binomial_tree,
    bruck_all_gather,
    dissemination,
    doubling_all_reduce,
    halving_all_reduce,
    halving_reduce_scatter,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from zmqtrain.net.endpoint import Tag
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.value import ValuePayload

_ALL_REDUCE: dict[AllReduceAlgorithm, Callable[[int, int, int], Schedule]] = {
    "ring": ring_all_reduce,
    "halving": halving_all_reduce,
    "doubling": doubling_all_reduce,
}
_REDUCE_SCATTER: dict[ReduceScatterAlgorithm, Callable[[int, int, int], Schedule]] = {
    "ring": ring_reduce_scatter,
    "halving": halving_reduce_scatter,
}
_ALL_GATHER: dict[AllGatherAlgorithm, Callable[[int, int, int], Schedule]] = {
    "ring": ring_all_gather,
    "bruck": bruck_all_gather,
}


async def all_reduce(
    group: Group, payload: Payload, tag: Tag, *, algorithm: AllReduceAlgorithm | None = None, priority: int = 0
) -> None:
    """The payload becomes the sum of all members' payloads. ``doubling`` copies what it sends, so it suits small payloads."""
    schedule = _ALL_REDUCE[algorithm or choose_all_reduce(payload.nbytes, group.size)]
    await _run("all_reduce", group, payload, tag, priority, schedule)


async def reduce_scatter(
    group: Group, payload: Payload, tag: Tag, *, algorithm: ReduceScatterAlgorithm | None = None, priority: int = 0
) -> None:
    """Part ``bounds(payload.numel, group.size)[group.rank]`` becomes the sum of all members' parts; the rest is scratch."""
    schedule = _REDUCE_SCATTER[algorithm or choose_reduce_scatter(payload.nbytes, group.size)]
    await _run("reduce_scatter", group, payload, tag, priority, schedule)


async def all_gather(
    group: Group, payload: Payload, tag: Tag, *, algorithm: AllGatherAlgorithm | None = None, priority: int = 0
) -> None:
    """Each member's part ``bounds(payload.numel, group.size)[rank]`` reaches all members."""
    schedule = _ALL_GATHER[algorithm or choose_all_gather(payload.nbytes, group.size)]
    await _run("all_gather", group, payload, tag, priority, schedule)


async def broadcast(group: Group, payload: Payload, tag: Tag, *, root: int = 0, priority: int = 0) -> None:
    """The payload of rank ``root`` reaches all members, down a binomial tree; each piece is sent on as soon as it has arrived."""
    if group.size == 1 or not payload.numel:
        return
    parent, children = binomial_tree(group.size, group.rank, root)
    async with collective(group, "broadcast", tag, priority, to_send=payload.nbytes * len(children)) as call:
        for start, stop in pieces(((0, payload.numel),), _piece(group, payload, payload.nbytes)):
            part = payload.part(start, stop)
            if parent is not None:
                await call.receive(parent, part)
            for child in children:
                call.post(child, part)


async def barrier(group: Group, tag: Tag, *, priority: int = 0) -> None:
    """Returns once all members have called it. The tag may be used again at once."""
    if group.size == 1:
        return
    async with collective(group, "barrier", tag, priority) as call:
        nothing = ValuePayload()
        for to, source in dissemination(group.size, group.rank):
            call.post(to, nothing)
            await call.receive(source, nothing)


def sent_by_all_reduce(numel: int, itemsize: int, size: int, rank: int) -> tuple[int, int]:
    """Messages and bytes that a rank sends in an `all_reduce` of ``numel`` elements. Pure."""
    if size == 1 or not numel:
        return 0, 0
    steps = _ALL_REDUCE[choose_all_reduce(numel * itemsize, size)](numel, size, rank)
    sizes = [sum(stop - start for start, stop in step.out) * itemsize for step in steps]
    return sum(map(bool, sizes)), sum(sizes)


async def _run(
    name: str, group: Group, payload: Payload, tag: Tag, priority: int, schedule: Callable[[int, int, int], Schedule]
) -> None:
    if group.size == 1 or not payload.numel:
        return
    steps = schedule(payload.numel, group.size, group.rank)
    elements = sum(stop - start for step in steps for start, stop in step.out)
    to_send = elements * (payload.nbytes // payload.numel)
    async with collective(group, name, tag, priority, to_send=to_send) as call:
        await carry_out(call, steps, payload, _piece(group, payload, payload.nbytes // group.size))


def _piece(group: Group, payload: Payload, part_bytes: int) -> int:
    """The number of elements in a piece."""
    itemsize = payload.nbytes // payload.numel
    return max(1, piece_bytes(part_bytes, group.chunk_bytes) // itemsize)
