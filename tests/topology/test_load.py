"""Topology files: what they mean, and every fault with its place."""

from __future__ import annotations

import json
import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.errors import TopologyError
from zmqtrain.topology.exchange import Bound
from zmqtrain.topology.faults import FileFault, TopologyFaultsError
from zmqtrain.topology.load import LARGEST_FILE, load_topology, parse_topology
from zmqtrain.topology.schema import Topology
from zmqtrain.topology.toml_lines import find_lines
from zmqtrain.topology.toml_writer import write_toml

GOOD = """\
[job]
task = "examples.mnist:task"
args = { lr = 0.1, layers = [16, 32], "odd key" = "a\\"b" }
until = { metric = "eval_accuracy", reaches = 0.98, max_steps = 5000 }
eval_every = 50
timeout = "30 s"

[[hosts]]
name = "alpha"
address = "10.0.0.1"
slots = 4
devices = ["cuda:0", "cuda:1"]

[[hosts]]   # the other one
name = "beta"
address = "10.0.0.2"
slots = 4

[compute]
groups = 4
group_size = 2
batch_size = 256
grid = "1x2"
bucket_size = "1 MiB"

[exchange]
kind = "model_server"
staleness = { bound = 4 }
shards = 2
split_size = "512 KiB"

[optimizer]
clip_norm = 1.0

[data]
shuffle = "none"

[network]
bandwidth = "1 Gbit/s"
latency = "200 us"
"""


def faults_of(text: str) -> list[FileFault]:
    with pytest.raises(TopologyFaultsError) as caught:
        parse_topology(text, file="t.toml")
    assert isinstance(caught.value, TopologyError)
    assert caught.value.exit_code == 2
    return list(caught.value.faults)


def only(text: str) -> FileFault:
    faults = faults_of(text)
    assert len(faults) == 1, [str(fault) for fault in faults]
    return faults[0]


def test_a_full_file() -> None:
    topology = parse_topology(GOOD, name="mnist groups")
    assert topology.job.name == "mnist-groups"
    assert topology.job.args == {"lr": 0.1, "layers": [16, 32], "odd key": 'a"b'}
    assert topology.job.until is not None
    assert (topology.job.until.metric, topology.job.until.reaches) == ("eval_accuracy", 0.98)
    assert (topology.job.epochs, topology.job.timeout) == (None, 30.0)
    assert [host.name for host in topology.hosts] == ["alpha", "beta"]
    assert topology.compute.bucket_size == 2**20
    assert topology.exchange.staleness == Bound(bound=4)
    assert (topology.exchange.policy, topology.exchange.bound) == ("bound", 4)
    assert topology.servers == 2
    assert topology.network.latency == pytest.approx(2e-4)


def test_a_job_alone_suffices() -> None:
    topology = parse_topology('[job]\ntask = "digits.py:task"\n', name="digits")
    assert (topology.job.name, topology.job.epochs, topology.job.seed) == ("digits", 1, 1)
    assert [(host.name, host.address) for host in topology.hosts] == [("localhost", "127.0.0.1")]
    assert topology.hosts[0].slots >= 1
    assert (topology.exchange.kind, topology.servers) == ("allreduce", 0)


#: Elastic groups of two workers; the exchange follows.
ROWS = "[job]\nelastic = true\n[compute]\ngroups = 2\ngroup_size = 2\ngrid = '2x1'\n[exchange]\n"
PAIRS = "[job]\nelastic = true\n[compute]\ngroups = 2\ngroup_size = 2\n[exchange]\n"


@pytest.mark.parametrize(("groups", "size", "kind"), [(1, 1, "allreduce"), (1, 2, "allreduce"), (2, 1, "model_server")])
def test_the_exchange_by_default(groups: int, size: int, kind: str) -> None:
    assert parse_topology(f"[job]\n[compute]\ngroups = {groups}\ngroup_size = {size}\n").exchange.kind == kind


@pytest.mark.parametrize(
    ("value", "policy", "bound"), [('"async"', "async", None), ('"sync"', "sync", 0), ("{ bound = 0 }", "bound", 0)]
)
def test_staleness(value: str, policy: str, bound: int | None) -> None:
    exchange = parse_topology(f'[job]\n[exchange]\nkind = "model_server"\nstaleness = {value}\n').exchange
    assert (exchange.policy, exchange.bound) == (policy, bound)


