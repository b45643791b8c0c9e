"""The simulated network: what a message takes, and what breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from zmqtrain.collectives.group import Group
from zmqtrain.collectives.operations import all_reduce
from zmqtrain.errors import PeerLostError, PeerTimeoutError
from zmqtrain.net.node import Node
from zmqtrain.net.settings import NetSettings
from zmqtrain.simulate.clock import run_virtual
from zmqtrain.simulate.network import SimulatedNetwork
from zmqtrain.simulate.process import Process
from zmqtrain.topology.links import HostLink, NetworkModel, RackLink, Way
from zmqtrain.wire.payload import Payload
from zmqtrain.wire.phantom import PhantomPayload
from zmqtrain.wire.tensor import TensorPayload
from zmqtrain.wire.value import ValuePayload

GIGABIT = NetworkModel(bandwidth=1e9, way=Way(200e-6))
MB = 250_000  # elements of float32 in a megabyte
QUICK = NetSettings(lost_s=10.0, flush_s=0.5)


def on(model: NetworkModel, main: Callable[[SimulatedNetwork], Coroutine[Any, Any, Any]], seed: int = 1) -> Any:
    """Run ``main(network)`` on virtual time, and close its endpoints."""

    async def run() -> Any:
        network = SimulatedNetwork(model, random.Random(seed))
        try:
            return await main(network)
        finally:
            for transport in list(network._transports.values()):
                node: Any = transport._receiver
                network.kill(transport.peer)
                del node

    return run_virtual(run())


async def transfer(source: Node, target: Node, megabytes: float, tag: str = "x") -> float:
    """Seconds that a phantom of this size takes."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    await source.send(target.peer, (tag,), PhantomPayload(int(megabytes * MB)))
    await target.receive(source.peer, (tag,))
    return loop.time() - start


@pytest.mark.parametrize(("bits_per_s", "seconds"), [(100e6, 2.0), (1e9, 0.2), (10e9, 0.02)])
def test_a_transfer_takes_latency_and_bytes_over_bandwidth(bits_per_s: float, seconds: float) -> None:
    """25 MB, within 1 %: headers, and acknowledgements that are on the way when the window is full."""

    async def main(network: SimulatedNetwork) -> float:
        a, b = network.endpoint("a", "one"), network.endpoint("b", "two")
        await transfer(a, b, 0.001, "greetings first")
        return await transfer(a, b, 25)

    assert on(NetworkModel(bandwidth=bits_per_s, way=Way(200e-6)), main) == pytest.approx(seconds + 200e-6, rel=0.01)


def test_a_small_sum_waits_for_no_large_tensor() -> None:
    """Statistics that a step waits for pass what was sent before: they share the link with it, and nothing else."""

    async def main(network: SimulatedNetwork) -> float:
        a, b = network.endpoint("a", "one"), network.endpoint("b", "two")
        await transfer(a, b, 0.001, "greetings first")
        for number in range(8):
            await a.send("b", ("gradients", number), PhantomPayload(MB))
        start = asyncio.get_running_loop().time()
        groups = [Group(node, ("a", "b"), rank, "all") for rank, node in enumerate((a, b))]
        await asyncio.gather(*(all_reduce(group, PhantomPayload(4000), ("statistics",)) for group in groups))
        return asyncio.get_running_loop().time() - start

    assert on(GIGABIT, main) == pytest.approx(200e-6 + 2 * 0.128e-3, rel=0.1)


def test_without_figures_nothing_takes_any_time() -> None:
    async def main(network: SimulatedNetwork) -> float:
        return await transfer(network.endpoint("a", "one"), network.endpoint("b", "two"), 1000)

    assert on(NetworkModel(), main) == pytest.approx(0.0, abs=0.01)  # acknowledgements wait a millisecond for others


