"""The machine under all replicas: a table of what follows on what, and any order of gradients and answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.exchange.base import Optimize
from zmqtrain.train.bucket_machine import BucketMachine, Do, State

BEFORE, AFTER, APART = Optimize.BEFORE, Optimize.AFTER, Optimize.APART
COMPLETE, NOTE, UPDATE, HAND_OVER, FETCH, FORGET = (
    Do.COMPLETE,
    Do.NOTE,
    Do.UPDATE,
    Do.HAND_OVER,
    Do.FETCH,
    Do.FORGET,
)


def machine_of(gradients: list[str], when: Optimize = APART, *, overlap: bool = True) -> BucketMachine:
    machine = BucketMachine(gradients, overlap=overlap)
    machine.when = when
    return machine


def feed(machine: BucketMachine, order: str, gradients: list[str]) -> list[tuple[Do, int]]:
    """Gradients come in this order, and what is complete is handed over at once."""
    done: list[tuple[Do, int]] = []
    for name in order:
        bucket = next(index for index, names in enumerate(gradients) if name in names)
        if machine.gradient(bucket, name):
            done += machine.hand_over()
    return done


@pytest.mark.parametrize(
    ("when", "around"),
    [
        (APART, ([COMPLETE, HAND_OVER], [FETCH, FORGET])),
        (BEFORE, ([COMPLETE, NOTE, UPDATE, HAND_OVER], [FETCH, FORGET])),
        (AFTER, ([COMPLETE, NOTE, HAND_OVER], [FETCH, UPDATE, FORGET])),
    ],
)
def test_what_is_done_around_the_exchange_of_a_bucket(when: Optimize, around: tuple[list[Do], list[Do]]) -> None:
    machine = machine_of(["a"], when)
    assert machine.take(0) == (), "it is the compute side's to begin with"
    machine.begin_backward(last=True)
    assert machine.gradient(0, "a")
    assert machine.hand_over() == [(do, 0) for do in around[0]]
    assert machine.state(0) is State.CLOSED
    assert machine.due(0) is (when is AFTER)
    assert machine.take(0) is None
    machine.answered(0)
    assert machine.take(0) == around[1]
    assert machine.state(0) is State.OPEN
    assert not machine.due(0)
    assert machine.take(0) == ()


@pytest.mark.parametrize(
    ("order", "handed_over"),
    [
        ("abc", [0, 1, 2]),
        ("cba", [0, 1, 2]),
        ("bca", [0, 1, 2]),
        ("b", []),
        ("ab", [0]),
        ("acb", [0, 1, 2]),
    ],
)
def test_later_buckets_wait_for_earlier_ones(order: str, handed_over: list[int]) -> None:
    gradients = ["a", "bc", "d"]
    machine = machine_of(gradients)
    machine.begin_backward(last=True)
    assert machine.gradient(2, "d") is False
    assert [bucket for do, bucket in feed(machine, order, gradients) if do is HAND_OVER] == handed_over
    machine.end_backward()
    rest = [bucket for do, bucket in machine.hand_over() if do is HAND_OVER]
    assert handed_over + rest == [0, 1, 2], "unused parameters hold nothing back at the end"
    assert machine.all_handed_over


def test_without_overlap_nothing_leaves_before_the_end() -> None:
    machine = machine_of(["a", "b"], overlap=False)
    machine.begin_backward(last=True)
    assert feed(machine, "ab", ["a", "b"]) == []
    machine.end_backward()
    assert [bucket for do, bucket in machine.hand_over() if do is HAND_OVER] == [0, 1]


def test_micro_batches_before_the_last_hand_nothing_over() -> None:
    machine = machine_of(["a"])
    for _ in range(2):
        machine.begin_backward(last=False)
        assert feed(machine, "aa", ["a"]) == [], "nor does it matter how often a gradient is added to"
        assert set(machine.missing(0)) == {"a"}
        machine.end_backward()
    machine.begin_backward(last=True)
    assert feed(machine, "a", ["a"])


def test_a_gradient_that_comes_twice_is_refused() -> None:
    machine = machine_of(["ab"])
    machine.begin_backward(last=True)
    machine.gradient(0, "a")
    with pytest.raises(ValueError, match="'a' of bucket 0 came twice"):
        machine.gradient(0, "a")


def test_an_answer_to_nothing_brings_parameters_and_keeps_gradients() -> None:
    """At the start, and where the run's model is only looked at, gradients may be half added up."""
    machine = machine_of(["a"], AFTER)
    machine.answered(0)
    assert machine.take(0) == [FETCH]


