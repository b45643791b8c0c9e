"""Ranks of one process draw the same numbers in their forwards, and leave those of others alone."""

from __future__ import annotations

import gc
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from zmqtrain.parallel import turns
from zmqtrain.parallel.communicator import Fabric, Label
from zmqtrain.parallel.turns import drawing, generator_state, generators_kept, turn
from zmqtrain.testing.threads import run_ranks
from zmqtrain.train.random_state import drawn_alike


def test_ranks_draw_the_same_numbers_whoever_waits_in_between() -> None:
    def run(fabric: Fabric) -> list[torch.Tensor]:
        group, found = fabric.among(tuple(range(fabric.size))), []
        for step in range(3):
            with drawing(step, []):
                found.append(torch.randn(2))
                for _ in range(fabric.rank):
                    torch.empty(1)
                group.all_reduce(torch.ones(1), Label("layer", "dx")).wait()
                found.append(torch.randn(3))
        return found

    before = torch.get_rng_state()
    results, _ = run_ranks(3, run)
    assert torch.equal(torch.get_rng_state(), before)
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=0, atol=0)
    torch.manual_seed(2)
    expected = [torch.randn(2), torch.randn(3)]
    torch.set_rng_state(before)
    torch.testing.assert_close(results[0][4:], expected, rtol=0, atol=0)


def test_a_turn_within_a_turn_is_the_same() -> None:
    with turn(), turn(), drawing(1, []), drawing(2, []):
        inner = torch.randn(1)
    with drawing(2, []):
        assert torch.equal(torch.randn(1), inner)


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_the_generator_is_read(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that frees tensors then gives up the GIL, and holds the generator's lock."""
    states, seen = torch.get_rng_state(), []

    def read() -> torch.Tensor:
        seen.append(gc.isenabled())
        return states

    monkeypatch.setattr(torch.random, "get_rng_state", read)
    try:
        if not collects:
            gc.disable()
        assert generator_state() is states
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        gc.enable()


def test_nothing_is_collected_while_one_of_two_threads_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one, which has read, allows it for both."""
    states, seen = torch.get_rng_state(), []
    second = threading.Thread(target=generator_state)

    def read() -> torch.Tensor:
        if threading.current_thread() is not second:
            second.start()
            second.join(0.05)  # by then it would have ended if it did not wait for this one
        seen.append(gc.isenabled())
        return states

    monkeypatch.setattr(torch.random, "get_rng_state", read)
    generator_state()
    second.join()
    assert seen == [False, False]
    assert gc.isenabled()


def test_generators_go_on_as_before_and_a_forked_process_may_read_them() -> None:
    before = generator_state()
    with generators_kept():
        torch.rand(3)
        assert not torch.equal(generator_state(), before)
    assert torch.equal(generator_state(), before)
    child = os.fork()
    if not child:
        os._exit(not torch.equal(generator_state(), before))
    assert os.waitpid(child, 0)[1] == 0


def test_what_keeps_the_generators_waits_for_ranks_that_draw() -> None:
    """The check of a loss's weights put back what a rank beside it had drawn for its optimizer: the same noise twice."""
    states: list[torch.Tensor] = []

    def keeps() -> None:
        with generators_kept():
            states.append(generator_state())

    second = threading.Thread(target=keeps)
    before = generator_state()
    with drawn_alike(torch.device("cpu"), [1]):
        second.start()
        second.join(0.05)  # by then it would have seen this rank's state if it did not wait
        assert not states
    second.join()
    assert torch.equal(states[0], before)


def test_torchs_checkpointing_reads_them_so_in_ranks_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks stood still, each with a lock that another one waited for: a process of tests had to be killed."""
    read, seen = torch.random.get_rng_state, []

    def noted() -> torch.Tensor:
        seen.append(gc.isenabled())
        return read()

    monkeypatch.setattr(torch.random, "get_rng_state", noted)

    def run(_: Fabric) -> None:
        x = torch.ones(2, requires_grad=True)
        checkpoint(torch.exp, x, use_reentrant=False).sum().backward()

    before = torch.get_rng_state
    run_ranks(2, run)
    assert len(seen) >= 4  # in each rank's forward, and again in its backward
    assert not any(seen)
    assert torch.get_rng_state is before


def test_the_package_reads_generators_in_one_place() -> None:
    """Where garbage was collected meanwhile, whole runs stood still."""
    package = Path(turns.__file__).parents[1]
    reads = re.compile(r"\b(fork_rng|get_rng_state|default_generators?(\[.*\])?\.get_state)\(")
    assert [file.name for file in sorted(package.rglob("*.py")) if reads.search(file.read_text())] == ["turns.py"]
