"""``[[faults]]``: what each kind needs and allows."""

from __future__ import annotations

import re

import pytest

from zmqtrain.topology.faults import FileFault, TopologyFaultsError
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.simulation import ALLOWED, DETAILS, NEEDED

JOB = """\
[job]
[[hosts]]
name = "alpha"
[[hosts]]
name = "node[1-4]"
[compute]
groups = 4
[exchange]
shards = 2
[[faults]]
"""


def faults_of(text: str) -> list[FileFault]:
    with pytest.raises(TopologyFaultsError) as caught:
        parse_topology(JOB + text)
    return list(caught.value.faults)


@pytest.mark.parametrize(
    "text",
    [
        "at = '2 s'\nkind = 'kill'\ntarget = 'worker/3'",
        "step = 0\nkind = 'kill'\ntarget = 'alpha'",
        "step = 3\nkind = 'restart'\ntarget = 'server/1'",
        "step = 3\nkind = 'restart'\ntarget = 'server/1'\nlasts = '3 s'",
        "at = 0\nkind = 'pause'\ntarget = 'node4'\nlasts = 1",
        "at = 1.5\nkind = 'slow'\ntarget = 'node2'",
        "at = 1.5\nkind = 'slow'\ntarget = 'node2'\nfactor = 4\nlasts = '1 min'",
        "at = 1\nkind = 'partition'\nsides = [['alpha'], ['node[1-3]', 'node4']]",
        "at = 1\nkind = 'partition'\nsides = [['alpha'], ['node1'], ['node2']]\none_way = true\nlasts = 2",
        "at = 1\nkind = 'heal'",
        "at = 1\nkind = 'corrupt'\ntarget = 'worker/0'",
        "at = 1\nkind = 'corrupt'\ntarget = 'worker/0'\nto = 'server/0'",
        "at = 1\nkind = 'drop'\ntarget = 'server/0'\nto = 'worker/3'",
        "at = 1\nkind = 'drop'\ntarget = 'alpha'\nto = 'worker/3'",
        "at = 1\nkind = 'drain'\ntarget = 'node2'",
        "at = 1\nkind = 'kill'\ntarget = 'worker/0'\nfactor = 2.0\none_way = false\nsides = []",  # what is there anyway
    ],
)
def test_sound_faults(text: str) -> None:
    topology = parse_topology(JOB + text)
    assert parse_topology(topology.to_toml()) == topology