@pytest.mark.parametrize(
    ("text", "path", "line", "message"),
    [
        ("[job]\nstepz = 3\n", "job.stepz", 2, 'unknown key; did you mean "steps"'),
        ("[job]\n[compte]\ngroups = 1\n", "compte", 2, 'did you mean "compute"'),
        ("[compute]\ngroups = 1\n", "job", None, "is missing"),
        ("job = 3\n", "job", 1, "must be a table"),
        ("[job]\nsteps = 1.5\n", "job.steps", 2, "must be a whole number"),
        ("[job]\nsteps = '5'\n", "job.steps", 2, "must be a whole number"),
        ("[job]\nsteps = true\n", "job.steps", 2, "must be a whole number"),
        ("[job]\nsteps = 0\n", "job.steps", 2, "must be greater than or equal to 1"),
        ("[job]\noversubscribe = 1\n", "job.oversubscribe", 2, "must be true or false"),
        ("[job]\ntask = 3\n", "job.task", 2, "must be a string in quotes"),
        ("[job]\ntask = 'a:b:c'\n", "job.task", 2, "is not a task: write"),
        ("[job]\nname = 'a/b'\n", "job.name", 2, "must be a name"),
        ("[job]\nport = 70000\n", "job.port", 2, "less than or equal to 65535"),
        ("[job]\n\ntimeout = '-3 s'\n", "job.timeout", 3, "is out of range: give a time from 100 ms"),
        ("[job]\ntimeout = '3 parsecs'\n", "job.timeout", 2, "unknown unit 'parsecs'"),
        ("[job]\nsteps = 1\nepochs = 1\n", "job.epochs", 3, "keep only one of steps, epochs and until"),
        ("[job]\neval_every = 1\nuntil = { metric = 'a' }\n", "job.until.reaches", 3, "is missing"),
        ("[job]\nuntil = { metric = 'a', reaches = 1 }\n", "job.until", 2, "set eval_every"),
        ("[job]\non_nan = 'stopp'\n", "job.on_nan", 2, 'one of stop, continue; did you mean "stop"'),
        ("[job]\nargs = { when = 2026-01-01 }\n", "job.args", 2, "cannot pass when to the task"),
        ("[job]\n[[hosts]]\nslots = 2\n", "hosts[0].name", 2, "is missing"),
        ("[job]\n[[hosts]]\nname = 'a'\n[[hosts]]\nname = 'a'\n", "hosts[1].name", 5, "hosts\\[0\\] has the same name"),
        ("[job]\n[[hosts]]\nname = 'a'\naddress = '10.0.0.1'\n", "hosts[0].slots", 2, "is missing.*10.0.0.1 is another machine"),
        ("[job]\n[[hosts]]\nname = 'a'\ndevices = ['gpu']\n", "hosts[0].devices", 4, 'write "cuda:0"'),
        ("[job]\nhosts = 3\n", "job.hosts", 2, "unknown key"),
        ("hosts = 3\n[job]\n", "hosts", 1, "must be an array"),
        (
            "[job]\n[compute]\ngroup_size = 8\nbatch_size = 4\n",
            "compute.batch_size",
            4,
            "a step of 8 workers takes at least 8 samples",
        ),
        ("[job]\n[compute]\ngroup_size = 80\n", "compute.batch_size", 2, "is too small for the group: a step of 80 workers"),
        ("[job]\n[compute]\naccumulate = 80\n", "compute.batch_size", 2, "80 micro-batches each"),
        ("[job]\n[compute]\ngroup_size = 'auto'\n", "compute.group_size", 3, "all workers together"),
        ("[job]\n[compute]\ngrid = '1x2'\n", "compute.grid", 3, "is for 2 workers, but group_size is 1"),
        ("[job]\n[compute]\ngrid = '0x2'\n", "compute.grid", 3, "is not a grid"),
        (
            "[job]\n[compute]\ngroup_size = 2\ngrid = '2x1'\ndevice = 'modelled'\nprofile = 'resnet50'\n",
            "compute.device",
            5,
            "which only its own code shows",
        ),
        (
            "[job]\n[compute]\ngroup_size = 2\n[[parallel.layers]]\nlayer = '0'\nchoice = 'model'\ngrid = '2x1'\n",
            "parallel.layers",
            4,
            "is for a grid that divides the model",
        ),
        (
            "[job]\n[compute]\ngroup_size = 4\ngrid = '2x2'\n"
            "[[parallel.layers]]\nlayer = '0'\nchoice = 'batch'\ngrid = '1x4'\n"
            "[[parallel.layers]]\nlayer = '1'\nchoice = 'model'\ngrid = '4x1'\n",
            "parallel.layers",
            5,
            "is on grid 4x1, whose columns say which samples each worker has",
        ),
        (
            "[job]\n[compute]\ngroup_size = 4\ngrid = '4x1'\n"
            "[[parallel.layers]]\nlayer = '0'\nchoice = 'domain'\ngrid = '4x1'\nstrips = '2x3'\n",
            "parallel.layers",
            5,
            "strips 2x3 must divide an image into as many parts as its grid has rows, 4",
        ),
        (
            "[job]\n[compute]\ngroup_size = 2\ngrid = '2x1'\n"
            "[[parallel.layers]]\nlayer = '0'\nchoice = 'model'\ngrid = '2x1'\nstrips = 'width'\n",
            "parallel.layers",
            5,
            "strips are for the choice domain",
        ),
        ("[job]\n[compute]\ngrid = 'big'\n", "compute.grid", 3, "is not a grid"),
        ("[job]\n[compute]\ndevice = 'modelled'\n", "compute.device", 3, "needs profile"),
        ("[job]\n[compute]\nprofile = 'a.json'\n", "compute.profile", 3, 'set device = "modelled"'),
        ("[job]\n[compute]\nbucket_size = '1 TB'\n", "compute.bucket_size", 3, "out of range: give a size from 64 B to 4 GiB"),
        ("[job]\n[exchange.gossip]\nrotation = false\n", "exchange.gossip", 2, "gossip is for kind"),
        (
            "[job]\n[compute]\ngroups = 6\n[exchange]\nkind = 'gossip'\ngossip = { topology = 'hypercube' }\n",
            "exchange.gossip.topology",
            6,
            "needs a power of two as the number of groups, not 6",
        ),
        (
            "[job]\n[exchange]\nkind = 'gossip'\ngossip = { balanced = false }\n",
            "exchange.gossip.balanced",
            4,
            "balanced = false is for random partners",
        ),
        (
            "[job]\n[exchange]\nkind = 'gossip'\n[optimizer]\nclip_norm = 1.0\n",
            "optimizer.clip_norm",
            5,
            'set granularity = "batch"',
        ),
        ("[job]\n[exchange]\nkind = 'all_reduce'\n", "exchange.kind", 3, 'did you mean "allreduce"'),
        ("[job]\n[exchange]\nstaleness = 'asink'\n", "exchange.staleness", 3, 'must be "async", "sync" or'),
        (
            "[job]\n[exchange]\nstaleness = { bound = -1 }\nkind = 'model_server'",
            "exchange.staleness.bound",
            3,
            "greater than or equal to 0",
        ),
        ("[job]\n[exchange]\nshards = 2\n", "exchange.shards", 3, 'set kind = "model_server"'),
        (
            '[job]\n[exchange]\nkind = "gossip"\ncompression = "int8"\n',
            "exchange.compression",
            4,
            "for model servers and all-reduce",
        ),
        (
            '[job]\n[exchange]\ncompression = "sign"\n[compute]\ngroup_size = 2\ngrid = "2x1"\n',
            "exchange.compression",
            3,
            'remove the grid, set kind = "model_server"',
        ),
        (
            '[job]\n[exchange]\ncompression = "powersgd"\n[compute]\ndevice = "modelled"\nprofile = "resnet50"\n',
            "exchange.compression",
            3,
            "a profile has only the sizes of layers",
        ),
        ('[job]\nelastic = true\n[exchange]\ncompression = "topk"\n', "job.elastic", 2, 'needs compression = "none"'),
        (f"{PAIRS}kind = 'gossip'\n[data]\nshuffle = 'ring'\nring = 'tensors'\n", "job.elastic", 2, "with gossip among groups of"),
        (f"{PAIRS}kind = 'gossip'\n[parallel]\nstatistics = 'whole'\n", "job.elastic", 2, "in the middle of a forward"),
        (
            "[job]\nelastic = true\n[compute]\naccumulate = 2\n[exchange]\nmerged_fc = true\n",
            "job.elastic",
            2,
            "cannot have accumulate with merged_fc",
        ),
        (
            "[job]\nelastic = true\n[compute]\ngroups = 2\npipeline = 2\n[exchange]\nmerged_fc = true\n",
            "job.elastic",
            2,
            "cannot have pipeline: one worker",
        ),
        (
            "[job]\nelastic = true\n[compute]\ngroup_size = 4\ngrid = '4x1'\n",
            "job.elastic",
            2,
            "grid of one row, such as 1x4",
        ),
        (
            "[job]\nelastic = true\n[compute]\ngroup_size = 4\ngrid = '2x2'\n[exchange]\nkind = 'gossip'\n",
            "job.elastic",
            2,
            "one group and a grid of several columns, such as 2x2",
        ),
        (
            "[job]\nelastic = true\n[compute]\ngroups = 2\ngroup_size = 4\ngrid = '2x2'\n[exchange]\nkind = 'allreduce'\n",
            "job.elastic",
            2,
            'groups = 1, group_size = 8, grid = "2x4", batch_size = 128',
        ),
        (
            "[job]\nelastic = true\n[compute]\ngroup_size = 4\ngrid = '2x2'\n[data]\nshuffle = 'ring'\n",
            "job.elastic",
            2,
            "on a grid of several rows, an elastic run cannot have shuffle",
        ),
        (
            "[job]\n[compute]\ngroup_size = 4\ngrid = '2x2'\nsmaller_grids = ['3x1']\n",
            "compute.smaller_grids",
            5,
            "for elastic runs on a grid of several rows with all-reduce",
        ),
        (
            "[job]\nelastic = true\n[compute]\ngroup_size = 2\ngrid = '2x1'\n[exchange]\nkind = 'averaging'\n",
            "job.elastic",
            2,
            'or several groups and kind = "averaging" or "gossip"',
        ),
        (
            f"{ROWS}kind = 'model_server'\n[[parallel.layers]]\nlayer = '0'\nchoice = 'model'\ngrid = '2x1'\n",
            "job.elastic",
            2,
            "of several rows, an elastic run cannot have layers on grids of their own",
        ),
        (
            f"{ROWS}kind = 'model_server'\ncompression = 'sign'\n",
            "job.elastic",
            2,
            "with model servers, an elastic run cannot have compression",
        ),
        (
            f"{ROWS}kind = 'model_server'\n[data]\nshuffle = 'ring'\n",
            "job.elastic",
            2,
            "with model servers, an elastic run cannot have shuffle",
        ),
        (
            f"{ROWS}kind = 'model_server'\nstaleness = 'sync'\n[optimizer]\nclip_norm = 1.0\n",
            "job.elastic",
            2,
            "with model servers, an elastic run cannot have clip_norm in synchronous",
        ),
        (
            f"{ROWS}kind = 'model_server'\nsnapshot = true\n",
            "job.elastic",
            2,
            "with model servers, an elastic run cannot have snapshot",
        ),
        (
            f"{ROWS}kind = 'averaging'\naveraging = {{ method = 'outer', deltas = 'int8' }}\n",
            "job.elastic",
            2,
            "among groups on grids of several rows, an elastic run cannot have deltas",
        ),
        (
            f"{ROWS}kind = 'averaging'\n[data]\nshuffle = 'ring'\nring = 'tensors'\n",
            "job.elastic",
            2,
            "on grids of several rows, an elastic run cannot have ring = ",
        ),
        (
            f"{ROWS}kind = 'averaging'\n[[parallel.layers]]\nlayer = '0'\nchoice = 'model'\ngrid = '2x1'\n",
            "job.elastic",
            2,
            "cannot have layers on grids of their own",
        ),
        (
            "[job]\nelastic = true\n[compute]\ngroup_size = 4\ngrid = '2x2'\nsmaller_grids = ['3x1', '4x1']\n",
            "compute.smaller_grids",
            6,
            "4x1 is no grid of fewer than the group's 4 workers",
        ),
        ("[job]\n[compute]\nsmaller_grids = ['auto']\n", "compute.smaller_grids", 3, "is not a grid"),
        (f"{PAIRS}kind = 'averaging'\naveraging = {{ method = 'outer', deltas = 'int8' }}\n", "job.elastic", 2, "have deltas"),
        (f"{PAIRS}kind = 'averaging'\n[data]\nshuffle = 'ring'\nring = 'tensors'\n", "job.elastic", 2, "have ring = "),
        ("[job]\n[exchange]\ncompression_rank = 65\n", "exchange.compression_rank", 3, "less than or equal to 64"),
        ("[job]\n[exchange]\ncompression_rank = 2\n", "exchange.compression_rank", 3, "for powersgd"),
        ("[job]\n[exchange]\nkind = 'gossip'\nevery = 2\n", "exchange.every", 4, "every is for averaging and allreduce"),
        ("[job]\n[exchange]\ncompression_ratio = 0.1\n", "exchange.compression_ratio", 3, "for topk"),
        ("[job]\n[engine]\nkind = 'no name'\n", "engine.kind", 3, "must not contain spaces"),
        ("[job]\n[engine]\noptions = { day = 2026-01-01 }\n", "engine.options", 3, "not a string, number"),
        ("[job]\n[engine]\nkind = 'ssh'\n", "engine.kind", 3, "needs machines"),
        ("[job]\n[exchange]\nmerged_fc = true\nfc_servers = 0\n", "exchange.fc_servers", 4, "greater than or equal to 1"),
        ("[job]\n[exchange]\nfc_servers = 2\n", "exchange.fc_servers", 3, "fc_servers is for merged_fc"),
        ("[job]\n[exchange]\nmerged_fc = true\nkind = 'gossip'\n", "exchange.merged_fc", 3, 'set kind = "model_server"'),
        ("[job]\n[compute]\nprecision = 'float16'\ngroup_size = 2\ngrid = '2x1'\n", "compute.precision", 3, "bfloat16"),
        ("[job]\n[compute]\nprecision = 'float16'\n[exchange]\nmerged_fc = true\n", "compute.precision", 3, "with merged_fc"),
        ("[job]\n[compute]\ngroups = 2\npipeline = 2\n", "compute.pipeline", 4, "set merged_fc = true"),
        (
            "[job]\n[compute]\ngroups = 3\npipeline = 2\n[exchange]\nmerged_fc = true\n",
            "compute.pipeline",
            4,
            "sets of 2 that share slots",
        ),
        ("[job]\n[exchange]\nsplit = 'fc'\n", "exchange.split", 3, "split is for merged_fc"),
        (
            "[job]\n[exchange]\nmerged_fc = true\n[optimizer]\nclip_norm = 1.0\n",
            "optimizer.clip_norm",
            5,
            "remove clip_norm or merged_fc",
        ),
        (
            "[job]\n[exchange]\nmerged_fc = true\n[compute]\ngrid = '2x1'\ngroup_size = 2\n",
            "exchange.merged_fc",
            3,
            "remove .compute. grid",
        ),
        ("[job]\n[network]\nlatency = '3 h'\n", "network.latency", 3, "out of range"),
        ("[job]\nsteps = \n", "", 2, "is not valid TOML"),
        ("[job]\nsteps = 1\nsteps = 2\n", "", 3, "is not valid TOML"),
        ("[job", "", 1, "is not valid TOML"),
        ("[job]\ntask = task.py\n", "", 2, "is not valid TOML: Invalid value .texts stand in quotes"),
        ("[job]\nsteps = " + "1" * 5000, "", None, "is not valid TOML"),
        ("[job]\nsteps = 0x" + "f" * 5000, "job.steps", 2, r"steps = \(a very long int\)"),
        ("x = " + "[" * 5000, "", None, "nested too deeply|is not valid TOML"),
    ],
)
def test_a_fault_has_its_place_and_what_to_do(text: str, path: str, line: int | None, message: str) -> None:
    fault = only(text)
    assert (fault.path, fault.line) == (path, line) or "nested" in message
    assert re.search(message, str(fault)), str(fault)


