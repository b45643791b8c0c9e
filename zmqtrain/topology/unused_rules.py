"""Settings that would have no effect on the training that a file describes. Pure.

A value that the training would not show is refused, with what it is for. Three kinds are not such values: what holds anyway (the
default, or "off" where there is nothing to switch off), what says how processes start (the command line may name another engine,
so `zmqtrain.topology.cautions` warns), and what is there for other commands, like all of ``[tune]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from zmqtrain.topology.broken_rule import BrokenRule, Path, rule

if TYPE_CHECKING:
    from zmqtrain.topology.schema import Topology


@dataclass(frozen=True, slots=True)
class _Use:
    """A setting that has an effect only in some files."""

    path: tuple[str, ...]
    what: str
    """What it is for; the end of a sentence."""
    remedy: str
    """How it gets an effect."""
    has_effect: Callable[[Topology], bool]
    involves: tuple[Path, ...]


_USES = (
    _Use(
        ("job", "args"),
        "the task's function, but there is no task",
        "set task",
        lambda topology: topology.job.task is not None,
        (("job", "task"),),
    ),
    _Use(
        ("job", "min_workers_wait"),
        "runs that wait for workers or hosts",
        "set min_workers or restarts",
        lambda topology: topology.job.min_workers is not None or topology.job.restarts > 0,
        (("job", "min_workers"), ("job", "restarts")),
    ),
    _Use(
        ("compute", "rebalance_every"),
        "parts that are measured",
        'set parts = "measured"',
        lambda topology: topology.compute.parts == "measured",
        (("compute", "parts"),),
    ),
    _Use(
        ("compute", "noise", "straggler_factor"),
        "steps that take longer by chance, but the chance is 0",
        "set straggler_chance",
        lambda topology: topology.compute.noise.straggler_chance > 0,
        (("compute", "noise", "straggler_chance"),),
    ),
    _Use(
        ("data", "sample_size"),
        "modelled devices, which have no samples of their own",
        'set [compute] device = "modelled" and a profile',
        lambda topology: topology.compute.device == "modelled" and not topology.trains,
        (("compute", "device"), ("job", "task"), ("simulation", "payload")),
    ),
    *(
        _Use(
            ("parallel", name),
            "models that a group divides",
            'set [compute] grid, like "2x1"',
            lambda topology: topology.divided or topology.compute.grid == "auto",
            (("compute", "grid"), ("compute", "group_size")),
        )
        for name in ("strict", "whole")
    ),
    _Use(
        ("plan", "dx"),
        'pricing = "paper"',
        "set that",
        lambda topology: topology.plan.pricing == "paper",
        (("plan", "pricing"),),
    ),
    *(
        _Use(
            ("plan", name),
            "a table of layers",
            'set layers, like "alexnet"',
            lambda topology: topology.plan.layers is not None,
            (("plan", "layers"),),
        )
        for name in ("activations", "biases")
    ),
)


def unused_rules(topology: Topology) -> Iterator[BrokenRule]:
    """All settings without effect that no other rule refuses."""
    for use in _USES:
        if differs(topology, use.path) and not use.has_effect(topology):
            name = use.path[-1]
            yield rule(f"{name} is for {use.what}: {use.remedy}, or remove {name}", use.path, *use.involves)


def differs(topology: Topology, path: tuple[str, ...]) -> bool:
    """Whether a setting is not at its default. (Files that are written out in full set every field.)"""
    section: BaseModel = topology
    for name in path[:-1]:
        section = getattr(section, name)
    field = type(section).model_fields[path[-1]]
    return bool(getattr(section, path[-1]) != field.get_default(call_default_factory=True, validated_data={}))
