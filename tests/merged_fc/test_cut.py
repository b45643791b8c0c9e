"""Where a model is cut in two phases, as a function of its forward's steps."""

from __future__ import annotations

import pytest

from zmqtrain.errors import UsageError
from zmqtrain.merged_fc.cut import ForwardStep, StepKind, second_phase

KINDS: dict[str, StepKind] = {"c": "convolution", "s": "sequence", "l": "linear", "o": "other"}


def chain(kinds: str) -> list[ForwardStep]:
    """Steps one after another, called ``c0``, ``o1``, ...; each is a module ``net.N``."""
    names = [f"{kind}{place}" for place, kind in enumerate(kinds)]
    return [
        ForwardStep(name, (names[place - 1],) if place else (), KINDS[name[0]], f"net.{place}") for place, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("kinds", "first"),
    [
        ("cocoolol", 5),  # convolutions, flatten, two linear layers: at the first of these
        ("clcol", 4),  # a linear layer between convolutions is none of it
        ("ssl", 2),
        ("slosollol", 8),  # attention and its own linear layers: at the output projection
        ("cslol", 4),  # a convolution that makes patches, then attention
        ("slcoll", 4),  # recurrent, then convolutions
    ],
)
def test_the_second_phase_is_found(kinds: str, first: int) -> None:
    steps = chain(kinds)
    assert second_phase(steps) == {step.name for step in steps[first:]}


def test_all_that_depends_on_its_beginning_is_of_it_and_nothing_else() -> None:
    steps = [
        ForwardStep("x"),
        ForwardStep("conv", ("x",), "convolution", "conv"),
        ForwardStep("head", ("conv",), "linear", "head"),
        ForwardStep("gate", ("conv",), "other"),
        ForwardStep("scaled", ("head", "gate")),
        ForwardStep("output", ("scaled",)),
    ]
    assert second_phase(steps) == {"head", "scaled", "output"}


def test_what_is_computed_of_parameters_and_buffers_is_where_it_is_used() -> None:
    steps = [
        ForwardStep("x"),
        ForwardStep("table", stored=True),
        ForwardStep("both", ("table",)),
        ForwardStep("conv", ("x", "both"), "convolution", "conv"),
        ForwardStep("weight", stored=True),
        ForwardStep("norm", ("weight",)),
        ForwardStep("mean", stored=True),
        ForwardStep("decayed", ("mean",), writes="mean"),
        ForwardStep("head", ("conv", "norm", "mean"), "linear", "head"),
        ForwardStep("output", ("head", "both")),
    ]
    assert second_phase(steps) == {"weight", "norm", "mean", "decayed", "head", "output"}


def test_it_may_be_named() -> None:
    steps = chain("cocolol")
    assert second_phase(steps, "net.3") == {step.name for step in steps[3:]}
    assert second_phase(steps, "net") == {step.name for step in steps}


@pytest.mark.parametrize(
    ("kinds", "split", "said"),
    [
        ("lolo", None, "no convolutions.*net.0, net.1"),
        ("cocol" + "cooo", None, r"no linear layer after its last convolution layer \(net.5\)"),
        ("soso", None, "no linear layer after its last sequence layer"),
        ("col", "nets", "no such module; did you mean 'net'"),
        ("c" * 20, "classifier", "and 8 more"),
    ],
)
def test_where_there_is_none_it_is_said(kinds: str, split: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        second_phase(chain(kinds), split)
