"""What a person may not have meant."""

from __future__ import annotations

import pytest

from zmqtrain.topology import schema
from zmqtrain.topology.cautions import cautions
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import place, place_before


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had none."""
    monkeypatch.setattr(schema, "gpus", lambda: 0)


def said(text: str, gpus: int = 0, *, emulated: bool = False) -> list[str]:
    topology = parse_topology(text if text.startswith("[job]") else "[job]\n" + text)
    placement = place_before(topology) if topology.engine.gathers else place(topology)
    return [each.what for each in cautions(topology, placement, gpus, emulated=emulated)]


def hosts(*slots: int, devices: str = "") -> str:
    more = f"devices = {devices}\n" if devices else ""
    return "".join(f'[[hosts]]\nname = "h{number}"\nslots = {count}\n{more}' for number, count in enumerate(slots))


TWO = '["cuda:0", "cuda:1"]'


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", []),
        (hosts(8, 8, 8), []),
        (hosts(8, 4, 2) + "[compute]\ngroups = 3\n", []),
        (hosts(8, 4, 2) + "[compute]\ngroups = 2\n", []),  # the third has the model server
        (hosts(8, 4, 2) + "[compute]\ngroup_size = 2\n", ["h2 would be idle: 2 workers on 2 of 3 hosts"]),
        (hosts(4, 4, 4, 4) + "[compute]\ngroups = 1\n", ["h1, h2 and h3 would be idle: 1 worker on 1 of 4 hosts"]),
        (
            hosts(*[1] * 12) + "[compute]\ngroups = 1\n",
            ["h1, h2, h3, h4, h5, h6, h7, h8 and 3 more would be idle: 1 worker on 1 of 12 hosts"],
        ),
        (hosts(8, devices=TWO), []),
        (hosts(8, devices=TWO) + "[compute]\ngroups = 1\n", ["cuda:1 of h0 would be idle"]),
        (hosts(8, devices=TWO) + '[compute]\ngroups = 1\ndevice = "cpu"\n', []),
        (hosts(1, devices=TWO), ["cuda:1 of h0 would be idle"]),
        (hosts(8, 8, devices=TWO) + "[compute]\ngroup_size = 3\n", ["cuda:1 of h1 would be idle"]),
        (hosts(8) + "[compute]\nthreads = 4\n", ["4 of 8 slots would be idle"]),
        (hosts(8) + "[compute]\nthreads = 5\n", []),
        (hosts(8) + "[compute]\nthreads = 2\ngroups = 4\n", []),
        (
            hosts(8, 8, 8) + '[compute]\ngroups = 1\n[exchange]\nkind = "model_server"\nshards = 2\n',
            ["14 of 24 slots would be idle"],
        ),
        (hosts(8) + '[exchange]\nkind = "gossip"\n', ['there is no other group to gossip with: kind = "gossip" does nothing here']),
        (
            hosts(8, 8) + '[compute]\ngroup_size = 2\n[exchange]\nkind = "averaging"\n',
            ['there is no other group to average with: kind = "averaging" does nothing here'],
        ),
        (hosts(8, 8) + '[exchange]\nkind = "gossip"\n', []),
        ('[engine]\nkind = "environment"\n[exchange]\nkind = "gossip"\n', []),  # who knows which hosts come
        ('[[hosts]]\nname = "n[1-2]"\naddress = "10.0.0.[1-2]"\n[engine]\nkind = "environment"\n', []),
    ],
)  # fmt: skip
def test_what_is_worth_a_warning(text: str, what: list[str]) -> None:
    assert said(text) == what


def test_gpus_of_this_machine() -> None:
    assert said(hosts(8) + "[compute]\ngroups = 1\n", gpus=4) == ["3 of this machine's 4 GPUs would be idle"]
    assert said(hosts(8) + "[compute]\ngroups = 4\n", gpus=4) == []
    assert said(hosts(8) + '[compute]\ngroups = 1\ndevice = "cpu"\n', gpus=4) == []
    assert said(hosts(8, 8) + "[compute]\ngroups = 2\n", gpus=4) == []  # emulated hosts


def test_the_remedy_for_too_few_slots() -> None:
    topology = parse_topology("[job]\n" + hosts(1, devices=TWO))
    (caution,) = cautions(topology, place(topology))
    assert str(caution) == "warning: cuda:1 of h0 would be idle: raise slots of h0: each worker on a device takes a slot"


def test_faults_do_not_happen_on_a_real_network() -> None:
    fault = '[[faults]]\nkind = "kill"\ntarget = "worker/0"\nat = 1\n'
    (first,) = said(hosts(8) + fault)
    assert first == "1 fault of the file would not happen: a launch carries out [[faults]] only if it is emulated"
    (also,) = said('[engine]\nkind = "environment"\n' + fault + fault)
    assert also.startswith("2 faults of the file would not happen")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('client = "system"\n', '[engine] client would have no effect with the engine "local"'),
        ("sync = true\n", '[engine] sync would have no effect with the engine "local"'),
        ("options.start = 'nice'\n", '[engine] options would have no effect with the engine "local"'),
        ("slurm = { nodes = 2 }\n", '[engine] slurm would have no effect with the engine "local"'),
        ('kind = "environment"\nray = { nodes = 2 }\n', '[engine] ray would have no effect with the engine "environment"'),
        ('kind = "slurm"\nsync_limit = "1 MiB"\n', "[engine] sync_limit would have no effect"),
    ],
)
def test_settings_of_another_engine(text: str, what: str) -> None:
    """`--engine` may name another engine than the file, so they are not refused."""
    assert said("[engine]\n" + text) == [what]
    assert said("[job]\n[engine]\n" + text, emulated=True) == []


def test_settings_of_the_runs_own_engine() -> None:
    assert said('[engine]\nkind = "slurm"\nsync = true\nsync_limit = "1 MiB"\nslurm = { nodes = 2 }\n') == []
    assert said('[engine]\nkind = "mine"\noptions.start = "nice"\nsync = true\n') == []  # who knows what it heeds
    assert said('alone = "1 s"\n') == []
    assert said('alone = "1 s"\n[engine]\nkind = "ray"\n') == ['[job] alone would have no effect with the engine "ray"']


def test_noise_is_for_modelled_devices() -> None:
    noise = '[compute]\nnoise = { kind = "exponential" }\n'
    assert said(noise) == ["[compute] noise would have no effect: a launch takes the time that its steps take"]
    assert said(noise + 'device = "modelled"\nprofile = "lenet"\n') == []