# Each case: one fault, whose table begins on line 10.
@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        ("at = 1\n", "faults[0].kind", 10, "is missing"),
        ("at = 1\nkind = 'kil'\ntarget = 'alpha'", "faults[0].kind", 12, 'did you mean "kill"'),
        ("kind = 'heal'", "faults[0]", 10, "has no time: give either at .a time. or step"),
        ("at = 1\nstep = 1\nkind = 'heal'", "faults[0]", 10, "has both at and step: remove one"),
        ("at = '-1 s'\nkind = 'heal'", "faults[0].at", 11, "out of range"),
        ("at = nan\nkind = 'heal'", "faults[0].at", 11, "is not a time"),
        ("at = '25 h'\nkind = 'heal'", "faults[0].at", 11, "is too late: the run is stopped after 24 h"),
        ("step = -1\nkind = 'heal'", "faults[0].step", 11, "greater than or equal to 0"),
        ("at = 1\nkind = 'kill'", "faults[0]", 10, 'a kill needs target: .* like target = "worker/1"'),
        ("at = 1\nkind = 'pause'\ntarget = 'alpha'", "faults[0]", 10, "a pause needs lasts: give its duration"),
        ("at = 1\nkind = 'partition'", "faults[0]", 10, "a partition needs sides"),
        (
            "at = 1\nkind = 'kill'\ntarget = 'worker/4'",
            "faults[0].target",
            13,
            "neither a role nor a host of this job .worker/0 to worker/3 and server/0 to server/1.",
        ),
        ("at = 1\nkind = 'drain'", "faults[0]", 10, "a drain needs target"),
        (
            "at = 1\nkind = 'drain'\ntarget = 'worker/1'",
            "faults[0].target",
            13,
            "only whole hosts can be asked to leave",
        ),
        ("at = 1\nkind = 'drain'\ntarget = 'worker/9'", "faults[0].target", 13, "neither a role nor a host of this job"),
        ("at = 1\nkind = 'kill'\ntarget = 'server/2'", "faults[0].target", 13, "neither a role nor a host of this job"),
        ("at = 1\nkind = 'kill'\ntarget = 'worker/01'", "faults[0].target", 13, 'did you mean "worker/1"'),
        ("at = 1\nkind = 'kill'\ntarget = 'nod1'", "faults[0].target", 13, 'did you mean "node1"'),
        ("at = 1\nkind = 'kill'\ntarget = 'node[1-2]'", "faults[0].target", 13, "neither a role nor a host"),
        ("at = 1\nkind = 'kill'\ntarget = 'agent/alpha'", "faults[0].target", 13, "neither a role nor a host"),
        ("at = 1\nkind = 'kill'\ntarget = ''", "faults[0].target", 13, "at least 1 character"),
        (
            "at = 1\nkind = 'drop'\ntarget = 'alpha'\nto = 'node1'",
            "faults[0].to",
            14,
            "is a host, not a role: name one of the roles on it",
        ),
        ("at = 1\nkind = 'drop'\ntarget = 'alpha'\nto = 'worker/9'", "faults[0].to", 14, "is not a role of this job"),
        ("at = 1\nkind = 'drop'\ntarget = 'worker/1'\nto = 'worker/1'", "faults[0].to", 14, "is the target itself"),
        ("at = 1\nkind = 'partition'\nsides = [['alpha']]", "faults[0].sides", 13, "has only one side"),
        ("at = 1\nkind = 'partition'\nsides = [['alpha'], []]", "faults[0].sides[1]", 13, "is empty: name the hosts"),
        (
            "at = 1\nkind = 'partition'\nsides = [['alpha'],\n['node[1-5]']]",
            "faults[0].sides[1][0]",
            14,
            "node5 is not a host of this file",
        ),
        ("at = 1\nkind = 'partition'\nsides = [['alpha'], ['alfa']]", "faults[0].sides[1][0]", 13, 'did you mean "alpha"'),
        (
            "at = 1\nkind = 'partition'\nsides = [['alpha', 'node2'], ['node[1-4]']]",
            "faults[0].sides[1][0]",
            13,
            "node2 is on side 0 already: a host can be on one side only",
        ),
        (
            "at = 1\nkind = 'partition'\nsides = [['alpha', 'alpha'], ['node1']]",
            "faults[0].sides[0][1]",
            13,
            "is on this side already",
        ),
        ("at = 1\nkind = 'partition'\nsides = ['alpha', 'node1']", "faults[0].sides[0]", 13, "must be an array"),
        ("at = 1\nkind = 'partition'\nsides = [['alpha'], ['node[1']]", "faults[0].sides[1][0]", 13, "is not a range of names"),
        ("at = 1\nkind = 'slow'\ntarget = 'alpha'\nfactor = 0", "faults[0].factor", 14, "must be greater than"),
        ("at = 1\nkind = 'slow'\ntarget = 'alpha'\nlasts = '-2 s'", "faults[0].lasts", 14, "out of range"),
    ],
)
def test_a_fault_has_its_place_and_what_to_do(text: str, path: str, line: int, message: str) -> None:
    found = faults_of(text)
    told = next(fault for fault in found if fault.path == path and fault.line == line)
    assert re.search(message, str(told)), str(told)
    assert len(found) == 1 or "sides" in path, [str(fault) for fault in found]


GIVEN = {
    "target": "'worker/1'",
    "to": "'worker/2'",
    "sides": "[['alpha'], ['node1']]",
    "one_way": "true",
    "factor": "3.0",
    "lasts": "'1 s'",
}


@pytest.mark.parametrize("kind", NEEDED)
def test_what_a_kind_has_no_use_for_is_refused(kind: str) -> None:
    allowed = (*NEEDED[kind], *ALLOWED.get(kind, ()))
    given = GIVEN | ({"target": "'alpha'"} if kind == "drain" else {})
    sound = f"at = 1\nkind = '{kind}'\n" + "".join(f"{name} = {given[name]}\n" for name in allowed)
    parse_topology(JOB + sound)
    for name in DETAILS:
        if name not in allowed:
            (fault,) = faults_of(f"{sound}{name} = {GIVEN[name]}\n")
            assert fault.path == f"faults[0].{name}"
            assert re.search(rf'has no effect on a fault of kind = "{kind}": remove it \({name} is for ', fault.message)


def test_each_fault_is_told_at_its_own_line() -> None:
    found = faults_of("at = 1\nkind = 'heal'\n[[faults]]\nkind = 'heal'\n[[faults]]\nat = 1\nkind = 'kill'\n")
    assert [(fault.path, fault.line) for fault in found] == [("faults[1]", 13), ("faults[2]", 15)]
