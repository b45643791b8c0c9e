"""The rules of ``[[faults]]`` and ``[simulation]`` that involve several fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zmqtrain.topology.broken_rule import BrokenRule, Path, rule
from zmqtrain.topology.known_hosts import KnownHosts
from zmqtrain.topology.ranges import expand
from zmqtrain.topology.simulation import ALLOWED, DETAILS, NEEDED
from zmqtrain.topology.units import format_duration

if TYPE_CHECKING:
    from zmqtrain.topology.schema import Topology
    from zmqtrain.topology.simulation import Fault

_EXAMPLES = {
    "target": 'give the role or host that it happens to, like target = "worker/1" or a host\'s name',
    "lasts": 'give its duration, like lasts = "2 s"',
    "sides": 'give the hosts that cannot reach each other, like sides = [["alpha"], ["beta", "gamma"]]',
}
_ROLE = re.compile(r"(worker|server|fc)/(0|[1-9][0-9]{0,8})")


def fault_rules(topology: Topology, known: KnownHosts) -> Iterator[BrokenRule]:
    """All rules that the schedule of faults breaks."""
    for index, fault in enumerate(topology.faults):
        path: Path = ("faults", index)
        yield from _when(topology, fault, path)
        yield from _fields(fault, path)
        if "target" in fault.meaningful and fault.target is not None:
            yield from _target(topology, fault, fault.target, known, path)
        if "to" in fault.meaningful and fault.to is not None:
            yield from _other_end(topology, fault.target, fault.to, known, path)
        if fault.kind == "partition":
            yield from _sides(fault, known, path)


def simulation_rules(topology: Topology) -> Iterator[BrokenRule]:
    """All rules that ``[simulation]`` breaks."""
    payload, device = topology.simulation.payload, topology.compute.device
    if payload in ("phantom", "small") and device != "modelled":
        yield rule(
            f'"{payload}" is for modelled devices, but [compute] device is "{device}": set device = "modelled" and a profile, '
            "or remove payload",
            ("simulation", "payload"),
            ("compute", "device"),
        )


def _when(topology: Topology, fault: Fault, path: Path) -> Iterator[BrokenRule]:
    if (fault.at is None) == (fault.step is None):
        times = "both at and step: remove one of them" if fault.at is not None else "no time: give either at (a time) or step"
        yield rule(f"has {times}", path, (*path, "at"), (*path, "step"))
    limit = topology.simulation.time_limit
    if fault.at is not None and fault.at >= limit:
        yield rule(
            f"is too late: the run is stopped after {format_duration(limit)} ([simulation] time_limit)",
            (*path, "at"),
            ("simulation", "time_limit"),
        )


def _fields(fault: Fault, path: Path) -> Iterator[BrokenRule]:
    for name in NEEDED[fault.kind]:
        if getattr(fault, name) == type(fault).model_fields[name].default:
            yield rule(f"a {fault.kind} needs {name}: {_EXAMPLES[name]}", path, (*path, name), (*path, "kind"))
    for name in DETAILS:
        if name not in fault.meaningful and getattr(fault, name) != type(fault).model_fields[name].default:
            kinds = [kind for kind in NEEDED if name in NEEDED[kind] or name in ALLOWED.get(kind, ())]
            yield rule(
                f'has no effect on a fault of kind = "{fault.kind}": remove it ({name} is for {", ".join(kinds)})',
                (*path, name),
                (*path, "kind"),
            )


def _target(topology: Topology, fault: Fault, target: str, known: KnownHosts, path: Path) -> Iterator[BrokenRule]:
    if fault.kind == "drain" and target not in known.names and _is_role(topology, target):
        yield rule("is a role, but only whole hosts can be asked to leave: name a host", (*path, "target"), (*path, "kind"))
    elif target not in known.names and not _is_role(topology, target):
        yield rule(
            f"is neither a role nor a host of this job ({_roles(topology)})",
            (*path, "target"),
            *_SHAPE,
            suggestion=known.suggest(target, _first_roles(topology)),
        )


def _other_end(topology: Topology, target: str | None, to: str, known: KnownHosts, path: Path) -> Iterator[BrokenRule]:
    if not _is_role(topology, to):
        roles = _roles(topology)
        what = "a host, not a role: name one of the roles on it" if to in known.names else f"not a role of this job ({roles})"
        suggestion = None if to in known.names else known.suggest(to, _first_roles(topology))
        yield rule(f"is {what}", (*path, "to"), *_SHAPE, suggestion=suggestion)
    elif to == target:
        yield rule("is the target itself: name another role, or remove it to mean all roles", (*path, "to"), (*path, "target"))


def _sides(fault: Fault, known: KnownHosts, path: Path) -> Iterator[BrokenRule]:
    if len(fault.sides) == 1:
        yield rule("has only one side: name the hosts on the other side, too", (*path, "sides"))
    side_of: dict[str, int] = {}
    for number, side in enumerate(fault.sides):
        if not side:
            yield rule("is empty: name the hosts on this side", (*path, "sides", number))
        for place, text in enumerate(side):
            here = (*path, "sides", number, place)
            if known.missing(text) is not None:
                yield from known.broken(text, here)
                continue
            names = expand(text)
            twice = next((name for name in names if name in side_of), None)
            if twice is not None:
                where = "this side" if side_of[twice] == number else f"side {side_of[twice]}"
                yield rule(f"{twice} is on {where} already: a host can be on one side only", here, (*path, "sides"))
            for name in names:
                side_of.setdefault(name, number)


#: The fields that determine a job's roles.
_SHAPE: tuple[Path, ...] = (
    ("hosts",),
    ("compute", "groups"),
    ("compute", "group_size"),
    ("exchange", "kind"),
    ("exchange", "shards"),
    ("exchange", "merged_fc"),
)


def _is_role(topology: Topology, text: str) -> bool:
    match = _ROLE.fullmatch(text)
    return match is not None and int(match[2]) < dict(_numbers(topology))[match[1]]


def _numbers(topology: Topology) -> tuple[tuple[str, int], ...]:
    """The number of roles of each kind."""
    return ("worker", topology.compute.workers), ("server", topology.servers), ("fc", topology.fc_servers + topology.fc_copied)


def _roles(topology: Topology) -> str:
    parts = [f"{kind}/0" + (f" to {kind}/{number - 1}" if number > 1 else "") for kind, number in _numbers(topology) if number]
    return " and ".join(parts)


def _first_roles(topology: Topology) -> list[str]:
    """Enough of the roles to find the one that a typing mistake meant."""
    return [f"{kind}/{number}" for kind, total in _numbers(topology) for number in range(min(total, 64))]