class TestSharing:
    """NICs, racks and links are shared fairly."""

    async def _both(self, network: SimulatedNetwork, pairs: list[tuple[Node, Node]], megabytes: float = 10) -> list[float]:
        for number, (source, target) in enumerate(pairs):
            await transfer(source, target, 0.001, f"greetings {number}")
        return list(await asyncio.gather(*(transfer(a, b, megabytes, f"x{n}") for n, (a, b) in enumerate(pairs))))

    def test_senders_to_one_host_share_its_nic(self) -> None:
        async def main(network: SimulatedNetwork) -> list[float]:
            hosts = [network.endpoint(f"p{n}", f"h{n}") for n in range(4)]
            return await self._both(network, [(hosts[n], hosts[3]) for n in range(3)])

        assert on(GIGABIT, main) == pytest.approx([3 * 0.08] * 3, rel=0.01)

    def test_processes_of_a_host_share_its_nic(self) -> None:
        async def main(network: SimulatedNetwork) -> list[float]:
            sources = [network.endpoint(f"s{n}", "one") for n in range(2)]
            targets = [network.endpoint(f"t{n}", f"h{n}") for n in range(2)]
            return await self._both(network, list(zip(sources, targets, strict=True)))

        assert on(GIGABIT, main) == pytest.approx([0.16] * 2, rel=0.01)

    def test_both_directions_at_once(self) -> None:
        async def main(network: SimulatedNetwork) -> list[float]:
            a, b = network.endpoint("a", "one"), network.endpoint("b", "two")
            return await self._both(network, [(a, b), (b, a)])

        assert on(GIGABIT, main) == pytest.approx([0.08] * 2, rel=0.01)

    def test_a_racks_uplink(self) -> None:
        """Two hosts of a rack send to another rack at once: each gets half of the uplink; within the rack all of its NIC."""
        hosts = {f"r{rack}h{n}": HostLink(1e9, 0.0, f"rack{rack}") for rack in range(2) for n in range(3)}
        model = NetworkModel(
            bandwidth=1e9, way=Way(100e-6), hosts=hosts, racks={f"rack{n}": RackLink(1e9, 50e-6) for n in range(2)}
        )

        async def main(network: SimulatedNetwork) -> list[float]:
            nodes = {name: network.endpoint(name, name) for name in hosts}
            pairs = [("r0h0", "r1h0"), ("r0h1", "r1h1"), ("r0h2", "r0h1")]
            return await self._both(network, [(nodes[a], nodes[b]) for a, b in pairs])

        # The third one's way ends at a NIC whose other direction alone is in use.
        assert on(model, main) == pytest.approx([0.16, 0.16, 0.08], rel=0.01)

    def test_a_slow_link_beside_fast_ones(self) -> None:
        model = NetworkModel(bandwidth=1e9, way=Way(1e-4), ways={("one", "two"): Way(5e-3, bandwidth=100e6)})

        async def main(network: SimulatedNetwork) -> list[float]:
            one, two, three = (network.endpoint(name, name) for name in ("one", "two", "three"))
            return await self._both(network, [(one, two), (two, one), (one, three)])

        # What the slow one does not use of the NIC goes to the other.
        assert on(model, main) == pytest.approx([0.8, 0.08, 0.08 / 0.9], rel=0.03)

    def test_a_message_of_one_packet_passes_a_long_one(self) -> None:
        async def main(network: SimulatedNetwork) -> float:
            a, b, c = (network.endpoint(name, name) for name in "abc")
            await transfer(a, b, 0.001, "greetings")
            await transfer(c, b, 0.001, "greetings")
            long = asyncio.create_task(transfer(a, b, 100, "long"))
            await asyncio.sleep(0.1)
            start = asyncio.get_running_loop().time()
            await c.send("b", ("short",), ValuePayload(1))
            await b.receive("c", ("short",))
            took = asyncio.get_running_loop().time() - start
            await long
            return took

        assert on(GIGABIT, main) == pytest.approx(200e-6, rel=0.05)


