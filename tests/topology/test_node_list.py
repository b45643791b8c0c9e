"""Slurm's lists of nodes."""

from __future__ import annotations

import pytest

from zmqtrain.topology.node_list import expand_node_list


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3,07],gpu5", "n1 n2 n3 n07 gpu5"),
        ("rack[0-1]-n[01-02]", "rack0-n01 rack0-n02 rack1-n01 rack1-n02"),
        ("a, b", "a b"),
        ("n[5].lab", "n5.lab"),
    ],
)
def test_names(text: str, names: str) -> None:
    assert " ".join(expand_node_list(text)) == names


@pytest.mark.parametrize("text", ["", "n[1-3", "n1]", "n[[1]]", "n[a]", "a,,b", "n[3-1]", "n[1-]"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        expand_node_list(text)
