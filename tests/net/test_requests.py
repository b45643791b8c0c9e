"""What a handler's failures leave in a log."""

from __future__ import annotations

import asyncio

import pytest

from zmqtrain.errors import PeerLostError, ZmqTrainError
from zmqtrain.net.endpoint import EndingError
from zmqtrain.net.memory import MemoryNetwork
from zmqtrain.net.requests import REPORT_EVERY_S
from zmqtrain.net.settings import NetSettings

pytestmark = pytest.mark.virtual_time


async def test_a_method_that_keeps_failing_is_reported_once_a_minute() -> None:
    network = MemoryNetwork()
    server, caller = (network.endpoint(name, NetSettings(token="secret")) for name in ("server", "caller"))
    server.add_peer("caller", caller.address)
    caller.add_peer("server", server.address)
    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, report: reports.append(report["message"]))

    async def add(caller: str, x: int) -> int:
        return x + 1

    async def fail(caller: str) -> None:
        raise ValueError("on purpose")

    server.serve("add", add)
    server.serve("fail", fail)
    for _ in range(1000):
        with pytest.raises(ZmqTrainError, match="TypeError"):
            await caller.request("server", "add", "a string", timeout=5)
    assert reports == ["the handler of 'add', called by caller, raised"]
    with pytest.raises(ZmqTrainError, match="ValueError"):
        await caller.request("server", "fail", timeout=5)
    assert len(reports) == 2, "another method is reported by itself"
    await asyncio.sleep(REPORT_EVERY_S)
    with pytest.raises(ZmqTrainError, match="TypeError"):
        await caller.request("server", "add", [], timeout=5)
    more = " (999 more failures of it since the last one that was reported)"
    assert reports[2] == f"the handler of 'add', called by caller, raised{more}"
    assert (await caller.request("server", "add", 1, timeout=5)).meta == 2
    await caller.close()
    await server.close()


async def test_a_process_that_is_about_to_end_does_not_answer_and_its_loss_tells_the_caller() -> None:
    network = MemoryNetwork()
    server, caller = (network.endpoint(name, NetSettings(token="secret")) for name in ("server", "caller"))
    caller.add_peer("server", server.address)
    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, report: reports.append(report["message"]))

    async def end(caller: str) -> None:
        raise EndingError

    server.serve("end", end)
    asking = asyncio.create_task(caller.request("server", "end", timeout=50))
    await asyncio.sleep(1.0)
    assert not asking.done()
    await server.close()
    with pytest.raises(PeerLostError, match="closed its endpoint"):
        await asking
    assert reports == []
    await caller.close()