class TestFinishing:
    """To leave a slow network takes the time that it needs."""

    SLOW = NetworkModel(bandwidth=1e6, way=Way(200e-6))

    def test_it_lasts_as_long_as_something_arrives(self) -> None:
        """Four megabytes, each of which takes 8 s: beyond the drain time, and all beyond the patience."""

        async def main(network: SimulatedNetwork) -> tuple[float, int, list[str]]:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            lost: list[str] = []
            b.on_lost(lambda peer, _: lost.append(peer))
            for number in range(4):
                await a.send("b", ("x", number), PhantomPayload(MB))
            await a.finish(timeout=10.0)
            seconds = asyncio.get_running_loop().time()
            await a.close()
            received = [await b.receive("a", ("x", number)) for number in range(4)]
            return seconds, sum(payload.nbytes for payload in received), lost

        seconds, nbytes, lost = on(self.SLOW, main)
        assert seconds == pytest.approx(32.0, rel=0.02)
        assert (nbytes, lost) == (4_000_000, [])

    def test_nothing_arrives_any_more(self) -> None:
        async def main(network: SimulatedNetwork) -> float:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            await transfer(a, b, 0.001, "greetings")
            await a.send("b", ("x",), PhantomPayload(MB))
            network.partition(["one"], ["two"])
            start = asyncio.get_running_loop().time()
            with pytest.raises(PeerTimeoutError, match=r"^b did not answer within 2 s while waiting for what a has sent"):
                await a.finish(timeout=2.0)
            return asyncio.get_running_loop().time() - start

        assert on(self.SLOW, main) == pytest.approx(2.0)

    def test_a_lost_peer_is_not_waited_for(self) -> None:
        async def main(network: SimulatedNetwork) -> None:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            await transfer(a, b, 0.001, "greetings")
            await a.send("b", ("x",), PhantomPayload(MB))
            network.kill("b")
            await a.finish(timeout=60.0)
            assert asyncio.get_running_loop().time() < 12.0  # QUICK.lost_s and a little

        on(self.SLOW, main)