def test_all_faults_at_once_in_the_order_of_the_file() -> None:
    faults = faults_of(
        GOOD.replace("eval_every = 50", "steps = 3\nseed = 'x'").replace("shards = 2", "shardz = 2").replace("256", "1")
    )
    assert [fault.path for fault in faults] == ["job.until", "job.until", "job.seed", "compute.batch_size", "exchange.shardz"]
    message = str(TopologyFaultsError(faults))
    line = GOOD.splitlines().index("shards = 2") + 2  # one more, since a line was put in above
    assert 't.toml:6: job.seed = "x": must be a whole number' in message
    assert re.search(rf't.toml:{line}: exchange.shardz: unknown key; did you mean "shards"', message)
    assert json.dumps([fault.to_dict() for fault in faults])


def test_a_rule_about_an_unsound_field_is_not_told() -> None:
    # group_size is unsound, so nothing is said about the batch being smaller than the group.
    assert only("[job]\n[compute]\ngroup_size = 'x'\nbatch_size = 1\n").path == "compute.group_size"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"missing.toml: does not exist"):
        load_topology(tmp_path / "missing.toml")
    with pytest.raises(TopologyError, match="is a folder"):
        load_topology(tmp_path)
    (tmp_path / "script.py").write_text("import torch\n")
    with pytest.raises(TopologyError, match=r"script.py:1: is not valid TOML: .* a script comes after it"):
        load_topology(tmp_path / "script.py")
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf[job]\nsteps = 3\n")
    assert load_topology(tmp_path / "marked.toml").job.steps == 3
    (tmp_path / "binary.toml").write_bytes(b"[job]\n\xff\xfe")
    with pytest.raises(TopologyError, match=r"binary.toml:2: is not UTF-8"):
        load_topology(tmp_path / "binary.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * (LARGEST_FILE + 1))
    with pytest.raises(TopologyError, match="is larger than"):
        load_topology(tmp_path / "large.toml")
    (tmp_path / "my job!.toml").write_text("[job]\r\nsteps = 3\r\n")
    assert load_topology(tmp_path / "my job!.toml").job.name == "my-job-"


def test_the_files_that_come_with_it_are_sound() -> None:
    files = sorted((Path(__file__).parents[2] / "launch").glob("*.toml"))
    assert files
    for file in files:
        topology = load_topology(file)
        assert parse_topology(topology.to_toml()) == topology


def test_a_resolved_topology_loads_to_an_equal_one() -> None:
    topology = parse_topology(GOOD)
    assert parse_topology(topology.to_toml()) == topology
    assert Topology.from_dict(json.loads(json.dumps(topology.to_dict()))) == topology
    assert 'split_size = "512 KiB"' in topology.to_toml()


plain = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_any_arguments_survive_writing(args: dict[str, Any]) -> None:
    topology = Topology.from_dict({"job": {"task": "task.py", "args": args}})
    assert parse_topology(topology.to_toml()).job.args == args
    assert tomllib.loads(write_toml({"a": args})) == {"a": args}


# Mutations: whatever is done to a good file, it loads or says what is wrong.

PIECES = [
    "[",
    "]",
    '"',
    "'",
    "=",
    "{",
    "}",
    ",",
    ".",
    "\n",
    "#",
    "-",
    "0",
    "1e999",
    "nan",
    "[[hosts]]\n",
    "[job]\n",
    "'''",
    '"""',
    "\\",
    "\x00",
    "é",
    "true",
    "2020-01-01",
    "x = 1\n",
]


@given(
    st.lists(
        st.tuples(st.integers(0, len(GOOD)), st.integers(0, 12), st.sampled_from(PIECES) | st.text(max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_a_mutated_file_loads_or_raises_a_topology_error(cuts: list[tuple[int, int, str]]) -> None:
    text = GOOD
    for at, length, piece in cuts:
        text = text[:at] + piece + text[at + length :]
    try:
        topology = parse_topology(text)
    except TopologyError:
        return
    assert parse_topology(topology.to_toml()) == topology


values = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["auto", "1x1", "60 s", "sync"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["bound", "name", "metric", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.data())
def test_any_value_anywhere_is_taken_or_a_topology_error(data: st.DataObject) -> None:
    document = tomllib.loads(GOOD)
    section = data.draw(st.sampled_from(sorted(Topology.model_fields)))
    field = data.draw(
        st.sampled_from(sorted({*("steps", "groups", "kind", "shards", "path", "staleness", "until", "slots", "name")}))
    )
    value = data.draw(values)
    if isinstance(document.get(section), dict):
        document[section][field] = value
    else:
        document[section] = value
    with suppress(TopologyError):
        parse_topology(write_toml(document))


def test_lines_are_found_through_strings_and_brackets() -> None:
    text = '''\
a = """
[not.a.table]
b = 1
"""
"quoted.key" = [
  1,  # ] not the end
  { x = "}", y = [ "]" ] },
]
[t.u]
v = 'it''s'
[[many]]
k = 1
[many.inner]
z = 1
[[many]]
k.l = 2
'''
    lines = find_lines(text)
    assert lines[("a",)] == 1
    assert lines[("quoted.key",)] == 5
    assert lines[("quoted.key", 1, "y")] == 7
    assert lines[("t", "u")] == 9
    assert lines[("many", 0)] == 11
    assert lines[("many", 0, "inner", "z")] == 14
    assert lines[("many", 1, "k", "l")] == 16
    assert ("b",) not in lines


@given(st.text(alphabet="[]{}\"'=.,#\n ab1\\"))
def test_finding_lines_ends_on_any_text(text: str) -> None:
    find_lines(text)


def test_every_field_is_documented_and_every_reference_leads_somewhere() -> None:
    schema = Topology.model_json_schema()
    definitions = schema["$defs"]
    for name, table in {**definitions, "Topology": schema}.items():
        for key, field in table["properties"].items():
            assert field.get("description") or "$ref" in field, f"{name}.{key} has no type for description"
    references = re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema))
    assert set(references) <= set(definitions)
    assert "Host" in references


@pytest.mark.parametrize(
    ("wanted", "address", "encrypted", "emulated"),
    [
        (None, "127.0.0.1", False, False),
        (None, "10.0.0.1", True, False),
        ("auto", "10.0.0.1", True, False),
        ("required", "127.0.0.1", True, True),
        ("disabled", "10.0.0.1", False, False),
    ],
)
def test_when_connections_are_encrypted(wanted: str | None, address: str, encrypted: bool, emulated: bool) -> None:
    job = "[job]\n" if wanted is None else f'[job]\ntransport_encryption = "{wanted}"\n'
    topology = parse_topology(f'{job}[[hosts]]\nname = "a"\n[[hosts]]\nname = "b"\nslots = 1\naddress = "{address}"\n')
    assert topology.encrypted() is encrypted
    assert topology.encrypted(emulated=True) is emulated


@pytest.mark.parametrize(
    ("compute", "more", "said"),
    [
        ('parts = "fair"', "", 'must be "even", "measured"'),
        ("parts = [1, 0]\ngroup_size = 2", "", "greater than 0"),
        ("parts = [1, 2]\ngroup_size = 3", "", "2 weights: give one for each of the 3 workers"),
        ("parts = [1, 2]\ngroups = 2\ngroup_size = 3", "", "3 workers of a group, or one for each of all 6"),
        ('parts = "measured"\ngroup_size = 2', '[data]\nshuffle = "ring"', "passes batches on unchanged and"),
        ('parts = "measured"\ngroup_size = 2\ngrid = "2x1"', "", "process the same samples"),
    ],
)
def test_parts_that_cannot_be(compute: str, more: str, said: str) -> None:
    with pytest.raises(TopologyFaultsError, match=said):
        parse_topology(f'[job]\ntask = "a:b"\noversubscribe = true\n[compute]\n{compute}\n{more}\n')


def test_parts_are_read_and_written() -> None:
    for written, parts in (('"measured"', "measured"), ("[2, 1]", (2.0, 1.0)), ("[0.5, 1.5]", (0.5, 1.5))):
        topology = parse_topology(f'[job]\ntask = "a:b"\noversubscribe = true\n[compute]\ngroup_size = 2\nparts = {written}\n')
        assert topology.compute.parts == parts
        assert parse_topology(topology.to_toml()) == topology
        assert Topology.from_dict(topology.to_dict()) == topology
