"""The paced transport: over one that remembers what it was given and when, on virtual time; and exact alarms, in real time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmqtrain.errors import UsageError
from zmqtrain.net.alarm import LoopAlarm, RealAlarm, real_alarm
from zmqtrain.net.conditions import Conditions
from zmqtrain.net.nics import TIMES, Nics
from zmqtrain.net.outbox import BULK, CONTROL
from zmqtrain.net.paced import LOOK_S, SLACK_S, PacedTransport
from zmqtrain.net.shaping import LinkShape, Shaping, ShapingPlan, SharedNics
from zmqtrain.net.transport import Frames, Receiver
from zmqtrain.simulate.clock import run_virtual

RATE = 1e6
LATENCY_S = 0.002
PIECE = 10_000


class Below:
    """A transport that is infinitely fast, and keeps a list."""

    address = "below://"

    def __init__(self, *, refuses: int = 0) -> None:
        self.sent: list[tuple[float, str, int, int, bytes]] = []
        self.gone: list[tuple[float, str]] = []
        self.refuses = refuses
        self.closed = False

    def start(self, receiver: Receiver) -> None:
        raise NotImplementedError

    def find(self, peer: str) -> str:
        return ""

    def connect(self, peer: str, address: str, route: bytes) -> None:
        self.gone.append((asyncio.get_running_loop().time(), f"+{peer}"))

    def disconnect(self, peer: str) -> None:
        self.gone.append((asyncio.get_running_loop().time(), f"-{peer}"))

    def send(self, peer: str, lane: int, frames: Frames, nbytes: int, header: object = None) -> bool:
        if self.refuses:
            self.refuses -= 1
            return False
        self.sent.append((asyncio.get_running_loop().time(), peer, lane, nbytes, bytes(frames[0])))
        return True

    def post(self, address: str, frames: Frames) -> None:
        self.sent.append((asyncio.get_running_loop().time(), address, CONTROL, 0, bytes(frames[0])))

    async def close(self) -> None:
        self.closed = True


#: Every host has a NIC each way: 2 * number to send, 2 * number + 1 to get.
HOSTS = ("a", "b", "c")


def shaping(host: str, *, rates: Sequence[float] = (RATE,) * 6, latency_s: float = LATENCY_S, down: bool = False) -> Shaping:
    own = HOSTS.index(host)
    ways = {
        other: LinkShape((2 * own, 2 * number + 1) if rates else (), latency_s, down)
        for number, other in enumerate(HOSTS)
        if other != host
    }
    host_of = {f"{name}/{number}": name for name in HOSTS for number in range(3)}
    return Shaping(host, host_of, ways, rates)


def paced(
    below: Below, how: Shaping, nics: Nics | None = None, *, hold_bytes: int = 10**9, peers: Sequence[str] = ()
) -> PacedTransport:
    nics = nics or Nics([0.0] * (TIMES * len(how.rates)), how.rates)
    transport = PacedTransport(below, how, nics=nullcontext(nics), hold_bytes=hold_bytes, farewell_s=1.0)
    for peer in peers:
        transport.connect(peer, "anywhere", b"route")
    return transport


def test_a_message_takes_its_bytes_and_the_latency() -> None:
    async def main() -> None:
        below = Below()
        transport = paced(below, shaping("a"), peers=["b/0"])
        assert transport.send("b/0", BULK, (b"x" * PIECE,), PIECE)
        assert transport.send("b/0", CONTROL, (b"now",), 0)  # counts what its frames do
        await asyncio.sleep(1)
        (first, *_), (second, *_, size, _) = below.sent
        assert first == pytest.approx(LATENCY_S + 3 / RATE)
        assert second == pytest.approx(LATENCY_S + (PIECE + 3) / RATE)
        assert size == PIECE

    run_virtual(main())


def test_phantoms_take_their_time_without_bytes() -> None:
    async def main() -> None:
        below = Below()
        transport = paced(below, shaping("a"), peers=["b/0"])
        transport.send("b/0", BULK, (b"header",), PIECE)
        await asyncio.sleep(1)
        assert below.sent[0][0] == pytest.approx(LATENCY_S + PIECE / RATE)

    run_virtual(main())


def test_what_stays_within_a_host_is_not_shaped() -> None:
    async def main() -> None:
        below = Below()
        transport = paced(below, shaping("a"), peers=["a/1"])
        for peer in ("a/1", "somebody"):
            assert transport.send(peer, BULK, (b"x",), PIECE)
        assert [when for when, *_ in below.sent] == [0.0, 0.0]

    run_virtual(main())


def test_latency_alone() -> None:
    async def main() -> None:
        below = Below()
        transport = paced(below, shaping("a", rates=()), peers=["b/0"])
        for lane in (BULK, CONTROL):
            transport.send("b/0", lane, (b"x",), PIECE)
        await asyncio.sleep(1)
        assert [when for when, *_ in below.sent] == [LATENCY_S, LATENCY_S]

    run_virtual(main())


def test_nothing_gets_through_a_way_that_is_down() -> None:
    async def main() -> None:
        below = Below()
        transport = paced(below, shaping("a", down=True), peers=["b/0"])
        assert transport.send("b/0", BULK, (b"x",), 1)
        assert transport.send("b/0", CONTROL, (b"x",), 1)
        await asyncio.sleep(1)
        assert not below.sent
        assert [what for _, what in below.gone] == ["-b/0"]
        await transport.close()
        assert below.closed

    run_virtual(main())


class Ear:
    """A receiver that writes down which links have broken, and when."""

    def __init__(self) -> None:
        self.down: list[tuple[float, str]] = []

    def on_link_down(self, peer: str) -> None:
        self.down.append((asyncio.get_running_loop().time(), peer))


class Started(Below):
    """One that can be started."""

    def start(self, receiver: Receiver) -> None:
        """Nothing arrives."""


def conditional(folder: Path) -> tuple[Started, Ear, PacedTransport, Conditions]:
    """The transport of ``a/0``, connected to ``b/0`` and ``c/0``, and what changes on its network."""
    how = replace(shaping("a"), peer="a/0")
    conditions = Conditions.create(folder / "conditions", how.host_of)
    below, ear = Started(), Ear()
    transport = paced(below, replace(how, conditions=conditions), peers=["b/0", "c/0"])
    transport.start(ear)  # type: ignore[arg-type]
    return below, ear, transport, conditions


def test_a_link_that_is_cut_for_a_moment_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        below, ear, transport, conditions = conditional(tmp_path)
        conditions.part("a", "b", 1)
        for peer in ("b/0", "c/0"):
            for lane, frame in ((BULK, b"1"), (BULK, b"2"), (CONTROL, b"3")):
                transport.send(peer, lane, (frame,), PIECE)
        await asyncio.sleep(1)
        assert [peer for _, peer, *_ in below.sent] == ["c/0"] * 3
        conditions.part("a", "b", -1)
        await asyncio.sleep(LOOK_S)
        late = [(lane, frame) for _, peer, lane, _, frame in below.sent if peer == "b/0"]
        assert sorted(late) == sorted([(BULK, b"1"), (BULK, b"2"), (CONTROL, b"3")])
        assert late.index((BULK, b"1")) < late.index((BULK, b"2"))
        assert not ear.down
        await transport.close()

    run_virtual(main())


def test_a_connection_breaks_if_its_link_is_cut_for_long(tmp_path: Path) -> None:
    """Whichever direction is cut; and it is made anew when both are there again."""

    async def main() -> None:
        below, ear, transport, conditions = conditional(tmp_path)
        conditions.part("b", "a", 1)
        await asyncio.sleep(2)
        transport.send("b/0", BULK, (b"arrives",), 1)
        await asyncio.sleep(2)
        assert ear.down == [(pytest.approx(3.0, abs=2 * LOOK_S), "b/0")]
        assert below.gone[-1] == (ear.down[0][0], "-b/0")
        conditions.part("a", "b", 1)
        transport.send("b/0", BULK, (b"lost",), 1)
        transport.send("b/0", CONTROL, (b"lost",), 1)
        conditions.part("b", "a", -1)
        await asyncio.sleep(2)
        assert below.gone[-1][1] == "-b/0"
        conditions.part("a", "b", -1)
        await asyncio.sleep(1)
        assert below.gone[-1][1] == "+b/0"
        transport.send("b/0", BULK, (b"again",), 1)
        await asyncio.sleep(1)
        assert [frame for *_, frame in below.sent] == [b"arrives", b"again"]
        await transport.close()

    run_virtual(main())


def test_no_farewell_passes_a_cut(tmp_path: Path) -> None:
    """And whoever is connected to meanwhile is reached once the link is healed."""

    async def main() -> None:
        below, _, transport, conditions = conditional(tmp_path)
        conditions.part("a", "b", 1)
        transport.send("b/0", CONTROL, (b"bye",), 0)
        transport.disconnect("b/0")
        connections = len(below.gone)
        transport.connect("b/1", "anywhere", b"route")
        assert [what for _, what in below.gone[connections:]] == ["-b/1"]
        conditions.part("a", "b", -1)
        await asyncio.sleep(2 * LOOK_S)
        assert below.gone[-1][1] == "+b/1"
        conditions.part("a", "c", 1)
        transport.send("c/0", CONTROL, (b"bye",), 0)
        await transport.close()
        assert [frame for *_, frame in below.sent] == [b"bye"]

    run_virtual(main())


def test_latency_may_grow(tmp_path: Path) -> None:
    async def main() -> None:
        below, _, transport, conditions = conditional(tmp_path)
        conditions.delay_more(["a/0"], 50.0)
        transport.send("b/0", CONTROL, (b"x",), 0)
        await asyncio.sleep(1)
        conditions.delay_more(["a/0"], 1 / 50)
        transport.send("b/0", CONTROL, (b"x",), 0)
        await asyncio.sleep(1)
        (slow, *_), (quick, *_) = below.sent
        assert slow == pytest.approx(50 * LATENCY_S, abs=1e-4)
        assert quick == pytest.approx(1 + LATENCY_S, abs=1e-4)
        assert conditions.slowdown("a/0") == 1.0
        await transport.close()

    run_virtual(main())


def test_processes_share_conditions(tmp_path: Path) -> None:
    host_of = {"agent/x": "x", "worker/0": "y", "worker/1": "x"}
    told = ShapingPlan(host_of, {}, []).write(tmp_path, tmp_path / "conditions")
    written = Conditions.create(tmp_path / "conditions", host_of)
    one, other = (Shaping.load(str(told), peer).conditions for peer in ("worker/0", "worker/1"))
    assert one is not None
    assert other is not None
    written.slow_down(["worker/1", "worker/0"], 3.0)
    written.part("x", "y", 2)
    assert (one.slowdown("worker/0"), one.slowdown("agent/x"), other.slowdown("worker/1")) == (3.0, 1.0, 3.0)
    assert (one.cut("x", "y"), one.cut("y", "x"), other.silent("y", "x")) == (True, False, True)
    written.part("x", "y", -2)
    assert not other.silent("y", "x")
    assert Shaping.load(str(ShapingPlan(host_of, {}, []).write(tmp_path)), "worker/0").conditions is None
    for each in (written, one, other):
        each.close()


def test_only_so_much_is_held() -> None:
    async def main() -> None:
        below = Below()
        transport = paced(below, shaping("a"), hold_bytes=3 * PIECE, peers=["b/0", "c/0"])

        def send(peer: str) -> bool:
            return transport.send(peer, BULK, (b"x",), PIECE)

        assert [send("b/0") for _ in range(4)] == [True, True, True, False]
        assert transport.send("b/0", CONTROL, (b"x",), 1)  # never refused
        assert send("c/0")  # another's turn
        await asyncio.sleep(1)
        assert send("b/0")
        assert transport.send("c/0", BULK, (b"x",), 100 * PIECE)  # alone, however large

    run_virtual(main())


def test_refusals_below_change_no_order() -> None:
    async def main() -> None:
        below = Below(refuses=3)
        transport = paced(below, shaping("a"), peers=["b/0"])
        for number in range(5):
            transport.send("b/0", BULK, (b"%d" % number,), PIECE)
        await asyncio.sleep(1)
        assert [frame for *_, frame in below.sent] == [b"0", b"1", b"2", b"3", b"4"]

    run_virtual(main())


def test_a_farewell_goes_out_before_the_connection_ends() -> None:
    async def main() -> None:
        below = Below()
        transport = paced(below, shaping("a"), peers=["b/0"])
        transport.send("b/0", BULK, (b"lost",), PIECE)
        transport.send("b/0", CONTROL, (b"bye",), 0)
        transport.disconnect("b/0")
        transport.disconnect("b/0")
        await asyncio.sleep(1)
        assert [frame for *_, frame in below.sent] == [b"bye"]
        assert [what for _, what in below.gone] == ["-b/0", "+b/0", "-b/0"]
        assert below.gone[-1][0] == below.sent[0][0]

    run_virtual(main())


def test_a_new_connection_does_not_wait_for_the_farewell_of_the_old() -> None:
    async def main() -> None:
        below = Below()
        transport = paced(below, shaping("a"), peers=["b/0"])
        transport.send("b/0", CONTROL, (b"bye",), 0)
        transport.connect("b/0", "elsewhere", b"route")
        transport.send("b/0", CONTROL, (b"hello",), 0)
        assert [what for _, what in below.gone] == ["-b/0", "+b/0", "-b/0", "+b/0"]
        await asyncio.sleep(1)
        assert [frame for *_, frame in below.sent] == [b"bye", b"hello"]

    run_virtual(main())


def test_closing_waits_for_farewells_but_not_for_long() -> None:
    async def main(latency_s: float) -> tuple[float, int]:
        below = Below()
        transport = paced(below, shaping("a", latency_s=latency_s), peers=["b/0", "c/0"])
        transport.send("b/0", CONTROL, (b"bye",), 0)
        await transport.close()
        assert below.closed
        return asyncio.get_running_loop().time(), len(below.sent)

    assert run_virtual(main(LATENCY_S)) == (pytest.approx(LATENCY_S + 3 / RATE), 1)
    assert run_virtual(main(100.0)) == (1.0, 0)


#: Which process sends to which, how large, and how long after the one before.
TRAFFIC = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(1, PIECE), st.floats(0, 0.02)), max_size=60
)


@settings(deadline=None)
@given(TRAFFIC)
def test_no_nic_is_too_fast_and_none_mixes_up_an_order(traffic: list[tuple[int, int, int, int, float]]) -> None:
    """Three hosts with three processes each, which share a NIC each way."""

    async def main() -> list[tuple[float, str, str, int, bytes]]:
        nics = Nics([0.0] * (6 * TIMES), (RATE,) * 6)
        peers = [f"{name}/{number}" for name in HOSTS for number in range(3)]
        belows = {peer: Below() for peer in peers}
        transports = {peer: paced(belows[peer], shaping(peer[0]), nics, peers=[p for p in peers if p != peer]) for peer in peers}
        for number, (source, hop, process, nbytes, pause) in enumerate(traffic):
            await asyncio.sleep(pause)
            peer, other = f"{HOSTS[source]}/{process}", f"{HOSTS[(source + 1 + hop % 2) % 3]}/{process}"
            transports[peer].send(other, BULK, (b"%d" % number,), nbytes)
        await asyncio.sleep(10)
        return [(when, peer, to, size, frame) for peer in peers for when, to, _, size, frame in belows[peer].sent]

    sent = run_virtual(main())
    assert len(sent) == len(traffic)
    pairs: dict[tuple[str, str], list[int]] = {}
    for _, source, target, _, frame in sorted(sent, key=lambda item: item[0]):
        pairs.setdefault((source, target), []).append(int(frame))
    assert all(numbers == sorted(numbers) for numbers in pairs.values())
    for host in HOSTS:
        for end in (1, 2):
            # What is due within the slack goes out at once; which of it was first is not seen, so the largest may have been.
            through = sorted(((item[0], item[3]) for item in sent if item[end][0] == host), key=lambda item: (item[0], -item[1]))
            for first in range(len(through)):
                inside = 0
                for last in range(first, len(through)):
                    inside += through[last][1]
                    # The first may have begun before the window, and one that was carried around it, too. What a host sends is
                    # seen here as it arrives, and may have queued for the receivers in between.
                    most = RATE * (through[last][0] - through[first][0] + SLACK_S) + through[first][1] + PIECE
                    assert inside <= most or end == 1


def test_what_a_host_gets_meanwhile_delays_a_tensor_by_its_own_time() -> None:
    """An acknowledgement, which another process of the same host waits for, comes in while a tensor does."""

    async def main() -> None:
        nics = Nics([0.0] * (6 * TIMES), (RATE,) * 6)
        below, other = Below(), Below()
        one, two = paced(below, shaping("a"), nics, peers=["b/0"]), paced(other, shaping("c"), nics, peers=["b/1"])
        one.send("b/0", BULK, (b"tensor",), PIECE)
        for _ in range(5):
            await asyncio.sleep(0.9 / 5 * PIECE / RATE)
            two.send("b/1", CONTROL, (b"x" * 10,), 10)
        await asyncio.sleep(PIECE / RATE + LATENCY_S)
        assert below.sent[0][0] == pytest.approx((PIECE + 50) / RATE + LATENCY_S, rel=1e-6)

    run_virtual(main())


def test_flows_of_a_host_take_turns() -> None:
    async def main() -> None:
        nics = Nics([0.0] * (6 * TIMES), (RATE,) * 6)
        below, other = Below(), Below()
        one, two = paced(below, shaping("a"), nics, peers=["b/0", "c/0"]), paced(other, shaping("a"), nics, peers=["b/1"])
        for _ in range(10):
            one.send("b/0", BULK, (b"x",), PIECE)
            one.send("c/0", BULK, (b"x",), PIECE)
            two.send("b/1", BULK, (b"x",), PIECE)
        await asyncio.sleep(9 * PIECE / RATE + LATENCY_S + 1e-4)
        counts = [sum(1 for _, peer, *_ in below.sent if peer == to) for to in ("b/0", "c/0")]
        assert [*counts, len(other.sent)] == [3, 3, 3]
        await asyncio.sleep(21 * PIECE / RATE)
        assert len(below.sent) + len(other.sent) == 30

    run_virtual(main())


def test_a_busy_receiver_holds_up_nobody_else() -> None:
    async def main() -> None:
        nics = Nics([0.0] * (6 * TIMES), (RATE, RATE, RATE, RATE / 100, RATE, RATE))
        below = Below()
        transport = paced(below, shaping("a"), nics, hold_bytes=2 * PIECE, peers=["b/0", "c/0"])
        for _ in range(2):
            transport.send("b/0", BULK, (b"x",), PIECE)
        for _ in range(2):
            transport.send("c/0", BULK, (b"x",), PIECE)
        await asyncio.sleep(4 * PIECE / RATE + LATENCY_S + 1e-4)
        assert [peer for _, peer, *_ in below.sent] == ["c/0", "c/0"]

    run_virtual(main())


# What processes share -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_read_back(tmp_path: Path) -> None:
    way = LinkShape((0, 1), LATENCY_S)
    plan = ShapingPlan({"a/0": "a", "b/0": "b"}, {("a", "b"): way, ("b", "a"): LinkShape((2, 3), 0.0, True)}, [RATE] * 4)
    path = plan.write(tmp_path)
    read = Shaping.load(str(path), "a/0")
    assert read.host == "a"
    assert read.way_to("b/0") == way
    assert read.way_to("a/0") is None
    assert read.way_to("nobody") is None
    back = Shaping.load(str(path), "b/0").way_to("a/0")
    assert back is not None
    assert back.down
    shared, same = SharedNics(read.nics_file, read.rates), SharedNics(read.nics_file, read.rates)
    with shared as nics:
        assert nics.reserve(0, int(RATE), 1.0) == (1.0, 2.0)
    with same as nics:
        assert nics.reserve(0, int(RATE), 1.0) == (2.0, 3.0)
    shared.close()
    same.close()


def test_no_plan_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ZMQTRAIN_SHAPING"):
        Shaping.load(str(tmp_path / "none"), "a/0")


@pytest.mark.parametrize("make", [LoopAlarm, RealAlarm, real_alarm])
async def test_an_alarm_rings_once_and_not_too_early(make: type[LoopAlarm] | type[RealAlarm]) -> None:
    loop = asyncio.get_running_loop()
    rung: list[float] = []
    again = asyncio.Event()

    def wake() -> None:
        rung.append(loop.time())
        again.set()

    try:
        alarm = make(loop, wake)
    except OSError as error:
        pytest.skip(str(error))
    alarm.set(loop.time() + 100)
    due = loop.time() + 0.003
    alarm.set(due)
    async with asyncio.timeout(10):
        await again.wait()
    assert rung[0] >= due - 0.002
    again.clear()
    alarm.set(loop.time() - 1)  # at once
    async with asyncio.timeout(10):
        await again.wait()
    alarm.set(math.nextafter(loop.time(), math.inf))
    alarm.close()
    await asyncio.sleep(0.002)
    assert len(rung) == 2
