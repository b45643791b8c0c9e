"""Elastic averaging, outer optimizers, fragments and overlap against the papers' equations, in one process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.collectives.world import endpoints, group_of
from tests.exchange.world import Array, Data, NumpyReplica, train_worker
from zmqtrain.exchange.arithmetic import Arithmetic
from zmqtrain.exchange.averaging.exchange import AveragingExchange, AveragingGroups
from zmqtrain.exchange.averaging.fragments import Fragments
from zmqtrain.exchange.averaging.methods import Average, Elastic, Method, Outer
from zmqtrain.exchange.rounded_mean import RoundedMean
from zmqtrain.wire.compress import make_codec
from zmqtrain.wire.payload import Value
from zmqtrain.wire.tensor import TensorPayload

SIZES = (5, 1, 17, 300)
STEPS = 13


@dataclass(frozen=True)
class Case:
    method: Literal["average", "elastic", "outer"] = "average"
    fragments: Fragments = field(default_factory=lambda: Fragments(3))
    mix: float = 0.0

    def make(self, groups: int) -> Method:
        return {"average": Average, "elastic": lambda: Elastic(groups), "outer": lambda: Outer(0.7, 0.9)}[self.method]()  # type: ignore[operator,no-any-return]


def train(
    case: Case,
    groups: int,
    group_size: int,
    data: Data,
    *,
    deltas: Literal["float32", "fp16", "int8"] = "float32",
    after: Callable[[list[AveragingExchange], list[NumpyReplica]], None] | None = None,
    before: Callable[[list[AveragingExchange], list[NumpyReplica]], None] | None = None,
    steps: range = range(STEPS),
) -> list[list[Array]]:
    async def run() -> list[list[Array]]:
        async with endpoints(groups * group_size) as nodes:
            world = group_of(nodes, "workers")
            rows = [group_of(nodes[g * group_size : (g + 1) * group_size], f"group/{g}") for g in range(groups)]
            columns = [group_of(nodes[position::group_size], f"column/{position}") for position in range(group_size)]
            made, replicas = [], []
            for rank in range(groups * group_size):
                group, position = divmod(rank, group_size)
                mine = AveragingGroups(world[rank], rows[group][position], columns[position][group])
                made.append(AveragingExchange(mine, case.fragments, case.make(groups), deltas=deltas, mix=case.mix))
                replicas.append(NumpyReplica(SIZES, rank))
            if before is not None:
                before(made, replicas)

            async def worker(rank: int) -> list[Array]:
                how: dict[str, Any] = {"rank": rank, "groups": groups, "group_size": group_size, "steps": steps}
                stop = made[rank].stop

                async def keep() -> None:
                    return None

                made[rank].stop = keep  # type: ignore[method-assign]  # what is kept is looked at before the end
                history = await train_worker(made[rank], replicas[rank], data, **how)
                made[rank].stop = stop  # type: ignore[method-assign]
                return history

            histories = await asyncio.gather(*(worker(rank) for rank in range(groups * group_size)))
            if after is not None:
                after(made, replicas)
            await asyncio.gather(*(each.stop() for each in made))
            assert len(asyncio.all_tasks()) == 1
            return list(histories)

    return asyncio.run(run())


def reference(case: Case, groups: int, data: Data) -> list[list[Array]]:
    """By group and step."""
    replicas = [NumpyReplica(SIZES, 0) for _ in range(groups)]
    centers = [weight.copy() for weight in replicas[0].weights]
    momenta = [np.zeros(size) for size in SIZES]
    flights: dict[int, list[Array]] = {}
    history: list[list[Array]] = [[] for _ in range(groups)]
    fragments, alpha = case.fragments, 0.9 / groups
    for step in range(data.inputs.shape[0]):
        for group, replica in enumerate(replicas):
            replica.backward(*data.share(step, group, groups), data.inputs.shape[1] // groups)
            asyncio.run(replica.update())
            asyncio.run(replica.take_all())
        for index in range(len(SIZES)):
            weights = [replica.weights[index] for replica in replicas]
            if fragments.delay and fragments.ends(step, index) and index in flights:
                apply(case, weights, flights.pop(index), centers, momenta, index, alpha)
            if fragments.begins(step, index):
                flights[index] = [weight.copy() for weight in weights]
                if not fragments.delay:
                    apply(case, weights, flights.pop(index), centers, momenta, index, alpha)
        for group, replica in enumerate(replicas):
            history[group].append(replica.flat())
    return history


def apply(
    case: Case, weights: list[Array], then: list[Array], centers: list[Array], momenta: list[Array], index: int, alpha: float
) -> None:
    mix = case.mix if case.fragments.delay else 0.0
    mean = sum(then) / len(then)
    if case.method == "average":
        for weight in weights:
            weight[:] = mix * weight + (1 - mix) * mean
    elif case.method == "elastic":
        pulls = [each - centers[index] for each in then]
        for weight, pull in zip(weights, pulls, strict=True):
            weight -= alpha * pull
        centers[index] += alpha * sum(pulls)
    else:
        gradient = centers[index] - mean
        momenta[index][:] = 0.9 * momenta[index] + gradient
        centers[index] -= 0.7 * (gradient + 0.9 * momenta[index])
        for weight in weights:
            weight[:] = mix * weight + (1 - mix) * centers[index]


CASES = [
    Case("average", Fragments(3)),
    Case("average", Fragments(4, 2, 1), mix=0.5),
    Case("elastic", Fragments(1)),
    Case("elastic", Fragments(3)),
    Case("elastic", Fragments(4, 4, 2)),
    Case("outer", Fragments(3)),
    Case("outer", Fragments(4, 2)),
    Case("outer", Fragments(5, 3, 2), mix=0.5),
    Case("outer", Fragments(4, 1, 3), mix=0.25),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("groups", "group_size"), [(1, 1), (2, 1), (3, 2)])
def test_equals_the_equations(case: Case, groups: int, group_size: int) -> None:
    data = Data(sum(SIZES), 12 * groups * group_size, STEPS)
    expected = reference(case, groups, data) if groups > 1 else reference(Case("average", Fragments(1)), 1, data)
    for rank, history in enumerate(workers := train(case, groups, group_size, data)):
        np.testing.assert_allclose(history, expected[rank // group_size], rtol=1e-11, atol=1e-11)
        assert history[-1].tobytes() == workers[rank - rank % group_size][-1].tobytes(), "replicas of a group drift apart"


def test_what_all_keep_is_equal_to_the_bit() -> None:
    for case in (Case("elastic", Fragments(3)), Case("outer", Fragments(3))):
        states: list[Mapping[str, Value]] = []
        train(case, 3, 1, Data(sum(SIZES), 36, STEPS), after=lambda made, _, kept=states: kept.extend(e.state_dict() for e in made))  # type: ignore[misc]
        assert states[0]
        assert states[0] == states[1] == states[2]


@pytest.mark.parametrize(("deltas", "tolerance"), [("fp16", 2e-3), ("int8", 3e-2)])
def test_rounded_changes_stay_near_and_replicas_equal(deltas: Literal["fp16", "int8"], tolerance: float) -> None:
    case, data = Case("outer", Fragments(3)), Data(sum(SIZES), 36, 12)
    exact, rounded = train(case, 3, 1, data, steps=range(12)), train(case, 3, 1, data, deltas=deltas, steps=range(12))
    scale = np.abs(exact[0][-1]).max()
    assert 0 < np.abs(rounded[0][-1] - exact[0][-1]).max() < tolerance * scale
    assert len({history[-1].tobytes() for history in rounded}) == 1, "after an exchange all are equal to the bit"


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_what_rounding_loses_is_made_up_for(codec: Literal["fp16", "int8"]) -> None:
    """Over many rounds the sum of the means is the mean of the sums, as near as one round's error."""

    async def run() -> None:
        async with endpoints(3) as nodes:
            columns = group_of(nodes, "column")
            means = [RoundedMean(make_codec(codec), Arithmetic("means")) for _ in columns]
            random = np.random.default_rng(5)
            values = [random.standard_normal(50) for _ in means]
            total = np.zeros(50)
            for step in range(40):
                payloads = [TensorPayload.of(value.copy()) for value in values]
                ranks = zip(means, columns, payloads, strict=True)
                await asyncio.gather(*(mean.mean(column, 0, payload, ("mean", step)) for mean, column, payload in ranks))
                assert len({payload.numpy().tobytes() for payload in payloads}) == 1
                total += payloads[0].numpy()
            once = np.abs(np.mean(values, axis=0)).max() * {"fp16": 2e-3, "int8": 3e-2}[codec]
            assert np.abs(total - 40 * np.mean(values, axis=0)).max() < once

    asyncio.run(run())


