"""Copies of model servers' shards: what can have them, and where they are."""

from __future__ import annotations

import pytest

from tests.topology.faulty import only
from zmqtrain.topology.cautions import cautions
from zmqtrain.topology.load import parse_topology
from zmqtrain.topology.placement import backups_for, place
from zmqtrain.topology.schema import Topology

HOSTS = '[[hosts]]\nname = "h[1-4]"\nslots = 4\naddress = "localhost"\n'


def text(*, job: str = "", compute: str = "groups = 3", exchange: str = 'kind = "model_server"\nshards = 3', more: str = "") -> str:
    return f'[job]\ntask = "task.py"\n{job}\n{HOSTS}[compute]\n{compute}\n[exchange]\n{exchange}\nreplicas = 1\n{more}'


def sound(shards: int = 3, hosts: str = HOSTS) -> Topology:
    return parse_topology(text(exchange=f'kind = "model_server"\nshards = {shards}').replace(HOSTS, hosts))


@pytest.mark.parametrize("staleness", ['"async"', '"sync"', "{ bound = 2 }"])
def test_every_staleness_can_have_them(staleness: str) -> None:
    topology = parse_topology(text(exchange=f'kind = "model_server"\nshards = 2\nstaleness = {staleness}'))
    assert topology.replicated
    assert topology.asks_elastic


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"exchange": 'kind = "gossip"'}, "replicas is for model servers"),
        ({"exchange": 'kind = "model_server"'}, "the only model server has no other one"),
        ({"compute": "groups = 2\ngroup_size = 2"}, "needs groups of one worker"),
        ({"job": "elastic = false"}, "elastic is false"),
        ({"exchange": 'kind = "model_server"\nshards = 2\nmerged_fc = true\nfc_servers = 2'}, "several FC servers divide"),
        ({"exchange": 'kind = "model_server"\nshards = 2\nsnapshot = true'}, "snapshot"),
        ({"more": '[data]\nshuffle = "ring"'}, 'shuffle = "ring"'),
        (
            {"exchange": 'kind = "model_server"\nshards = 2\nstaleness = "sync"', "more": "[optimizer]\nclip_norm = 1.0"},
            "clip_norm in synchronous training",
        ),
    ],
)
def test_everything_else_is_refused(how: dict[str, str], said: str) -> None:
    assert said in only(text(**how)).message


def test_a_backup_is_on_another_host_if_there_is_one() -> None:
    placement = place(sound(shards=6))
    host = {server.peer: server.host for server in placement.server_roles}
    for server in host:
        backups = backups_for(placement, server)
        assert sorted([server, *backups]) == sorted(host)
        apart = [host[backup] != host[server] for backup in backups]
        assert apart == sorted(apart, reverse=True)
    assert {backups_for(placement, server)[0] for server in host} == {*host}, "one copy for each server"


def test_on_one_host_it_is_another_server_and_that_is_said() -> None:
    topology = sound(2, '[[hosts]]\nname = "h1"\nslots = 4\naddress = "localhost"\n')
    assert backups_for(place(topology), "server/0") == ("server/1",)
    assert not cautions(topology, place(topology)), "there is no other host"
