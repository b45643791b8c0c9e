"""What must hold between fields of the topology, as a pure function: all broken rules at once, each with the fields it involves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zmqtrain.topology.schema import Topology

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """``message`` is about the field ``path``; ``involves`` are all fields it follows from, ``path`` among them."""

    path: Path
    message: str
    involves: tuple[Path, ...]


def broken_rules(topology: Topology) -> list[BrokenRule]:
    """All rules that the topology breaks."""
    return [*_length(topology), *_hosts(topology), *_batch(topology), *_grid(topology), *_exchange(topology), *_device(topology)]


def _rule(message: str, path: Path, *others: Path) -> BrokenRule:
    return BrokenRule(path, message, (path, *others))


def _length(topology: Topology) -> Iterator[BrokenRule]:
    given = [name for name in ("steps", "epochs", "until") if getattr(topology.job, name) is not None]
    if len(given) > 1:
        names = " and ".join(given)
        paths: list[Path] = [("job", name) for name in given]
        yield _rule(f"{names} are both given: keep exactly one of steps, epochs and until", paths[-1], *paths[:-1])
    if topology.job.until is not None and topology.job.eval_every == 0:
        yield _rule(
            "until needs evaluations: set eval_every to the number of steps between them", ("job", "until"), ("job", "eval_every")
        )


def _hosts(topology: Topology) -> Iterator[BrokenRule]:
    seen: dict[str, int] = {}
    for index, host in enumerate(topology.hosts):
        if host.name in seen:
            yield _rule(f"host {seen[host.name]} has the same name: give each its own", ("hosts", index, "name"))
        seen.setdefault(host.name, index)
        if host.slots == 0:
            yield _rule(
                f"slots is missing: say how many workers may compute on {host.name} at once ({host.address} is another machine)",
                ("hosts", index, "slots"),
                ("hosts", index, "address"),
            )


def _batch(topology: Topology) -> Iterator[BrokenRule]:
    compute = topology.compute
    least = compute.group_size * compute.accumulate
    if compute.batch_size < least:
        parts = f" in {compute.accumulate} micro-batches each" if compute.accumulate > 1 else ""
        yield _rule(
            f"a batch smaller than the group: {compute.group_size} workers{parts} need at least {least} samples a step",
            ("compute", "batch_size"),
            ("compute", "group_size"),
            ("compute", "accumulate"),
        )


def _grid(topology: Topology) -> Iterator[BrokenRule]:
    compute = topology.compute
    if compute.grid is not None and int(compute.grid.split("x")[1]) != compute.group_size:
        yield _rule(
            f"this grid does not have group_size = {compute.group_size} places: write 1x{compute.group_size}, or leave it out",
            ("compute", "grid"),
            ("compute", "group_size"),
        )


def _exchange(topology: Topology) -> Iterator[BrokenRule]:
    exchange = topology.exchange
    given = exchange.model_fields_set
    if exchange.kind != "model_server":
        for name in ("shards", "staleness", "snapshot"):
            field = type(exchange).model_fields[name]
            if name in given and getattr(exchange, name) != field.default:
                yield _rule(
                    f'{name} is for model servers, but kind is "{exchange.kind}": set kind = "model_server", or leave {name} out',
                    ("exchange", name),
                    ("exchange", "kind"),
                    ("compute", "groups"),
                )
    if exchange.kind != "averaging" and exchange.every != 1:
        yield _rule(
            f'every is for averaging, but kind is "{exchange.kind}": set kind = "averaging", or leave every out',
            ("exchange", "every"),
            ("exchange", "kind"),
            ("compute", "groups"),
        )
    if exchange.compression != "topk" and "compression_ratio" in given and exchange.compression_ratio != 0.01:
        yield _rule(
            f'compression_ratio is for topk, but compression is "{exchange.compression}"',
            ("exchange", "compression_ratio"),
            ("exchange", "compression"),
        )


def _device(topology: Topology) -> Iterator[BrokenRule]:
    compute = topology.compute
    if compute.profile is not None and compute.device != "modelled":
        yield _rule(
            f'profile is for modelled devices, but device is "{compute.device}": set device = "modelled", or leave profile out',
            ("compute", "profile"),
            ("compute", "device"),
        )
    if compute.device == "modelled" and compute.profile is None:
        yield _rule(
            'device = "modelled" needs profile, a JSON file with layer times',
            ("compute", "device"),
            ("compute", "profile"),
        )
