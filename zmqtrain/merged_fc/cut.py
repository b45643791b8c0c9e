"""Where a model is divided into two phases (Hadjis et al. 2016): the part that workers compute, and that of the FC server.

The convolution phase has most of the arithmetic and few of the parameters, the fully connected phase the reverse. The second phase
starts at a layer and contains everything that depends on it, so nothing in the first phase waits for the second. A pure function of
the forward's steps.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

from zmqtrain.errors import UsageError
from zmqtrain.topology.suggest import did_you_mean

#: ``sequence``: recurrent layers, attention and embeddings; the phase after them is the output projection.
StepKind = Literal["convolution", "sequence", "linear", "other"]
#: An error lists this many modules before it counts the rest.
MOST_LISTED = 12


@dataclass(frozen=True, slots=True)
class ForwardStep:
    """One step of a model's forward: a layer, or an operation."""

    name: str
    """Unique in the forward."""
    inputs: tuple[str, ...] = ()
    """Names of the steps whose results it uses, which come before it."""
    kind: StepKind = "other"
    module: str = ""
    """The module that it calls, such as ``classifier.1``; empty for operations."""
    stored: bool = False
    """Whether it reads a parameter or a buffer. Other steps without inputs are inputs of the forward."""
    writes: str = ""
    """The step that reads the buffer which this one changes in place."""


def second_phase(steps: Sequence[ForwardStep], split: str | None = None) -> frozenset[str]:
    """Names of the steps that the FC server computes. ``steps``: all steps, in the order of the forward.

    Without ``split`` the phase starts at the first linear layer after the last convolution or, after recurrent layers or attention,
    at the last linear layer of all. ``split`` names a module: the phase then starts at the first call of it, or of a module inside
    it. Everything that depends on the start belongs to the phase, and so does what is computed of parameters and buffers for it
    alone.

    Raises `UsageError` if there is no such start.
    """
    if split is None:
        beginning = {_found(steps).name}
    else:
        beginning = {step.name for step in steps if step.module == split or step.module.startswith(f"{split}.")}
        if not beginning:
            raise UsageError(_no_such_module(steps, split))
    behind: set[str] = set()
    for step in steps:
        if step.name in beginning or any(source in behind for source in step.inputs):
            behind.add(step.name)
    return frozenset(behind | _for_it_alone(steps, behind))


def _for_it_alone(steps: Sequence[ForwardStep], behind: Set[str]) -> set[str]:
    """Steps that do not depend on the forward's inputs, and whose results only the second phase uses. One that changes a buffer,
    and whose result nobody uses, is where the buffer is used otherwise."""
    of_inputs, users = set[str](), dict[str, set[str]]()
    for step in steps:
        if any(source in of_inputs for source in step.inputs) or not (step.inputs or step.stored):
            of_inputs.add(step.name)
        for source in step.inputs:
            users.setdefault(source, set()).add(step.name)
    found = set[str]()
    for step in reversed(steps):
        by = users.get(step.name) or (users.get(step.writes, set()) - {step.name} if step.writes else set())
        if step.name not in of_inputs and by and by <= behind | found:
            found.add(step.name)
    return found - behind


def _found(steps: Sequence[ForwardStep]) -> ForwardStep:
    bodies = [place for place, step in enumerate(steps) if step.kind in ("convolution", "sequence")]
    if not bodies:
        raise UsageError(
            "the model has no convolutions, recurrent layers or attention, so the start of its fully connected phase cannot be "
            f"found: name the module in [exchange] split, or set merged_fc = false; its modules are {_modules(steps)}"
        )
    last = steps[bodies[-1]]
    linear = [step for step in steps[bodies[-1] + 1 :] if step.kind == "linear"]
    if not linear:
        raise UsageError(
            f"the model has no linear layer after its last {last.kind} layer ({last.module}), so it has no fully connected phase: "
            f"name a module in [exchange] split, or set merged_fc = false; its modules are {_modules(steps)}"
        )
    return linear[0] if last.kind == "convolution" else linear[-1]


def _no_such_module(steps: Sequence[ForwardStep], split: str) -> str:
    names = {step.module for step in steps if step.module}
    names |= {name.rpartition(".")[0] for name in names if "." in name}
    meant = did_you_mean(split, sorted(names))
    hint = f"did you mean {meant!r}?" if meant else f"its modules are {_modules(steps)}"
    return f"[exchange] split = {split!r}: the model's forward calls no such module; {hint}"


def _modules(steps: Sequence[ForwardStep]) -> str:
    names = list(dict.fromkeys(step.module for step in steps if step.module))
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return (", ".join(names[:MOST_LISTED]) or "none") + more
