"""docs/architecture.md lists the modules that a gradient passes: those that a trace finds, and no others."""

from __future__ import annotations

import pytest

from tests.gradient_path import WAYS, documented, modules_of, table


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return {name: modules_of(way) for name, way in WAYS.items()}


def test_the_architecture_lists_what_a_trace_finds(found: dict[str, list[str]]) -> None:
    text, known = documented()
    assert text == table(found, known), "`python -m tests.gradient_path` prints the table as it should be"
    assert "?" not in known.values(), "say what the module does"


def test_each_way_has_what_it_cannot_do_without(found: dict[str, list[str]]) -> None:
    every = {"train.replica", "train.bucket_machine", "train.gates", "exchange.under_way"}
    network = {"net.node", "net.zeromq", "net.receiver", "wire.tensor"}
    assert every | network | {"collectives.call", "exchange.model_server", "server.serving"} <= set(found["model server"])
    assert every | network | {"exchange.gossip.exchange"} <= set(found["gossip"])
    assert every | {"host.accumulator", "arena.words"} <= set(found["one host"])
    assert not any(name.startswith("net.") for name in found["one host"]), "nothing leaves the memory of the host"
