"""Processes that are forked before a launcher has a loop."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_S

#: Python reads no numpy before this, whose threads would be there.
_BEGINNING = """
import asyncio, os, signal, threading
from zmqtrain.launcher.one_thread import import_numpy
import_numpy()
from zmqtrain.launcher.prepared import Prepared

def children():
    return open(f"/proc/self/task/{os.getpid()}/children").read().split()
"""


def run(code: str) -> str:
    """What the code prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _BEGINNING + code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_those_that_are_not_needed_end_with_the_block() -> None:
    code = """
with Prepared.of(agents=2):
    print(len(children()))
print(len(children()))
"""
    assert run(code).split() == ["3", "0"]


def test_a_process_with_threads_forks_nothing() -> None:
    code = """
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
with Prepared.of(agents=2) as prepared:
    print(len(children()), prepared.zygote(), prepared.take_agent({}, None, None))
end.set()
thread.join()
"""
    assert run(code).split() == ["0", "None", "None"]


def test_where_a_child_cannot_be_waited_for_nothing_is_forked() -> None:
    code = """
def missing(pid):
    raise OSError(38, "Function not implemented")

os.pidfd_open = missing
with Prepared.of(agents=2):
    print(len(children()))
"""
    assert run(code).split() == ["0"]


def test_an_agent_has_the_environment_that_it_gets() -> None:
    """Here one that names no run, with which it ends as the command does."""
    code = """
async def main(prepared):
    agent = prepared.take_agent({"PATH": os.environ["PATH"]}, None, None)
    print(prepared.take_agent({}, None, None), *await asyncio.gather(agent.wait(), agent.wait()), agent.returncode)
    agent.kill()  # nothing happens

with Prepared.of(agents=1) as prepared:
    asyncio.run(main(prepared))
"""
    assert run(code).split() == ["None", "2", "2", "2"]


def test_one_that_was_killed_says_so() -> None:
    code = """
async def main(prepared):
    os.kill(int(children()[-1]), signal.SIGKILL)
    agent = prepared.take_agent({}, None, None)
    print(await agent.wait())

with Prepared.of(agents=1) as prepared:
    asyncio.run(main(prepared))
"""
    assert run(code).split() == ["-9"]


def test_the_zygote_serves_again_until_it_dies() -> None:
    """Here nothing asks it for a fork server, for which it would have to import torch."""
    code = """
from zmqtrain.launcher.zygote import Zygote

async def main(prepared):
    async with Zygote(forked=prepared.zygote()) as zygote:
        return zygote.pid

with Prepared.of(agents=0) as prepared:
    first, second = (asyncio.run(main(prepared)) for _ in range(2))
    print(first == second == int(children()[0]))
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    print(prepared.zygote(), len(children()))
"""
    assert run(code).split() == ["True", "None", "0"]


def test_all_runs_of_a_search_have_one_zygote() -> None:
    """Of hosts that are other machines each has its own."""
    code = """
from zmqtrain.launcher.fleet import engine_for
from zmqtrain.topology.schema import Topology

async def main(topology, prepared):
    async with engine_for(topology, None, prepared).forking(None):
        return children()

job = {"job": {"task": "task.py"}, "hosts": [{"name": "one", "address": "one", "slots": 1}]}
kinds = [{**job, "engine": {"kind": kind}} for kind in ("local", "ssh")]
here, there = map(Topology.from_dict, kinds)
with Prepared.of_search(there, None):
    print(len(children()))
with Prepared.of_search(here, None) as prepared:
    print([asyncio.run(main(here, prepared)) for _ in range(2)] == [children()] * 2, len(children()))
"""
    assert run(code).split() == ["0", "True", "1"]
