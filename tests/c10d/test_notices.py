"""Ranks that find each other through a store that others can read and write."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tests.c10d.test_process_group import groups_of
from tests.launcher.ready import PYTHON, Program
from tests.patience import PATIENCE_S
from zmqtrain.arena import shared_memory_missing
from zmqtrain.c10d.notices import Notices
from zmqtrain.c10d.rendezvous import encrypts
from zmqtrain.errors import RunTokenError, UsageError, ZmqTrainError
from zmqtrain.net.address import key_in

SECRET = "a secret of sixteen letters"
NAMES = ["rank 0", "rank 1"]


def told(tokens: list[str | None], work: Callable[[Notices, int], Any], store: dist.Store | None = None) -> list[Any]:
    """What ``work`` returns or raises on each rank, in threads."""
    store = store or dist.HashStore()

    def one(rank: int) -> Any:
        try:
            return work(Notices(store, rank, NAMES, timedelta(seconds=20), tokens[rank]), rank)
        except ZmqTrainError as error:
            return error

    with ThreadPoolExecutor(len(tokens)) as pool:
        return list(pool.map(one, range(len(tokens))))


@pytest.mark.parametrize("token", [SECRET, None])
def test_ranks_hear_each_other(token: str | None) -> None:
    def work(notices: Notices, rank: int) -> Any:
        found = notices.meet(host=f"host {rank}")
        notices.tell("address", f"of {rank}: tcp://x:1,2")
        return [each["host"] for each in found], notices.hear("address", 1 - rank), notices.run_token

    one, other = told([token, token], work)
    assert one[0] == other[0] == ["host 0", "host 1"]
    assert (one[1], other[1]) == ("of 1: tcp://x:1,2", "of 0: tcp://x:1,2")
    assert one[2] == other[2]
    assert one[2] != token


def test_another_token_is_refused_on_both_sides() -> None:
    one, other = told([SECRET, SECRET + "."], lambda notices, _: notices.meet())
    assert isinstance(one, RunTokenError)
    assert isinstance(other, RunTokenError)
    assert "rank 1 has another run token" in str(one)
    assert "rank 0 has another run token" in str(other)


def test_a_token_on_one_side_is_refused_on_both_sides() -> None:
    one, other = told([SECRET, None], lambda notices, _: notices.meet())
    assert isinstance(one, UsageError)
    assert isinstance(other, UsageError)
    assert "rank 1 has no token, but rank 0 has one: set ZMQTRAIN_TOKEN" in str(one)
    assert "rank 0 has a token, but rank 1 has none: set ZMQTRAIN_TOKEN" in str(other)


def test_what_others_write_into_the_store_does_not_count() -> None:
    store = dist.HashStore()

    def work(notices: Notices, rank: int) -> Any:
        notices.meet()
        notices.tell("address", "mine")
        digest = store.get("group-1/address/0").partition(b":")[0].decode() if rank == 0 else ""
        return digest, notices

    (digest, _), (_, notices) = told([SECRET, SECRET], work, store)
    forged = PrefixStore("group-1", store)
    assert notices.hear("address", 0) == "mine"
    forged.set("address/0", f"{digest}:theirs")
    with pytest.raises(RunTokenError):
        notices.hear("address", 0)
    forged.set("memory/0", f"{digest}:mine")  # the right words in another place
    with pytest.raises(RunTokenError):
        notices.hear("memory", 0)
    # Those of another group of the same ranks.
    _, (_, later) = told([SECRET, SECRET], lambda notices, _: (notices.meet(), notices), store)
    PrefixStore("group-2", store).set("address/0", f"{digest}:mine")
    with pytest.raises(RunTokenError):
        later.hear("address", 0)


def test_between_hosts_all_encrypt_or_none() -> None:
    here, there = {"host": "a", "encryption": "required"}, {"host": "b", "encryption": "required"}
    assert not encrypts([here, here], NAMES)
    assert encrypts([here, there], NAMES)
    plain = {"encryption": "disabled"}
    assert not encrypts([{**here, **plain}, {**there, **plain}], NAMES)
    with pytest.raises(UsageError, match="disabled for rank 1, but required for rank 0: set ZMQTRAIN_TRANSPORT_ENCRYPTION"):
        encrypts([here, {**there, **plain}], NAMES)


@pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
@pytest.mark.parametrize("word", ["", "disabled", "no"])
def test_plain_text_needs_a_word(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZMQTRAIN_TRANSPORT_ENCRYPTION", word)
    if word == "no":
        with pytest.raises(UsageError, match="'no'; it must be"):
            groups_of(1)
        return
    groups = groups_of(2, hosts="ab")
    nodes = [group._transport._node for group in groups]
    assert [key_in(node.address) is None for node in nodes] == 2 * [word == "disabled"]
    for group in groups:
        group.shutdown()


@pytest.mark.skipif(shared_memory_missing() is not None, reason=str(shared_memory_missing()))
def test_processes_with_other_tokens_refuse_each_other(tmp_path: Path) -> None:
    """Both say why, though rank 0's process, which ends, holds the store."""
    program = """
import sys, torch.distributed as dist, zmqtrain.c10d
store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, is_master=False) if sys.argv[1] == "1" else dist.TCPStore(
    "127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
dist.init_process_group("zmq", store=store, rank=int(sys.argv[1]), world_size=2)
"""

    (tmp_path / "program.py").write_text(program)

    def start(rank: int, port: str) -> Program:
        return Program((PYTHON, "program.py", str(rank), port), tmp_path, {**os.environ, "ZMQTRAIN_TOKEN": f"{SECRET} {rank}"})

    one = start(0, "")
    other = start(1, one.stdout.readline().strip())
    errors = [process.communicate(timeout=PATIENCE_S)[1] for process in (one, other)]
    assert "rank 1 has another run token" in errors[0], errors[0]
    assert "rank 0 has another run token" in errors[1], errors[1]
