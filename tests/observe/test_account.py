"""The account of samples says what a replay of the run says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.simulate import test_elastic, test_elastic_averages, test_elastic_servers, test_elastic_whole_groups
from tests.simulate.worlds import servers_topology
from zmqtrain.data.division import length_of
from zmqtrain.observe.account import SampleAccount, account_lines
from zmqtrain.run.faults import Fault, drain, kill, restart
from zmqtrain.simulate.run import Options, simulate
from zmqtrain.topology.schema import Topology


class Truth:
    """What the auditor is told about what counts."""

    def __init__(self) -> None:
        self.takes: dict[tuple[str, int], int] = {}  # worker, step -> its samples
        self.summed: dict[int, int] = {}  # step -> samples
        self.averaged: dict[int, list[str]] = {}  # step -> members
        self.summed_by_groups: set[tuple[int, int]] = set()  # step, group of two
        self.batches: dict[tuple[str, int], int] = {}  # server, piece -> batches

    def hear(self, peer: str, what: str, values: Mapping[str, Any]) -> None:
        if what == "counted":
            self.averaged[values["step"]] = list(values["members"])
            self.summed[values["step"]] = sum(self.takes.get((peer, values["step"]), 0) for peer in values["members"])
        elif what == "summed":
            self.summed_by_groups.add((values["step"], int(peer.removeprefix("worker/")) // 2))
        elif what == "divides":
            self.takes[peer, values["step"]] = length_of(values["spans"])
        elif what == "applied":
            where = peer, values["piece"]
            self.batches[where] = self.batches.get(where, 0) + len(values["reads"]) - len(values["skipped"])


def account_of(topology: Topology, faults: Sequence[Fault], seed: int = 1) -> tuple[dict[str, Any], Truth]:
    account, truth = SampleAccount(), Truth()

    def report(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            account.add(peer, {"step": None, **event, "values": event.get("values") or {}})

    result = simulate(topology, seed=seed, options=Options(faults=faults, on_report=report, on_audit=truth.hear))
    assert (result.ending.status, result.broken) == ("done", [])
    found = account.to_dict(topology, done=True)
    assert found is not None
    return found, truth


LOSSES: list[list[Fault]] = [
    [],
    [kill("worker/1", step=8)],
    [restart("worker/1", at=0.02, after=0.005), kill("worker/2", step=12)],
]


@pytest.mark.parametrize("staleness", ['"async"', '"sync"'])
@pytest.mark.parametrize("faults", LOSSES, ids=["none", "one", "back"])
def test_model_servers_lose_and_repeat_nothing(faults: list[Fault], staleness: str) -> None:
    topology = test_elastic_servers.topology(staleness, epochs=True)
    found, truth = account_of(topology, faults)
    assert set(truth.batches.values()) == {60}  # two epochs of ten steps of three groups
    assert found == {"due": 60 * 2000, "counted": 60 * 2000, "repeated": 0, "lost": 0, "why": None}
    assert account_lines(found) == []


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [kill("server/1", at=0.02), kill("worker/1", step=8)],
        [restart("server/1", at=0.02, after=0.01)],
        [drain("s3", at=0.02), kill("server/0", at=0.05)],
    ],
    ids=["none", "lost", "back", "drained and lost"],
)
def test_servers_that_keep_shards_twice_lose_and_repeat_nothing(faults: list[Fault]) -> None:
    """Whoever serves a shard in the end knows what counts in it."""
    topology = servers_topology('"sync"', servers=3, epochs=True, exchange="replicas = 1", job="elastic = true")
    found, _ = account_of(topology, faults)
    assert found == {"due": 60 * 2000, "counted": 60 * 2000, "repeated": 0, "lost": 0, "why": None}


def test_a_shard_of_which_no_server_has_spoken_makes_an_account_with_replicas_unknown() -> None:
    """Its last server was lost when all had been trained."""
    topology = servers_topology('"sync"', servers=2, exchange="replicas = 1", job="elastic = true")
    account = SampleAccount()
    account.add("worker/0", {"kind": "start", "step": 0, "values": {"steps": 24}})
    assert account.to_dict(topology, done=True) is None
    for server, shards in (("server/0", [0]), ("server/1", [1])):
        assert account.to_dict(topology, done=True) is None
        values = {"batches": 72, "batches_most": 72, "shards": shards}
        account.add(server, {"kind": "server", "step": None, "values": values})
    assert account.to_dict(topology, done=True) is not None


@pytest.mark.parametrize("faults", LOSSES, ids=["none", "one", "back"])
def test_all_reduce_says_what_lost_workers_have_left(faults: list[Fault]) -> None:
    topology = test_elastic.allreduce(steps=40)
    found, truth = account_of(topology, faults)
    batch, groups = topology.compute.batch_size, topology.compute.groups
    assert found["due"] == len(truth.summed) * groups * batch
    assert found["counted"] == sum(truth.summed.values())
    assert (found["lost"], found["repeated"]) == (found["due"] - found["counted"], 0)
    assert (found["why"] is not None) == bool(faults) == bool(account_lines(found))


@pytest.mark.parametrize("faults", LOSSES, ids=["none", "one", "back"])
def test_where_shares_stay_fewer_samples_are_due_of_fewer_workers(faults: list[Fault]) -> None:
    """Only of the step in which a worker is lost, and of windows in which one comes, samples are missing."""
    topology = test_elastic.allreduce(steps=40, job='on_resize = "linear"')
    found, truth = account_of(topology, faults)
    assert found["counted"] == sum(truth.summed.values())
    assert 0 <= found["lost"] <= len(faults) * topology.compute.batch_size * 2
    kept, _ = account_of(test_elastic.allreduce(steps=40), faults)
    assert (found["due"] < kept["due"]) == bool(faults)


@pytest.mark.parametrize("more", ["", 'on_resize = "sqrt"'])
@pytest.mark.parametrize("faults", LOSSES, ids=["none", "one", "back"])
def test_all_reduce_trains_every_sample_of_an_epoch(faults: list[Fault], more: str) -> None:
    topology = test_elastic.allreduce(epochs=2, groups=2, size=2, job=more)
    found, truth = account_of(topology, faults)
    due = 2 * (60_000 // (2 * 3001)) * 2 * 3001
    assert sum(truth.summed.values()) == due
    assert found == {"due": due, "counted": due, "repeated": 0, "lost": 0, "why": None}


def test_groups_of_several_that_average_train_each_batch_as_long_as_one_of_each_is_left() -> None:
    topology = test_elastic_averages.topology()
    due = test_elastic_averages.STEPS * 2 * 128
    found, truth = account_of(topology, [kill("worker/1", step=8), kill("worker/2", step=12)])
    assert len(truth.summed_by_groups) * 128 == due
    assert found == {"due": due, "counted": due, "repeated": 0, "lost": 0, "why": None}
    found, truth = account_of(topology, [kill("worker/2", step=8), kill("worker/3", step=12)])
    assert found["lost"] == due - found["counted"] > 0
    last = max(step for step, members in truth.averaged.items() if "worker/3" in members)
    assert 0 < last < 12
    assert found["counted"] == (test_elastic_averages.STEPS + last + 1) * 128
    assert "fewer workers train fewer samples" in found["why"]


class Contents:
    """Which batches the model of each worker, a group of its own, has seen: a replay of exchanges."""

    def __init__(self) -> None:
        self.of: dict[str, set[tuple[str, int]]] = {}
        self.members: tuple[str, ...] = ()
        self._trained: dict[int, set[str]] = {}
        self._mixed: dict[int, set[tuple[str, str]]] = {}
        self._averaged: dict[int, list[str]] = {}
        self._came: dict[int, dict[str, str]] = {}

    def hear(self, peer: str, what: str, values: Mapping[str, Any]) -> None:
        if what == "begin_step":
            self._trained.setdefault(values["step"], set()).add(peer)
        elif what == "mixed":
            self._mixed.setdefault(values["step"], set()).update((peer, source) for source in values["sources"])
        elif what == "counted":
            self._averaged[values["step"]] = list(values["members"])
        elif what == "joined":
            self._came.setdefault(values["step"], {})[peer] = values["source"]

    def replay(self) -> set[tuple[str, int]]:
        """The batches in the models of those that are there in the end."""
        for step, trained in sorted(self._trained.items()):
            for peer, source in self._came.get(step, {}).items():
                self.of[peer] = set(self.of[source])
            for peer in trained:
                self.of.setdefault(peer, set()).add((peer, step))
            before = {peer: set(batches) for peer, batches in self.of.items()}
            for peer, source in self._mixed.get(step, ()):
                self.of[peer] |= before[source]
            averaged = self._averaged.get(step, [])
            for peer in averaged:
                self.of[peer] = set().union(*(before[each] for each in averaged))
        return set().union(*(self.of[peer] for peer in self.members or self.of))


@pytest.mark.parametrize(
    "exchange",
    [
        {"kind": "gossip"},
        {"kind": "gossip", "gossip": {"granularity": "batch"}},
        {"kind": "averaging", "every": 2},
        {"kind": "averaging", "every": 3, "averaging": {"method": "outer", "overlap_steps": 1}},
    ],
    ids=["gossip", "batch", "average", "outer"],
)
@pytest.mark.parametrize(
    "faults",
    [
        [],
        [kill("worker/1", step=3)],
        [kill("worker/0", step=15)],
        [restart("worker/0", step=3, after=0.005)],
        [restart("worker/2", at=0.01, after=0.02), restart("worker/2", step=9, after=0.01)],
    ],
    ids=["none", "early", "last step", "back", "twice"],
)
def test_what_others_have_got_of_a_lost_group_counts(exchange: dict[str, Any], faults: list[Fault]) -> None:
    base = test_elastic.topology(steps=16).model_dump(exclude_unset=True)
    topology = Topology.from_dict({**base, "exchange": exchange})
    account, contents = SampleAccount(), Contents()
    views: dict[int, tuple[int, tuple[str, ...]]] = {}

    def report(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            account.add(peer, {"step": None, **event, "values": event.get("values") or {}})
            if event["kind"] == "view":
                views[event["values"]["version"]] = event["step"], tuple(event["values"]["members"])

    result = simulate(topology, options=Options(faults=faults, on_report=report, on_audit=contents.hear))
    assert (result.ending.status, result.broken) == ("done", [])
    contents.members = next((members for _, (step, members) in sorted(views.items(), reverse=True) if step <= 16), ())
    found = account.to_dict(topology, done=True)
    assert found is not None
    assert found["counted"] == len(contents.replay()) * topology.compute.batch_size
    assert (found["lost"] > 0) == bool(faults)


@pytest.mark.parametrize(
    ("method", "restarts", "faults"),
    [
        ({}, 0, []),
        ({}, 1, [kill("worker/3", step=3)]),
        ({}, 0, [kill("worker/3", step=1), kill("worker/0", step=5)]),
        (test_elastic_whole_groups.GOSSIP, 0, []),
        (test_elastic_whole_groups.GOSSIP, 1, [kill("worker/3", step=3)]),
    ],
    ids=["average", "average, one", "average, two", "gossip", "gossip, one"],
)
def test_what_others_have_got_of_a_group_that_is_lost_as_a_whole_counts(
    method: dict[str, Any], restarts: int, faults: list[Fault]
) -> None:
    topology = test_elastic_whole_groups.topology("2x1", 3, method, job={"restarts": restarts})
    account, rows, finished = SampleAccount(), [Contents(), Contents()], set[str]()

    def report(peer: str, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            account.add(peer, {"step": None, **event, "values": event.get("values") or {}})
            finished.update([peer] if event["kind"] == "finish" else [])

    def hear(peer: str, what: str, values: Mapping[str, Any]) -> None:
        if peer.startswith("worker/"):
            row = int(peer[7:]) % 2
            others = {name: [each for each in values[name] if int(each[7:]) % 2 == row] for name in values if name == "members"}
            rows[row].hear(peer, what, {**values, **others})

    options = Options(faults=faults, task=test_elastic_whole_groups.task(), on_report=report, on_audit=hear)
    result = simulate(topology, options=options)
    assert (result.ending.status, result.broken) == ("done", [])
    seen = []
    for row, contents in enumerate(rows):
        contents.members = tuple(peer for peer in finished if int(peer[7:]) % 2 == row)
        seen.append({(int(peer[7:]) // 2, step) for peer, step in contents.replay()})
    found = account.to_dict(topology, done=True)
    assert found is not None
    assert found["counted"] == len(seen[0] & seen[1]) * topology.compute.batch_size, "others have got both rows"
    assert (found["lost"] > 0) == bool(faults)


@pytest.mark.parametrize(("steps", "first", "counted"), [(8, 0, 8), (7, 0, 4), (3, 0, 0), (7, 5, 0), (9, 6, 2)])
def test_gradients_that_were_not_exchanged_at_the_end_do_not_count(steps: int, first: int, counted: int) -> None:
    sections = {"job": {"elastic": False}, "compute": {"groups": 2, "batch_size": 8}, "exchange": {"kind": "allreduce", "every": 4}}
    account = SampleAccount()
    for rank in range(2):
        account.add(f"worker/{rank}", {"kind": "start", "step": first, "values": {"steps": steps}})
        for step in range(first, steps):
            account.add(f"worker/{rank}", {"kind": "step", "step": step, "values": {"samples": 8}})
    found = account.to_dict(Topology.from_dict(sections), done=True)
    assert found is not None
    assert (found["due"], found["counted"]) == ((steps - first) * 16, counted * 16)
    assert (found["why"] or "").startswith("they came after the last exchange") is (steps % 4 > 0)


@pytest.mark.parametrize(
    "sections",
    [
        {"job": {"elastic": False}},
        {"job": {"elastic": True, "oversubscribe": True}, "compute": {"batch_size": 10, "group_size": 4, "grid": "2x2"}},
    ],
)
@pytest.mark.parametrize(("begins", "first", "kept"), [(0, None, 8), (0, 0, 8), (None, None, 0), (None, 4, 4)])
def test_what_a_checkpoint_counts_whose_workers_have_reported_nothing(
    begins: int | None, first: int | None, kept: int, sections: dict[str, Any]
) -> None:
    """They were stopped in the moment in which they wait with their reports; a resumed run's first step is theirs to say."""
    topology = Topology.from_dict({"compute": {"batch_size": 10}, "exchange": {"kind": "allreduce"}, **sections})
    account = SampleAccount(begins)
    if first is not None:
        account.add("worker/0", {"kind": "start", "step": first, "values": {}})
    assert account.before(8, topology) == 10 * kept
    account.add("coordinator", {"kind": "restart", "step": 8, "values": {"samples": 10 * kept}})
    assert account.before(12, topology) == 10 * (kept + 4)
    account.add("coordinator", {"kind": "restart", "step": 12, "values": {"samples": 10 * (kept + 4)}})
    assert account.before(12, topology) == 10 * (kept + 4)


def test_samples_that_are_left_for_a_smaller_last_step_are_all_there_are() -> None:
    """A run that was resumed in the middle of an epoch, with all workers, after some of them had been lost."""
    topology = Topology.from_dict({"job": {"elastic": True, "epochs": 2}, "compute": {"groups": 3, "batch_size": 8}})
    topology = Topology.from_dict({**topology.to_dict(), "exchange": {"kind": "allreduce"}})
    account = SampleAccount()
    for rank in range(3):
        account.add(f"worker/{rank}", {"kind": "start", "step": 7, "values": {"steps": 9, "due": 32}})
    for step, samples in ((7, 8), (8, 3)):
        account.add("worker/0", {"kind": "step", "step": step, "values": {"samples": samples}})
    account.add("worker/0", {"kind": "counted", "step": 8, "values": {"samples": 8}})
    assert account.to_dict(topology, done=True) == {"due": 32, "counted": 32, "repeated": 0, "lost": 0, "why": None}


def test_the_line_says_what_counts_and_why_the_rest_does_not() -> None:
    account = {"due": 96000, "counted": 49152, "repeated": 0, "lost": 46848, "why": "the run ended before"}
    assert account_lines(account) == ["49,152 of 96,000 samples count in the model; the rest do not: the run ended before"]