class TestBreaking:
    """Links that drop, parted hosts, and processes that stand still or die."""

    @staticmethod
    async def _count(source: Node, target: Node, messages: int, pause_s: float) -> list[int]:
        """Send numbers; what has come of them."""

        async def send() -> None:
            for number in range(messages):
                await source.send(target.peer, ("n", number), TensorPayload.of(np.full(3000, float(number))))
                await asyncio.sleep(pause_s)

        sending = asyncio.create_task(send())
        received = []
        try:
            for number in range(messages):
                payload: Payload = await target.receive(source.peer, ("n", number))
                assert isinstance(payload, TensorPayload)
                received.append(int(payload.numpy()[0]))
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return received

    @pytest.mark.parametrize("loss", [0.01, 0.1])
    def test_all_arrives_in_spite_of_losses(self, loss: float) -> None:
        async def main(network: SimulatedNetwork) -> tuple[list[int], int]:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            return await self._count(a, b, 200, 0.001), a.statistics()["resent_bytes"]

        received, resent = on(NetworkModel(bandwidth=1e9, way=Way(200e-6, 50e-6, loss), reconnect=0.02), main)
        assert received == list(range(200))
        assert resent > 0

    def test_a_short_cut_only_delays(self) -> None:
        async def main(network: SimulatedNetwork) -> tuple[list[int], int, float]:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, lambda: loop.call_later(1.0, network.partition(["one"], ["two"])))
            received = await self._count(a, b, 100, 0.001)
            return received, a.statistics()["resent_bytes"], loop.time()

        received, resent, seconds = on(GIGABIT, main)
        assert received == list(range(100))
        assert resent == 0  # as TCP repeats it, and nobody above sees it
        assert seconds > 1.05

    def test_a_cut_beyond_heartbeats_breaks_the_connection_and_a_longer_one_the_link(self) -> None:
        async def main(network: SimulatedNetwork, lasts: float) -> tuple[list[int], int]:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            loop = asyncio.get_running_loop()
            loop.call_later(0.05, lambda: loop.call_later(lasts, network.partition(["one"], ["two"])))
            return await self._count(a, b, 100, 0.001), a.statistics()["resent_bytes"]

        received, resent = on(GIGABIT, lambda network: main(network, 5.0))
        assert received == list(range(100))
        assert resent > 0
        with pytest.raises(PeerLostError):
            on(GIGABIT, lambda network: main(network, 60.0))

    def test_one_way(self) -> None:
        """What goes the other way still arrives for a while; then the connection breaks, which needs both."""

        async def main(network: SimulatedNetwork) -> list[str]:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            await transfer(a, b, 0.01, "greetings")
            await transfer(b, a, 0.01, "greetings")
            network.partition(["one"], ["two"], one_way=True)
            lost: list[str] = []
            a.on_lost(lambda peer, _: lost.append(peer))
            with pytest.raises(PeerLostError):
                await b.receive("a", ("never",))
            await asyncio.sleep(5)
            return lost

        assert on(GIGABIT, main) == ["b"]

    def test_a_dead_process_is_seen_at_once_and_a_dead_machine_by_heartbeats(self) -> None:
        async def main(network: SimulatedNetwork, silent: bool) -> float:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            await transfer(a, b, 0.01)
            loop = asyncio.get_running_loop()
            start = loop.time()
            network.kill("a", silent=silent)
            with pytest.raises(PeerLostError):
                await b.receive("a", ("never",))
            return loop.time() - start

        assert on(GIGABIT, lambda network: main(network, False)) == pytest.approx(10.0, abs=0.1)
        assert on(GIGABIT, lambda network: main(network, True)) == pytest.approx(13.0, abs=0.1)

    def test_another_process_of_the_name_is_met(self) -> None:
        async def main(network: SimulatedNetwork) -> Payload:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            await transfer(a, b, 0.01)
            network.kill("a")
            again = network.endpoint("a", "one", QUICK)
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            b.on_lost(lambda peer, reason: lost.done() or lost.set_result(reason))
            await again.send("b", ("hello",), ValuePayload("again"))
            assert "restarted" in await lost or "another" in lost.result()
            return await b.receive("a", ("hello",))

        assert on(GIGABIT, main).meta == "again"

    def test_messages_wait_for_a_paused_process(self) -> None:
        async def main(network: SimulatedNetwork) -> float:
            loop = asyncio.get_running_loop()
            process = Process("b")
            a = network.endpoint("a", "one", QUICK)
            b = process.run(network.endpoint, "b", "two", QUICK)

            async def receive() -> float:
                await b.receive("a", ("x",))
                return loop.time()

            task = process.run(loop.create_task, receive())
            await asyncio.sleep(0.1)
            process.pause()
            network.pause("b")
            await a.send("b", ("x",), ValuePayload(1))
            await asyncio.sleep(2)
            assert not task.done()
            process.resume()
            network.resume("b")
            return await task

        assert on(GIGABIT, main) == pytest.approx(2.1, abs=0.3)

    def test_a_flipped_bit_of_a_header_closes_the_link(self) -> None:
        async def main(network: SimulatedNetwork) -> str:
            a, b = network.endpoint("a", "one", QUICK), network.endpoint("b", "two", QUICK)
            await transfer(a, b, 0.01)
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            b.on_lost(lambda peer, reason: lost.done() or lost.set_result(reason))
            for number in range(20):  # not every bit matters to a header
                network.corrupt("a", "b")
                await a.send("b", ("x", number), PhantomPayload(10))
                await asyncio.sleep(0.01)
                if lost.done():
                    break
            return await lost

        assert on(GIGABIT, main)


def test_names_and_addresses() -> None:
    async def main(network: SimulatedNetwork) -> None:
        a = network.endpoint("a", "one")
        with pytest.raises(ValueError, match="this network already has an endpoint a"):
            network.endpoint("a", "two")
        a.add_peer("b", "tcp://10.0.0.1:1")
        with pytest.raises(ValueError, match="is not an address of a simulated network"):
            await a.send("b", ("x",), ValuePayload(1))

    on(GIGABIT, main)