def test_a_step_that_is_taken_back_is_not_updated_by() -> None:
    machine = machine_of(["a", "b"], AFTER)
    machine.begin_backward(last=True)
    feed(machine, "a", ["a", "b"])
    machine.take_back()
    assert not machine.last
    assert machine.take(0) == [FETCH, FORGET]
    assert machine.take(1) == [FETCH]


def test_the_first_error_ends_all_waits_and_lets_open_buckets_be() -> None:
    machine = machine_of(["a", "b", "c"])
    machine.begin_backward(last=True)
    feed(machine, "ab", ["a", "b", "c"])
    machine.answered(0)
    first = RuntimeError("first")
    machine.abort(first)
    machine.abort(RuntimeError("second"))
    for bucket in (0, 1):  # answered, closed
        with pytest.raises(RuntimeError, match="first"):
            machine.take(bucket)
    assert machine.take(2) == ()


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    names = [(bucket, place) for bucket, size in enumerate(sizes) for place in range(size)]
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        order = draw(st.permutations(names))
        steps.append(
            {
                "micro": draw(st.integers(0, 2)),
                "order": order[draw(st.integers(0, len(order) // 2)) :],  # some parameters are not used
                "answers": draw(st.permutations(range(len(sizes)))),
                "early": draw(st.integers(0, len(sizes))),  # so many answers come during backward, if they can
            }
        )
    return {"sizes": sizes, "steps": steps, "overlap": draw(st.booleans()), "when": draw(st.sampled_from(list(Optimize)))}


class Worker:
    """Carries out what the machine says, and checks that each of it may be done."""

    def __init__(self, sizes: list[int], when: Optimize, overlap: bool) -> None:
        self.machine = BucketMachine([[(b, place) for place in range(size)] for b, size in enumerate(sizes)], overlap=overlap)
        self.machine.when = when
        self.when = when
        self.handed_over: list[int] = []
        self.noted: list[int] = []
        self.updated: list[int] = []
        self.away: set[int] = set()
        self.fetched: set[int] = set()

    def hand_over(self) -> None:
        for do, bucket in self.machine.hand_over():
            assert bucket not in self.away
            if do is NOTE:
                self.noted.append(bucket)
            elif do is UPDATE:
                assert self.when is BEFORE
                assert bucket in self.noted
                assert bucket not in self.handed_over
                self.updated.append(bucket)
            elif do is HAND_OVER:
                assert self.machine.state(bucket) is State.CLOSED
                self.handed_over.append(bucket)
                self.away.add(bucket)

    def answer(self, bucket: int) -> None:
        if bucket in self.away:
            self.away.discard(bucket)
            self.machine.answered(bucket)

    def take(self, bucket: int) -> None:
        todo = self.machine.take(bucket)
        assert (todo is None) == (bucket in self.away), "a gate is closed exactly while the exchange has the bucket"
        if not todo:
            return
        assert todo[0] is FETCH
        assert (UPDATE in todo) == (self.when is AFTER)
        assert todo[-1] is FORGET, "after the update, which goes by the gradients"
        if UPDATE in todo:
            assert bucket in self.noted
            self.updated.append(bucket)
        assert self.machine.state(bucket) is State.OPEN


@given(runs())
def test_any_order_of_gradients_and_answers(run: dict[str, Any]) -> None:
    worker = Worker(run["sizes"], run["when"], run["overlap"])
    machine, buckets = worker.machine, list(range(len(run["sizes"])))
    for step in run["steps"]:
        worker.handed_over.clear()
        worker.noted.clear()
        worker.updated.clear()
        for number in range(step["micro"] + 1):
            machine.begin_backward(last=number == step["micro"])
            early = list(step["answers"][: step["early"]])
            for place, name in enumerate(step["order"]):
                if machine.gradient(name[0], name):
                    worker.hand_over()
                assert worker.handed_over == sorted(worker.handed_over)
                if early and place % 2:
                    worker.answer(early.pop())
            if number < step["micro"] or not run["overlap"]:
                assert not worker.handed_over
            machine.end_backward()
            worker.hand_over()
        assert worker.handed_over == buckets, "strictly in order, each once"
        for bucket in step["answers"]:
            worker.take(bucket)  # the forward may be there before the answer, and asks again
            worker.answer(bucket)
            worker.take(bucket)
        assert sorted(worker.updated) == ([] if run["when"] is APART else buckets), "the optimizer ran once on each"