@pytest.mark.parametrize(
    "case", [Case("elastic", Fragments(3)), Case("outer", Fragments(5, 3, 2), mix=0.5), Case("outer", Fragments(2))], ids=str
)
@pytest.mark.parametrize("deltas", ["float32", "int8"])
def test_resumed_is_uninterrupted(case: Case, deltas: Literal["float32", "int8"]) -> None:
    data = Data(sum(SIZES), 24, STEPS)
    whole = train(case, 2, 1, data, deltas=deltas)
    kept: list[tuple[Mapping[str, Value], list[Array], list[Array]]] = []

    def keep(made: list[AveragingExchange], replicas: list[NumpyReplica]) -> None:
        for exchange, replica in zip(made, replicas, strict=True):
            kept.append((exchange.state_dict(), [w.copy() for w in replica.weights], [m.copy() for m in replica.momentum]))

    def take(made: list[AveragingExchange], replicas: list[NumpyReplica]) -> None:
        for exchange, replica, (state, weights, momentum) in zip(made, replicas, kept, strict=True):
            exchange.load_state_dict(state)
            for mine, theirs in zip(replica.weights + replica.momentum, weights + momentum, strict=True):
                mine[:] = theirs

    train(case, 2, 1, data, deltas=deltas, steps=range(7), after=keep)
    resumed = train(case, 2, 1, data, deltas=deltas, steps=range(7, STEPS), before=take)
    for before, after in zip(whole, resumed, strict=True):
        assert [each.tobytes() for each in before[7:]] == [each.tobytes() for each in after]


@given(st.integers(1, 40), st.data())
def test_each_fragment_has_its_turn_once_in_a_round(every: int, data: st.DataObject) -> None:
    count, delay = data.draw(st.integers(1, every)), data.draw(st.integers(0, every - 1))
    fragments = Fragments(every, count, delay)
    turns = {bucket: [step for step in range(3 * every) if fragments.begins(step, bucket)] for bucket in range(count)}
    for steps in turns.values():
        assert len(steps) == 3
        assert all(after - before == every for before, after in itertools.pairwise(steps))
        assert all(fragments.ends(step + delay, list(turns.values()).index(steps)) for step in steps)
    assert len({steps[0] for steps in turns.values()}) == count, "no two at once"


@pytest.mark.parametrize(
    ("every", "count", "delay", "words"), [(0, 1, 0, "every 0"), (3, 4, 0, "4 fragments"), (3, 1, 3, "takes 3 steps")]
)
def test_bad_rounds(every: int, count: int, delay: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fragments(every, count, delay)
