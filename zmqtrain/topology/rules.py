"""What must hold between fields of the topology, as a pure function: all broken rules at once, each with the fields it involves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zmqtrain.topology.broken_rule import BrokenRule, Path, rule
from zmqtrain.topology.compute import rows_and_columns
from zmqtrain.topology.fault_rules import fault_rules, simulation_rules
from zmqtrain.topology.hosts import is_loopback
from zmqtrain.topology.known_hosts import KnownHosts
from zmqtrain.topology.network_rules import network_rules
from zmqtrain.topology.ranges import MOST_HOSTS, count

if TYPE_CHECKING:
    from zmqtrain.topology.hosts import Host
    from zmqtrain.topology.schema import Topology


#: Engines that go by the file's addresses.
_NAMED_MACHINES = ("ssh",)


def broken_rules(topology: Topology, entries: Sequence[Host]) -> list[BrokenRule]:
    """All rules that the topology breaks. ``entries`` are the hosts as the file has them, ranges and all: faults are of these."""
    broken = [
        *_length(topology),
        *_elastic(topology),
        *_data(topology),
        *_hosts(entries, found=topology.engine.gathers or topology.engine.kind in _NAMED_MACHINES),
        *_machines(topology, entries),
        *_batch(topology),
        *_pipeline(topology),
        *_parts(topology),
        *_grid(topology),
        *_exchange(topology),
        *_device(topology),
    ]
    broken += simulation_rules(topology)
    if topology.hosts:  # else there are too many to look into
        known = KnownHosts(host.name for host in topology.hosts)
        broken += [*network_rules(topology.network, known), *fault_rules(topology, known)]
    return broken


def _length(topology: Topology) -> Iterator[BrokenRule]:
    given = [name for name in ("steps", "epochs", "until") if getattr(topology.job, name) is not None]
    if len(given) > 1:
        names = " and ".join(given)
        paths: list[Path] = [("job", name) for name in given]
        yield rule(f"{names} are both given: keep exactly one of steps, epochs and until", paths[-1], *paths[:-1])
    if topology.job.until is not None and topology.job.eval_every == 0:
        yield rule(
            "until needs evaluations: set eval_every to the number of steps between them", ("job", "until"), ("job", "eval_every")
        )


def _elastic(topology: Topology) -> Iterator[BrokenRule]:
    job, exchange = topology.job, topology.exchange
    if job.elastic and (exchange.kind != "gossip" or topology.compute.group_size > 1):
        yield rule(
            'an elastic run needs kind = "gossip" and groups of one worker: with others all have to wait for the one that is lost',
            ("job", "elastic"),
            ("exchange", "kind"),
            ("compute", "group_size"),
        )
    if job.restarts and not topology.elastic:
        yield rule(
            "restarts is for elastic runs (gossip among groups of one worker): elsewhere a lost worker ends the run",
            ("job", "restarts"),
            ("job", "elastic"),
            ("exchange", "kind"),
        )


def _data(topology: Topology) -> Iterator[BrokenRule]:
    data = topology.data
    if data.ring != "indices" and data.shuffle != "ring":
        yield rule(f'ring is for shuffle = "ring", but shuffle is "{data.shuffle}"', ("data", "ring"), ("data", "shuffle"))
    modelled = topology.compute.device == "modelled" and topology.job.task is None
    if data.shuffle == "ring" and data.ring == "tensors" and modelled and data.sample_size is None:
        yield rule(
            'samples of modelled devices travel as sizes: say how much one takes, like sample_size = "3 KiB"',
            ("data", "sample_size"),
            ("data", "ring"),
        )
    if data.sample_size is not None and data.ring != "tensors":
        yield rule('sample_size is for ring = "tensors"', ("data", "sample_size"), ("data", "ring"))


def _hosts(entries: Sequence[Host], *, found: bool) -> Iterator[BrokenRule]:
    """``found``: what the file leaves out of a host shows when it is there."""
    seen: dict[str, int] = {}
    total = 0
    for index, host in enumerate(entries):
        total += host.count
        if total > MOST_HOSTS:
            yield rule(f"too many: here they are {total:,} in all, and there may be {MOST_HOSTS:,}", ("hosts", index, "name"))
            return
        names = [one.name for one in host.expanded()]
        twice = next((name for name in names if name in seen), None)
        if twice is not None:
            what = f"host {seen[twice]} has the same name" if host.name == entries[seen[twice]].name else f"{twice} is in both"
            yield rule(f"{what}: give each its own", ("hosts", index, "name"))
        for name in names:
            seen.setdefault(name, index)
        if host.addresses not in (1, host.count):
            yield rule(
                f"{host.addresses} addresses for {host.count} hosts: give as many of both, or one address for all",
                ("hosts", index, "address"),
                ("hosts", index, "name"),
            )
        if host.slots == 0 and not found:
            yield rule(
                f"slots is missing: say how many workers may compute on {host.name} at once ({host.address} is another machine)",
                ("hosts", index, "slots"),
                ("hosts", index, "address"),
            )


def _machines(topology: Topology, entries: Sequence[Host]) -> Iterator[BrokenRule]:
    """What must hold where hosts are machines, rather than process sets on this one."""
    for index, host in enumerate(entries):
        for field, text in (("bind", host.bind), ("ssh", host.ssh.host)):
            if text is not None and count(text) not in (1, host.count):
                yield rule(
                    f"{count(text)} addresses for {host.count} hosts: give as many of both, or one for all",
                    ("hosts", index, field),
                    ("hosts", index, "name"),
                )
    if topology.engine.kind not in _NAMED_MACHINES:
        return
    if topology.engine.kind == "slurm":
        return  # where hosts are, the allocation says
    if "hosts" not in topology.model_fields_set:
        yield rule(f'kind = "{topology.engine.kind}" needs machines: name them in [[hosts]]', ("engine", "kind"), ("hosts",))
    if len(topology.hosts) < 2:
        return
    for index, host in enumerate(entries):
        for field, text in (("address", host.address), ("bind", host.bind)):
            if text is not None and is_loopback(text):
                yield rule(
                    f"{text} means each host itself, where no other reaches it: give its address on the network that hosts share",
                    ("hosts", index, field),
                    ("engine", "kind"),
                )


def _batch(topology: Topology) -> Iterator[BrokenRule]:
    compute = topology.compute
    least = compute.group_size * compute.accumulate
    if compute.batch_size < least:
        parts = f" in {compute.accumulate} micro-batches each" if compute.accumulate > 1 else ""
        why = " (the file says nothing of groups, so all hosts are one)" if topology.hosts_decide else ""
        yield rule(
            f"a batch smaller than the group: {compute.group_size} workers{parts} need at least {least} samples a step{why}",
            ("compute", "batch_size"),
            ("compute", "group_size"),
            ("compute", "accumulate"),
        )


def _pipeline(topology: Topology) -> Iterator[BrokenRule]:
    pipeline, path = topology.compute.pipeline, ("compute", "pipeline")
    if pipeline > 1 and not topology.exchange.merged_fc:
        yield rule(
            "groups share slots only where an FC server computes for them: set merged_fc = true, or leave pipeline out",
            path,
            ("exchange", "merged_fc"),
        )
    if topology.compute.groups % pipeline:
        yield rule(
            f"{topology.compute.groups} groups cannot share slots {pipeline} by {pipeline}: make groups a multiple of it",
            path,
            ("compute", "groups"),
        )


def _parts(topology: Topology) -> Iterator[BrokenRule]:
    compute = topology.compute
    if compute.parts == "even":
        return
    path: Path = ("compute", "parts")
    if compute.parts != "measured" and len(compute.parts) not in (compute.group_size, compute.workers):
        yield rule(
            f"{len(compute.parts)} weights: give one for each of a group's {compute.group_size} workers"
            + (f", or for each of all {compute.workers}" if compute.groups > 1 else ""),
            path,
            ("compute", "group_size"),
        )
    if topology.data.shuffle == "ring":
        yield rule(
            "the batches of the sample ring pass from worker to worker as they are, in even parts: "
            'leave parts out, or set shuffle = "global"',
            ("data", "shuffle"),
            path,
        )
    if topology.divided or compute.grid == "auto":
        yield rule("workers that divide a model have the same samples: leave parts out, or the grid", path, ("compute", "grid"))


def _grid(topology: Topology) -> Iterator[BrokenRule]:
    compute, parallel = topology.compute, topology.parallel
    places = math.prod(rows_and_columns(compute.grid)) if compute.grid not in (None, "auto") else compute.group_size
    if places != compute.group_size:
        yield rule(
            f"this grid has {places} places, and group_size is {compute.group_size}: write 1x{compute.group_size} or another grid "
            "of so many, or leave it out",
            ("compute", "grid"),
            ("compute", "group_size"),
        )
    for what in ("plan", "layers"):
        if getattr(parallel, what) and (compute.grid is None or compute.grid == "auto" or compute.rows == 1):
            yield rule(
                f'{what} is for a grid that divides the model: set [compute] grid, like "2x{max(1, compute.group_size // 2)}"',
                ("parallel", what),
                ("compute", "grid"),
            )
    if parallel.plan and parallel.layers:
        yield rule("plan and layers are both given: keep one", ("parallel", "layers"), ("parallel", "plan"))
    if other := sorted(parallel.sizes() - {compute.group_size}):
        yield rule(
            f"a layer's grid has {other[0]} places, and group_size is {compute.group_size}",
            ("parallel", "layers"),
            ("compute", "group_size"),
        )
    if compute.grid == "auto" or topology.divided:
        yield from _divided(topology)


def _divided(topology: Topology) -> Iterator[BrokenRule]:
    """What a divided model cannot be combined with."""
    path: Path = ("compute", "grid")
    if topology.data.shuffle == "ring":
        yield rule('a divided model needs shuffle = "global" or "none": the sample ring knows no rows', ("data", "shuffle"), path)
    if topology.optimizer.clip_norm and topology.exchange.kind != "model_server":
        yield rule(
            'the gradients of a divided model are clipped by model servers only: set kind = "model_server", or leave clip_norm out',
            ("optimizer", "clip_norm"),
            ("exchange", "kind"),
            path,
        )
    if topology.compute.device == "modelled":
        yield rule(
            "modelled devices do not compute divided models: set another device; `zmqtrain plan` predicts what they would take",
            ("compute", "device"),
            path,
        )


def _exchange(topology: Topology) -> Iterator[BrokenRule]:
    exchange = topology.exchange
    given = exchange.model_fields_set
    if exchange.kind != "model_server":
        for name in ("shards", "staleness", "snapshot", "compression"):
            field = type(exchange).model_fields[name]
            if name in given and getattr(exchange, name) != field.default:
                yield rule(
                    f'{name} is for model servers, but kind is "{exchange.kind}": set kind = "model_server", or leave {name} out',
                    ("exchange", name),
                    ("exchange", "kind"),
                    ("compute", "groups"),
                )
    if exchange.kind not in ("averaging", "allreduce") and exchange.every != 1:
        yield rule(
            f'every is for averaging and allreduce, but kind is "{exchange.kind}": set kind, or leave every out',
            ("exchange", "every"),
            ("exchange", "kind"),
            ("compute", "groups"),
        )
    if exchange.compression != "topk" and "compression_ratio" in given and exchange.compression_ratio != 0.01:
        yield rule(
            f'compression_ratio is for topk, but compression is "{exchange.compression}"',
            ("exchange", "compression_ratio"),
            ("exchange", "compression"),
        )
    yield from _merged_fc(topology)
    yield from _averaging(topology)
    yield from _gossip(topology)


def _merged_fc(topology: Topology) -> Iterator[BrokenRule]:
    exchange, path = topology.exchange, ("exchange", "merged_fc")
    if not exchange.merged_fc:
        for name in ("split", "fc_servers"):
            if getattr(exchange, name) != type(exchange).model_fields[name].default:
                yield rule(f"{name} is for merged_fc = true: set that, or leave {name} out", ("exchange", name), path)
        return
    if exchange.kind != "model_server":
        yield rule(
            f'merged_fc is for model servers, but kind is "{exchange.kind}": set kind = "model_server", or leave merged_fc out',
            path,
            ("exchange", "kind"),
        )
    if topology.optimizer.clip_norm:
        yield rule(
            "clip_norm needs the gradients of all layers, but those of the FC server take effect at once: leave one of the two out",
            ("optimizer", "clip_norm"),
            path,
        )
    if topology.divided:
        yield rule("merged_fc is for groups that divide the batch alone: leave [compute] grid out", path, ("compute", "grid"))


def _averaging(topology: Topology) -> Iterator[BrokenRule]:
    exchange = topology.exchange
    averaging, fields = exchange.averaging, type(exchange.averaging).model_fields
    changed = [name for name, field in fields.items() if getattr(averaging, name) != field.default]
    if exchange.kind != "averaging":
        if changed:
            yield rule(
                f'averaging is for kind = "averaging", but kind is "{exchange.kind}": set kind, or leave [exchange.averaging] out',
                ("exchange", "averaging"),
                ("exchange", "kind"),
            )
        return
    of = {"alpha": "elastic", "outer_lr": "outer", "outer_momentum": "outer", "deltas": "outer"}
    for name in changed:
        if of.get(name, averaging.method) != averaging.method:
            yield rule(
                f'{name} is for method = "{of[name]}", but method is "{averaging.method}"',
                ("exchange", "averaging", name),
                ("exchange", "averaging", "method"),
            )
    every = exchange.every_steps(topology.compute.groups)
    if averaging.fragments > every:
        yield rule(
            f"{averaging.fragments} fragments cannot take turns within {every} steps: raise every",
            ("exchange", "averaging", "fragments"),
            ("exchange", "every"),
        )
    if averaging.overlap_steps >= every:
        yield rule(
            f"a fragment would be under way for {averaging.overlap_steps} steps, but it begins anew after {every}: raise every",
            ("exchange", "averaging", "overlap_steps"),
            ("exchange", "every"),
        )
    if "mix" in changed and not averaging.overlap_steps:
        yield rule(
            "mix is for exchanges that steps go on beside: set overlap_steps",
            ("exchange", "averaging", "mix"),
            ("exchange", "averaging", "overlap_steps"),
        )


def _gossip(topology: Topology) -> Iterator[BrokenRule]:
    exchange, groups = topology.exchange, topology.compute.groups
    gossip = exchange.gossip
    if exchange.kind != "gossip":
        if gossip != type(gossip)():
            yield rule(
                f'gossip is for kind = "gossip", but kind is "{exchange.kind}": set kind, or leave [exchange.gossip] out',
                ("exchange", "gossip"),
                ("exchange", "kind"),
            )
        return
    if gossip.topology == "hypercube" and groups & (groups - 1):
        yield rule(
            f'a hypercube needs a power of two as the number of groups, not {groups}: use topology = "dissemination"',
            ("exchange", "gossip", "topology"),
            ("compute", "groups"),
        )
    if not gossip.balanced and gossip.topology != "random":
        yield rule(
            f'balanced = false is for random partners, but topology is "{gossip.topology}"',
            ("exchange", "gossip", "balanced"),
            ("exchange", "gossip", "topology"),
        )
    if gossip.granularity == "bucket" and topology.optimizer.clip_norm:
        yield rule(
            'clip_norm needs the gradients of all buckets: set granularity = "batch" in [exchange.gossip]',
            ("optimizer", "clip_norm"),
            ("exchange", "gossip", "granularity"),
        )


def _device(topology: Topology) -> Iterator[BrokenRule]:
    compute = topology.compute
    if compute.profile is not None and compute.device != "modelled":
        yield rule(
            f'profile is for modelled devices, but device is "{compute.device}": set device = "modelled", or leave profile out',
            ("compute", "profile"),
            ("compute", "device"),
        )
    if compute.device == "modelled" and compute.profile is None:
        yield rule(
            'device = "modelled" needs profile, a JSON file with layer times or the name of a shipped one, like "resnet50"',
            ("compute", "device"),
            ("compute", "profile"),
        )
    if compute.noise.kind != "normal" and compute.noise.spread != type(compute.noise).model_fields["spread"].default:
        yield rule(
            f'spread is for normal noise, but kind is "{compute.noise.kind}": set kind = "normal", or leave spread out',
            ("compute", "noise", "spread"),
            ("compute", "noise", "kind"),
        )
