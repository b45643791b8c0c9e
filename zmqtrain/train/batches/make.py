"""Which batches a run takes."""

from __future__ import annotations

from zmqtrain.data.background import Background, BackgroundThread
from zmqtrain.data.loader import Finish
from zmqtrain.data.partition import Partition
from zmqtrain.data.source import Source
from zmqtrain.exchange.members import Members
from zmqtrain.membership.context import RoleContext
from zmqtrain.train.batches.base import Batches
from zmqtrain.train.batches.divided import DividedBatches
from zmqtrain.train.batches.ordered import OrderedBatches
from zmqtrain.train.batches.ring import RingBatches
from zmqtrain.train.batches.slotted import SlottedBatches
from zmqtrain.train.batches.stream import StreamBatches
from zmqtrain.train.shares import Shares


def make_batches(
    context: RoleContext,
    source: Source,
    partition: Partition | None,
    shares: Shares,
    members: Members,
    finish: Finish,
    thread: Background,
) -> Batches:
    """The batches that ``[data] shuffle`` and the source ask for. ``partition``: the order of a source that is not a stream.
    Raises `UsageError`."""
    # In virtual time no other thread may run, so the reading thread does this work itself; the batches are the same.
    processes = source.processes if isinstance(thread, BackgroundThread) else None
    if partition is None:
        return StreamBatches(context, source, shares, finish, thread, processes)
    if context.topology.data.shuffle == "ring":
        return RingBatches(context, source, partition.samples, members, finish, thread)
    if members.takes_turns or (members.survives and context.topology.exchange.kind == "model_server"):
        return SlottedBatches(context, source, partition, members, finish, thread, processes)
    if members.divides:
        return DividedBatches(context, source, partition, members, finish, thread, processes)
    return OrderedBatches(context, source, partition, shares, members, finish, thread, processes)
