"""The rules between fields of the topology, as a pure function: all broken rules at once, each with the fields that it involves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zmqtrain.topology.broken_rule import BrokenRule, Path, rule
from zmqtrain.topology.compute import rows_and_columns
from zmqtrain.topology.elastic import why_it_is_not, why_not_elastic
from zmqtrain.topology.fault_rules import fault_rules, simulation_rules
from zmqtrain.topology.known_hosts import KnownHosts
from zmqtrain.topology.loopback import is_loopback
from zmqtrain.topology.network_rules import network_rules
from zmqtrain.topology.ranges import MOST_HOSTS, count
from zmqtrain.topology.unused_rules import unused_rules
from zmqtrain.words import counted

if TYPE_CHECKING:
    from zmqtrain.topology.hosts import Host
    from zmqtrain.topology.schema import Topology


#: Engines that use the addresses in the file.
_NAMED_MACHINES = ("ssh",)


def broken_rules(topology: Topology, entries: Sequence[Host]) -> list[BrokenRule]:
    """All rules that the topology breaks. ``entries``: the hosts as the file lists them, with ranges; faults name these entries."""
    broken = [
        *_length(topology),
        *_weights(topology),
        *_elastic(topology),
        *_data(topology),
        *_hosts(entries, found=topology.engine.gathers or topology.engine.kind in _NAMED_MACHINES),
        *_machines(topology, entries),
        *_batch(topology),
        *_pipeline(topology),
        *_precision(topology),
        *_parts(topology),
        *_grid(topology),
        *_exchange(topology),
        *_device(topology),
        *unused_rules(topology),
    ]
    broken += simulation_rules(topology)
    if topology.hosts:  # empty if there are too many to check
        known = KnownHosts(host.name for host in topology.hosts)
        broken += [*network_rules(topology.network, known), *fault_rules(topology, known)]
    return broken


def _length(topology: Topology) -> Iterator[BrokenRule]:
    given = [name for name in ("steps", "epochs", "until") if getattr(topology.job, name) is not None]
    if len(given) > 1:
        names = " and ".join(given)
        paths: list[Path] = [("job", name) for name in given]
        yield rule(f"{names} are both given: keep only one of steps, epochs and until", paths[-1], *paths[:-1])
    if topology.job.until is not None and topology.job.eval_every == 0:
        yield rule(
            "until needs evaluations: set eval_every to the number of steps between them", ("job", "until"), ("job", "eval_every")
        )


def _weights(topology: Topology) -> Iterator[BrokenRule]:
    if topology.job.optimizer_state == "new":
        return
    if topology.job.weights is None:
        yield rule("optimizer_state is what comes with weights: give these, too", ("job", "optimizer_state"), ("job", "weights"))
    if topology.exchange.merged_fc:
        text = 'FC servers begin with new optimizers: set optimizer_state = "new" or merged_fc = false'
        yield rule(text, ("job", "optimizer_state"), ("exchange", "merged_fc"))


def _elastic(topology: Topology) -> Iterator[BrokenRule]:
    job, why = topology.job, why_not_elastic(topology)
    if job.elastic and why is not None:
        reason, paths = why
        yield rule(reason, ("job", "elastic"), *paths)
    named = (("min_workers", job.min_workers), ("max_workers", job.max_workers))
    needs = [name for name, given in named if given]
    if not topology.elastic:
        reason, paths = why_it_is_not(topology)
        for name in needs:
            text = f"{name} is for elastic runs; in this run a lost worker ends the run: {reason}"
            yield rule(text, ("job", name), ("job", "elastic"), *paths)
    elif job.min_workers is not None and job.min_workers > topology.compute.workers:
        text = f"min_workers is {job.min_workers}, but the run has {topology.compute.workers} workers"
        yield rule(text, ("job", "min_workers"), ("compute", "groups"))
    if job.restarts and not topology.elastic and not topology.engine.starts_agents:
        text = (
            f'with kind = "{topology.engine.kind}" the launcher cannot start agents again: let what starts them repeat the whole '
            "command, zmqtrain launch FILE --run-dir DIR --continue, and remove restarts"
        )
        yield rule(text, ("job", "restarts"), ("engine", "kind"))
    if job.on_resize != "keep" and not (topology.elastic and topology.exchange.kind == "allreduce"):
        text = (
            "on_resize is for elastic all-reduce, whose workers divide the batch of a step: set elastic = true and kind = "
            '"allreduce", or remove on_resize'
        )
        yield rule(text, ("job", "on_resize"), ("job", "elastic"), ("exchange", "kind"))
    if topology.elastic and job.max_workers is not None:
        yield from _others(topology, job.max_workers)


def _others(topology: Topology, most: int) -> Iterator[BrokenRule]:
    """Whether others may take part beyond the workers with which the run begins."""
    compute = topology.compute
    if topology.exchange.kind != "allreduce":
        text = "max_workers is for all-reduce: with other exchanges each group has its own batches, and there are none for others"
        yield rule(text, ("job", "max_workers"), ("exchange", "kind"))
    elif most < compute.workers:
        yield rule(
            f"max_workers is {most}, but the run has {compute.workers} workers", ("job", "max_workers"), ("compute", "groups")
        )
    elif most * compute.accumulate > compute.groups * compute.batch_size:
        text = (
            f"max_workers is {most}, but a step has {compute.groups * compute.batch_size} samples, fewer than that: raise "
            "[compute] batch_size"
        )
        yield rule(text, ("job", "max_workers"), ("compute", "batch_size"))


def _data(topology: Topology) -> Iterator[BrokenRule]:
    data = topology.data
    if data.ring != "indices" and data.shuffle != "ring":
        yield rule(f'ring is for shuffle = "ring", but shuffle is "{data.shuffle}"', ("data", "ring"), ("data", "shuffle"))
    modelled = topology.compute.device == "modelled" and topology.job.task is None
    if data.shuffle == "ring" and data.ring == "tensors" and modelled and data.sample_size is None:
        yield rule(
            'the size of a sample is missing, because modelled devices have no real samples: set it, like sample_size = "3 KiB"',
            ("data", "sample_size"),
            ("data", "ring"),
        )
    if data.sample_size is not None and data.ring != "tensors":
        yield rule(
            f'sample_size is for ring = "tensors", but ring is "{data.ring}": remove sample_size',
            ("data", "sample_size"),
            ("data", "ring"),
        )


def _hosts(entries: Sequence[Host], *, found: bool) -> Iterator[BrokenRule]:
    """``found``: whether the hosts have joined, so that values missing in the file are known."""
    seen: dict[str, int] = {}
    total = 0
    for index, host in enumerate(entries):
        total += host.count
        if total > MOST_HOSTS:
            yield rule(
                f"too many hosts: up to this entry there are {total:,}, but at most {MOST_HOSTS:,} are allowed",
                ("hosts", index, "name"),
            )
            return
        names = [one.name for one in host.expanded()]
        twice = next((name for name in names if name in seen), None)
        if twice is not None:
            first = f"hosts[{seen[twice]}]"
            what = f"{first} has the same name" if host.name == entries[seen[twice]].name else f"{twice} is in {first}, too"
            yield rule(f"{what}: give each host a name of its own", ("hosts", index, "name"))
        for name in names:
            seen.setdefault(name, index)
        if host.addresses not in (1, host.count):
            yield rule(
                f"{host.addresses} addresses for {host.count} hosts: give one address for each host, or a single one for all",
                ("hosts", index, "address"),
                ("hosts", index, "name"),
            )
        if host.slots == 0 and not found:
            yield rule(
                f"slots is missing: set how many workers may compute on {host.name} at the same time ({host.address} is another "
                "machine)",
                ("hosts", index, "slots"),
                ("hosts", index, "address"),
            )


def _machines(topology: Topology, entries: Sequence[Host]) -> Iterator[BrokenRule]:
    """The rules for hosts that are machines, not sets of processes on this machine."""
    for index, host in enumerate(entries):
        for field, text in (("bind", host.bind), ("ssh", host.ssh.host)):
            if text is not None and count(text) not in (1, host.count):
                yield rule(
                    f"{count(text)} addresses for {host.count} hosts: give one address for each host, or a single one for all",
                    ("hosts", index, field),
                    ("hosts", index, "name"),
                )
    if topology.engine.kind not in _NAMED_MACHINES:
        return
    if topology.engine.kind == "slurm":
        return  # the addresses come from the allocation
    if "hosts" not in topology.model_fields_set:
        yield rule(f'kind = "{topology.engine.kind}" needs machines: list them in [[hosts]]', ("engine", "kind"), ("hosts",))
    if len(topology.hosts) < 2:
        return
    for index, host in enumerate(entries):
        for field, text in (("address", host.address), ("bind", host.bind)):
            if text is not None and is_loopback(text):
                yield rule(
                    f"{text} is a loopback address, which other hosts cannot reach: give the host's address on the network that "
                    f"the hosts share",
                    ("hosts", index, field),
                    ("engine", "kind"),
                )


def _batch(topology: Topology) -> Iterator[BrokenRule]:
    compute = topology.compute
    least = compute.group_size * compute.accumulate
    if compute.batch_size < least:
        parts = f" of {compute.accumulate} micro-batches each" if compute.accumulate > 1 else ""
        why = " (the file does not mention groups, so all hosts form one group)" if topology.hosts_decide else ""
        yield rule(
            f"the batch is too small for the group: a step of {counted(compute.group_size, 'worker')}{parts} takes at least "
            f"{counted(least, 'sample')}{why}",
            ("compute", "batch_size"),
            ("compute", "group_size"),
            ("compute", "accumulate"),
        )


def _pipeline(topology: Topology) -> Iterator[BrokenRule]:
    pipeline, path = topology.compute.pipeline, ("compute", "pipeline")
    if pipeline > 1 and not topology.exchange.merged_fc:
        yield rule(
            "groups can share slots only if an FC server computes for them: set merged_fc = true, or remove pipeline",
            path,
            ("exchange", "merged_fc"),
        )
    if topology.compute.groups % pipeline:
        yield rule(
            f"{topology.compute.groups} groups cannot be divided into sets of {pipeline} that share slots: make groups a "
            f"multiple of {pipeline}",
            path,
            ("compute", "groups"),
        )


def _precision(topology: Topology) -> Iterator[BrokenRule]:
    if topology.compute.precision != "float16":
        return
    for apart, what, path in (
        (topology.divided, "a divided model", ("compute", "grid")),
        (topology.exchange.merged_fc, "merged_fc", ("exchange", "merged_fc")),
    ):
        if apart:
            yield rule(
                f"float16 scales losses by whether gradients overflow, which a worker alone cannot tell with {what}: "
                'set precision = "bfloat16", or remove it',
                ("compute", "precision"),
                path,
            )


def _parts(topology: Topology) -> Iterator[BrokenRule]:
    compute = topology.compute
    if compute.parts == "even":
        return
    path: Path = ("compute", "parts")
    if compute.parts != "measured" and len(compute.parts) not in (compute.group_size, compute.workers):
        yield rule(
            f"there are {len(compute.parts)} weights: give one for each of the {compute.group_size} workers of a group"
            + (f", or one for each of all {compute.workers} workers" if compute.groups > 1 else ""),
            path,
            ("compute", "group_size"),
        )
    if topology.data.shuffle == "ring":
        yield rule(
            'the sample ring passes batches on unchanged and in equal parts: remove parts, or set shuffle = "global"',
            ("data", "shuffle"),
            path,
        )
    if topology.divided or compute.grid == "auto":
        yield rule("workers that divide a model process the same samples: remove parts, or the grid", path, ("compute", "grid"))


def _grid(topology: Topology) -> Iterator[BrokenRule]:
    compute, parallel = topology.compute, topology.parallel
    places = math.prod(rows_and_columns(compute.grid)) if compute.grid not in (None, "auto") else compute.group_size
    if places != compute.group_size:
        yield rule(
            f"this grid is for {places} workers, but group_size is {compute.group_size}: write 1x{compute.group_size} or another "
            f"grid of that size, or remove it",
            ("compute", "grid"),
            ("compute", "group_size"),
        )
    smaller: Path = ("compute", "smaller_grids")
    if compute.smaller_grids and not topology.forms_grids:
        text = (
            "smaller_grids are for elastic runs on a grid of several rows with all-reduce: set [job] elastic = true, grid and "
            'kind = "allreduce", or remove them'
        )
        yield rule(text, smaller, ("job", "elastic"), ("compute", "grid"), ("exchange", "kind"))
    elif too_large := [each for each in compute.smaller_grids if math.prod(rows_and_columns(each)) >= compute.group_size]:
        yield rule(f"{too_large[0]} is no grid of fewer than the group's {compute.group_size} workers", smaller)
    for what in ("plan", "layers"):
        if getattr(parallel, what) and (compute.grid is None or compute.grid == "auto" or compute.rows == 1):
            yield rule(
                f'{what} is for a grid that divides the model: set [compute] grid, like "2x{max(1, compute.group_size // 2)}"',
                ("parallel", what),
                ("compute", "grid"),
            )
    if parallel.plan and parallel.layers:
        yield rule("plan and layers are both given: keep only one of them", ("parallel", "layers"), ("parallel", "plan"))
    if other := sorted(parallel.sizes() - {compute.group_size}):
        yield rule(
            f"the grid of a layer is for {other[0]} workers, but group_size is {compute.group_size}: change one of them",
            ("parallel", "layers"),
            ("compute", "group_size"),
        )
    elif parallel.main_grid not in (None, compute.grid) and compute.rows > 1:
        yield rule(
            f"the first layer that is divided over rows is on grid {parallel.main_grid}, whose columns say which samples "
            f'each worker has: set [compute] grid = "{parallel.main_grid}"',
            ("parallel", "layers"),
            ("compute", "grid"),
        )
    for each in parallel.layers:
        if each.strips != "height" and each.choice != "domain":
            yield rule(f"layer {each.layer!r}: strips are for the choice domain: remove them", ("parallel", "layers"))
        elif "x" in each.strips and math.prod(rows_and_columns(each.strips)) != (rows := rows_and_columns(each.grid)[0]):
            yield rule(
                f"layer {each.layer!r}: strips {each.strips} must divide an image into as many parts as its grid has rows, {rows}",
                ("parallel", "layers"),
            )
    if compute.grid == "auto" or topology.divided:
        yield from _divided(topology)


def _divided(topology: Topology) -> Iterator[BrokenRule]:
    """The settings that a divided model cannot be combined with."""
    path: Path = ("compute", "grid")
    if topology.compute.device == "modelled" and not topology.trains:
        yield rule(
            "a profile does not say what the parts of a divided model do, which only its own code shows: set [job] task and "
            '[simulation] payload = "real" (`zmqtrain plan` predicts times without that)',
            ("compute", "device"),
            path,
        )


def _exchange(topology: Topology) -> Iterator[BrokenRule]:
    exchange = topology.exchange
    given = exchange.model_fields_set
    if exchange.kind != "model_server":
        for name in ("shards", "replicas", "max_servers", "staleness", "snapshot", "split_size"):
            field = type(exchange).model_fields[name]
            if name in given and getattr(exchange, name) != field.default:
                yield rule(
                    f'{name} is for model servers, but kind is "{exchange.kind}": set kind = "model_server", or remove {name}',
                    ("exchange", name),
                    ("exchange", "kind"),
                    ("compute", "groups"),
                )
    if exchange.kind not in ("averaging", "allreduce") and exchange.every != 1:
        yield rule(
            f'every is for averaging and allreduce, but kind is "{exchange.kind}": set kind, or remove every',
            ("exchange", "every"),
            ("exchange", "kind"),
            ("compute", "groups"),
        )
    yield from _compression(topology)
    if exchange.kind == "model_server" and exchange.max_servers is not None:
        yield from _more_servers(topology, exchange.max_servers)
    if exchange.kind == "model_server" and exchange.replicas:
        yield from _replicas(topology)
    yield from _merged_fc(topology)
    yield from _averaging(topology)
    yield from _gossip(topology)


def _compression(topology: Topology) -> Iterator[BrokenRule]:
    exchange, path = topology.exchange, ("exchange", "compression")
    fields = type(exchange).model_fields
    for name, of in (("compression_ratio", "topk"), ("compression_rank", "powersgd")):
        may_be = (of,) if of == "topk" else (of, "auto")  # which never finds that top-k is the best
        if exchange.compression not in may_be and getattr(exchange, name) != fields[name].default:
            yield rule(f'{name} is for {of}, but compression is "{exchange.compression}": remove {name}', ("exchange", name), path)
    if exchange.compression == "none":
        return
    if exchange.kind not in ("model_server", "allreduce"):
        yield rule(
            f'compression is for model servers and all-reduce, but kind is "{exchange.kind}": set kind, or remove compression',
            path,
            ("exchange", "kind"),
            ("compute", "groups"),
        )
    elif exchange.kind == "allreduce" and (topology.divided or topology.compute.grid == "auto"):
        yield rule(
            'with all-reduce, compression is for groups that divide only the batch: remove the grid, set kind = "model_server", or '
            "remove compression",
            path,
            ("compute", "grid"),
        )
    if exchange.compression == "powersgd" and topology.compute.device == "modelled" and not topology.trains:
        yield rule(
            "powersgd divides matrices into factors, but a profile has only the sizes of layers: set [job] task and [simulation] "
            'payload = "real", or choose another compression',
            path,
            ("compute", "device"),
        )


def _more_servers(topology: Topology, most: int) -> Iterator[BrokenRule]:
    path: Path = ("exchange", "max_servers")
    if not topology.moves_shards:
        text = (
            "max_servers is for runs whose shards can move: that needs several shards, groups of one worker, and [job] elastic = "
            "true or [exchange] replicas = 1"
        )
        yield rule(text, path, ("exchange", "shards"), ("exchange", "replicas"), ("job", "elastic"), ("compute", "group_size"))
    elif most < topology.servers:
        yield rule(f"max_servers is {most}, but the run has {topology.servers} model servers", path, ("exchange", "shards"))


def _replicas(topology: Topology) -> Iterator[BrokenRule]:
    path: Path = ("exchange", "replicas")
    if topology.exchange.shards < 2:
        yield rule(
            "the only model server has no other one that could keep a copy: set shards to at least 2, or remove replicas",
            path,
            ("exchange", "shards"),
        )
    if topology.exchange.merged_fc and topology.exchange.fc_servers > 1:
        text = "layers that several FC servers divide have no copy: remove replicas, or set fc_servers = 1"
        yield rule(text, path, ("exchange", "fc_servers"))
    if topology.compute.group_size > 1:
        yield rule("replicas needs groups of one worker: set group_size = 1, or remove replicas", path, ("compute", "group_size"))
    elif not topology.elastic:
        reason, paths = why_not_elastic(topology) or ("elastic is false", ())
        yield rule(
            f"replicas is for elastic runs; this one ends when any of its roles is lost: {reason}", path, ("job", "elastic"), *paths
        )


def _merged_fc(topology: Topology) -> Iterator[BrokenRule]:
    exchange, path = topology.exchange, ("exchange", "merged_fc")
    if not exchange.merged_fc:
        for name in ("split", "fc_servers"):
            if getattr(exchange, name) != type(exchange).model_fields[name].default:
                yield rule(f"{name} is for merged_fc = true: set that, or remove {name}", ("exchange", name), path)
        return
    if exchange.kind != "model_server":
        yield rule(
            f'merged_fc is for model servers, but kind is "{exchange.kind}": set kind = "model_server", or remove merged_fc',
            path,
            ("exchange", "kind"),
        )
    if topology.optimizer.clip_norm:
        yield rule(
            "clip_norm needs the gradients of all layers, but the FC server applies its own at once: remove clip_norm or merged_fc",
            ("optimizer", "clip_norm"),
            path,
        )
    if topology.divided:
        yield rule("merged_fc is for groups that divide only the batch: remove [compute] grid", path, ("compute", "grid"))


def _averaging(topology: Topology) -> Iterator[BrokenRule]:
    exchange = topology.exchange
    averaging, fields = exchange.averaging, type(exchange.averaging).model_fields
    changed = [name for name, field in fields.items() if getattr(averaging, name) != field.default]
    if exchange.kind != "averaging":
        if changed:
            yield rule(
                f'averaging is for kind = "averaging", but kind is "{exchange.kind}": set kind = "averaging", or '
                "remove [exchange.averaging]",
                ("exchange", "averaging"),
                ("exchange", "kind"),
            )
        return
    of = {"alpha": "elastic", "outer_lr": "outer", "outer_momentum": "outer", "deltas": "outer"}
    for name in changed:
        if of.get(name, averaging.method) != averaging.method:
            yield rule(
                f'{name} is for method = "{of[name]}", but method is "{averaging.method}": remove {name}',
                ("exchange", "averaging", name),
                ("exchange", "averaging", "method"),
            )
    every = exchange.every_steps(topology.compute.groups)
    if averaging.fragments > every:
        yield rule(
            f"{averaging.fragments} fragments do not fit into {every} steps: raise every, or lower fragments",
            ("exchange", "averaging", "fragments"),
            ("exchange", "every"),
        )
    if averaging.overlap_steps >= every:
        yield rule(
            f"the exchange of a fragment would take {averaging.overlap_steps} steps, but the next one begins after {every}: "
            f"raise every, or lower overlap_steps",
            ("exchange", "averaging", "overlap_steps"),
            ("exchange", "every"),
        )
    if "mix" in changed and not averaging.overlap_steps:
        yield rule(
            "mix is for exchanges that overlap with steps: set overlap_steps, or remove mix",
            ("exchange", "averaging", "mix"),
            ("exchange", "averaging", "overlap_steps"),
        )


def _gossip(topology: Topology) -> Iterator[BrokenRule]:
    exchange, groups = topology.exchange, topology.compute.groups
    gossip = exchange.gossip
    if exchange.kind != "gossip":
        if gossip != type(gossip)():
            yield rule(
                f'gossip is for kind = "gossip", but kind is "{exchange.kind}": set kind = "gossip", or remove [exchange.gossip]',
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
            f'balanced = false is for random partners, but topology is "{gossip.topology}": remove balanced',
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
            f'profile is for modelled devices, but device is "{compute.device}": set device = "modelled", or remove profile',
            ("compute", "profile"),
            ("compute", "device"),
        )
    if compute.device == "modelled" and compute.profile is None:
        yield rule(
            'device = "modelled" needs profile: a JSON file with layer times, or the name of a shipped profile like "resnet50"',
            ("compute", "device"),
            ("compute", "profile"),
        )
    if compute.noise.kind != "normal" and compute.noise.spread != type(compute.noise).model_fields["spread"].default:
        yield rule(
            f'spread is for normal noise, but kind is "{compute.noise.kind}": set kind = "normal", or remove spread',
            ("compute", "noise", "spread"),
            ("compute", "noise", "kind"),
        )
