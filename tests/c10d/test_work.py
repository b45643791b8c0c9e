"""The order in which operations are carried out, and in which thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zmqtrain.c10d.errors import BrokenGroupError, MismatchError
from zmqtrain.c10d.order import OtherStreamError
from zmqtrain.c10d.work import Handle, Lane

PATIENCE_S = 30.0


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane("lane of a test", goes_on=(KeyError,))
    yield made
    made.close()
    assert made.join(PATIENCE_S)


def noted(threads: list[str]) -> Callable[[], None]:
    return lambda: threads.append(threading.current_thread().name)


def test_a_caller_who_waits_carries_out_its_operation_if_nothing_is_pending(lane: Lane) -> None:
    threads: list[str] = []
    assert lane.submit(Handle([], "first"), noted(threads), waits=True).is_completed()
    lane.submit(Handle([], "second"), noted(threads)).wait()
    assert threads == [threading.current_thread().name, "lane of a test"]


def test_operations_keep_their_order_whoever_waits(lane: Lane) -> None:
    go, threads, order = threading.Event(), list[str](), list[int]()

    def first() -> None:
        assert go.wait(PATIENCE_S)
        order.append(1)

    pending = lane.submit(Handle([], "first"), first)
    second = lane.submit(Handle([], "second"), lambda: (noted(threads)(), order.append(2))[0], waits=True)
    assert not second.is_completed()
    go.set()
    second.wait()
    pending.wait()
    assert (order, threads) == ([1, 2], ["lane of a test"])


def test_what_others_submit_waits_for_the_caller_who_carries_out(lane: Lane) -> None:
    order: list[int] = []

    def first() -> None:
        later.append(lane.submit(Handle([], "second"), lambda: order.append(2)))
        order.append(1)

    later: list[object] = []
    lane.submit(Handle([], "first"), first, waits=True).wait()
    lane.submit(Handle([], "third"), lambda: order.append(3)).wait()
    assert order == [1, 2, 3]


def test_gradients_are_not_recorded(lane: Lane) -> None:
    parameter = torch.ones(2, requires_grad=True)
    made: list[Tensor] = []
    lane.submit(Handle([], "sum"), lambda: made.append(parameter + 1), waits=True).wait()
    assert not made[0].requires_grad
    assert torch.is_grad_enabled()


def test_modes_of_the_caller_do_not_see_what_is_done(lane: Lane) -> None:
    class Counts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counts() as mode:
        lane.submit(Handle([], "sum"), lambda: torch.ones(2).add_(1), waits=True).wait()
    assert mode.count == 0


@pytest.mark.parametrize("waits", [False, True])
def test_after_an_error_the_ranks_are_not_at_the_same_point(lane: Lane, waits: bool) -> None:
    def fail(error: Exception) -> Callable[[], None]:
        def do() -> None:
            raise error

        return do

    with pytest.raises(KeyError):  # all ranks have it
        lane.submit(Handle([], "first"), fail(KeyError("all")), waits=waits).wait()
    lane.submit(Handle([], "second"), lambda: None, waits=waits).wait()
    with pytest.raises(ValueError, match="this rank"):
        lane.submit(Handle([], "third"), fail(ValueError("this rank")), waits=waits).wait()
    with pytest.raises(BrokenGroupError, match=r"fourth.*this rank"):
        lane.submit(Handle([], "fourth"), lambda: None, waits=waits).wait()


def test_an_interrupted_caller_breaks_the_group(lane: Lane) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lane.submit(Handle([], "first"), interrupt, waits=True)
    with pytest.raises(BrokenGroupError, match="first was interrupted"):
        lane.submit(Handle([], "second"), lambda: None, waits=True).wait()


def others_first(stream: int, order: list[str], name: str) -> Callable[[], None]:
    """Another stream's operation comes first, once."""
    told: list[bool] = []

    def do() -> None:
        if not told:
            told.append(True)
            raise OtherStreamError(stream)
        order.append(name)

    return do


@pytest.mark.parametrize("waits", [False, True])
def test_an_operation_of_another_stream_comes_first_even_if_it_is_called_later(lane: Lane, waits: bool) -> None:
    order: list[str] = []
    first = lane.submit(Handle([], "first"), others_first(7, order, "first"), waits=waits)
    second = lane.submit(Handle([], "second"), lambda: order.append("second"))
    assert not first.is_completed()
    lane.submit(Handle([], "third"), lambda: order.append("third"), stream=7).wait()
    first.wait()
    second.wait()
    assert order == ["third", "first", "second"]


def test_an_operation_that_others_have_called_and_this_rank_does_not() -> None:
    lane, order = Lane("lane of a test", timeout_s=0.0), list[str]()
    first = lane.submit(Handle([], "first"), others_first(7, order, "first"))
    with pytest.raises(MismatchError, match="first: other ranks have called another operation before"):
        first.wait()
    with pytest.raises(BrokenGroupError):
        lane.submit(Handle([], "second"), lambda: None).wait()
    lane.close()
    assert lane.join(PATIENCE_S)


def test_a_lane_that_is_closed_waits_for_no_operation_of_another_stream(lane: Lane) -> None:
    first = lane.submit(Handle([], "first"), others_first(7, [], "first"))
    lane.close()
    with pytest.raises(MismatchError):
        first.wait()
