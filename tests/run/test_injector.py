"""When faults begin and end, whatever they happen to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from zmqtrain.run.faults import Fault, delay, drop, heal, kill, partition, pause, restart, slow
from zmqtrain.run.injector import Heal, Injector
from zmqtrain.simulate.clock import run_virtual


class Noted:
    """Implements `zmqtrain.run.injector.Machines`: writes down what happens to them, and when."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, str]] = []

    def _note(self, what: str) -> None:
        self.seen.append((asyncio.get_running_loop().time(), what))

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, None]]:
        async def noted(*words: object) -> None:
            self._note(" ".join([name, *(f"{word:g}" if isinstance(word, float) else str(word) for word in words)]))

        return noted

    async def part(self, one: Sequence[str], others: Sequence[str], *, one_way: bool) -> Heal:
        text = f"{','.join(one)} {'to' if one_way else 'and'} {','.join(others)}"
        self._note(f"part {text}")

        async def heal() -> None:
            self._note(f"heal {text}")

        return heal


def carried_out(faults: Sequence[Fault], *steps: tuple[float, str, int]) -> list[tuple[float, str]]:
    """What happens in a hundred seconds. ``steps``: when who begins which."""

    async def live() -> list[tuple[float, str]]:
        machines = Noted()
        injector = Injector(machines, faults)
        running = asyncio.ensure_future(injector.run())
        for at, peer, step in steps:
            asyncio.get_running_loop().call_later(at, injector.hear, peer, step)
        await asyncio.sleep(100)
        running.cancel()
        await asyncio.wait([running])
        assert set(injector.done) == set(faults)
        return machines.seen

    return run_virtual(live(), seed=1)


def test_what_lasts_ends() -> None:
    faults = [restart("worker/1", at=3.0, after=2.0), pause("beta", 4.0, at=2.0), slow("worker/0", 4.0, at=1.0, lasts=9.0)]
    faults += [delay("alpha", 2.0, at=11.0), kill("worker/2", at=20.0), drop("worker/0", "worker/1", at=21.0)]
    assert carried_out(faults) == [
        (1.0, "slow worker/0 4"),
        (2.0, "pause beta"),
        (3.0, "restart worker/1 2"),
        (6.0, "resume beta"),
        (10.0, "slow worker/0 0.25"),
        (11.0, "delay alpha 2"),
        (20.0, "kill worker/2"),
        (21.0, "drop worker/0 worker/1"),
    ]


def test_partitions_end_once() -> None:
    faults = [
        partition(["a"], ["b"], ["c"], at=1.0, lasts=5.0),
        partition(["a"], ["c"], at=2.0, one_way=True),
        heal(at=4.0),
        partition(["b"], ["c"], at=5.0, lasts=1.0),
    ]
    assert carried_out(faults) == [
        (1.0, "part a and b,c"),
        (1.0, "part b and c"),
        (2.0, "part a to c"),
        (4.0, "heal a and b,c"),
        (4.0, "heal b and c"),
        (4.0, "heal a to c"),
        (5.0, "part b and c"),
        (6.0, "heal b and c"),
    ]


def test_steps_are_those_of_the_target_or_of_the_first_worker() -> None:
    """A step that is begun again, as after a loss, does not repeat them."""
    faults = [kill("worker/1", step=3), pause("server/0", 1.0, step=3)]
    steps = [(1.0, "worker/1", 2), (2.0, "worker/0", 3), (4.0, "worker/1", 3), (5.0, "worker/0", 3), (6.0, "worker/1", 3)]
    assert carried_out(faults, *steps) == [(2.0, "pause server/0"), (3.0, "resume server/0"), (4.0, "kill worker/1")]
