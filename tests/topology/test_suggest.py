"""What may have been meant."""

from __future__ import annotations

import pytest

from zmqtrain.topology.suggest import did_you_mean

DEVICES = ("auto", "cpu", "cuda", "modelled")


@pytest.mark.parametrize(
    ("given", "known", "meant"),
    [
        ("gpu", DEVICES, "cuda"),
        ("GPU", DEVICES, "cuda"),
        ("gpu:0", DEVICES, "cuda"),
        ("nvidia", DEVICES, "cuda"),
        ("gpu", ("cpu", "cpus"), None),  # the nearest would be wrong
        ("gpu", ("cpus", "gpus"), "gpus"),
        ("cdua", DEVICES, "cuda"),
        ("cpus", DEVICES, "cpu"),
        ("gosip", ("gossip", "averaging"), "gossip"),
        ("asynchronous", ("async", "sync"), "async"),
        ("banana", DEVICES, None),
        ("tusk", ("Task", "task"), "task"),
        ("tusk", ("task", "Task"), "task"),
        ("Tusk", ("task", "Task"), "Task"),
    ],
)
def test_what_was_meant(given: str, known: tuple[str, ...], meant: str | None) -> None:
    assert did_you_mean(given, known) == meant
