"""Settings that every test shares."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Generator, Mapping
from importlib import import_module

# Read when torch is imported, here and in what tests start. Tensors of tests are small, and each thread that computes, as a rank's,
# would have a team of threads, which spin while they wait for each other: two to three times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Roles that tests launch have several. On as many processors as the tests, a thread that spins has nothing to spin for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from tests import environment, last_words
from tests.order import in_order
from tests.patience import pytest_timeout_cancel_timer, pytest_timeout_set_timer
from tests.rewritten import compile_share

__all__ = ["pytest_timeout_cancel_timer", "pytest_timeout_set_timer"]  # hooks: pytest finds them here

# What tests leave in cycles is small, and the modules and tests that are read first are no garbage. Python would look through new
# objects for each 700 of them, and through all a dozen times before the first test.
gc.set_threshold(20_000, 20, 20)

_FROZEN = {"modules": 0}  # how many there were when memory was looked through last


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # or xdist would begin with the files of the most tests
    last_words.pytest_configure(config)
    worker = getattr(config, "workerinput", None)  # of xdist
    if worker is not None:
        compile_share(config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import torch where tests run: not in the process that starts xdist's workers, which would wait for that."""
    if not session.config.pluginmanager.has_plugin("dsession"):
        import_module("tests.whole_process").prepare(session.config.getoption("--hypothesis-profile", None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    within = len(f"{config.rootpath / 'tests'}{os.sep}")  # ten thousand paths: as texts in a tenth of the time
    files = dict.fromkeys(str(item.path)[within:] for item in items)
    places = {file: place for place, file in enumerate(in_order(files))}
    items.sort(key=lambda item: places[str(item.path)[within:]])
    import torch

    if torch.cuda.is_available() or os.environ.get("ZMQTRAIN_TEST_DEVICE"):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    environment.BEFORE.update(os.environ)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    with environment.kept():
        return (yield)


def pytest_runtest_logstart() -> None:
    """Before a test: all tests and the modules that there are stay in memory, and no collection of garbage looks at them again.

    They are a million objects, a second for each collection, and each rank of a group collects after it has compared models.
    """
    if len(sys.modules) >= _FROZEN["modules"] + 20:
        _FROZEN["modules"] = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Which loop a coroutine test runs on: virtual time's, or the one that processes of a run have."""
    from zmqtrain.net.loop import new_event_loop
    from zmqtrain.simulate.clock import VirtualLoop

    return {"virtual": VirtualLoop} if item.get_closest_marker("virtual_time") else {"real": new_event_loop}
