"""Options stand before or after the topology file; what follows a script is the script's."""

from __future__ import annotations

import pytest

from zmqtrain.cli.script_options import options_first


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", ""),
        ("job.toml", "job.toml"),
        ("job.toml --data d --json", "--data d --json job.toml"),
        ("--json job.toml --data d", "--json --data d job.toml"),
        ("job.toml --data=d script.py --data x -v", "--data=d job.toml script.py --data x -v"),
        ("job.toml script.py --json", "job.toml script.py --json"),
        ("job.toml --data", "--data job.toml"),
        ("job.toml -- --json", "job.toml -- --json"),
        ("job.toml --help", "--help job.toml"),
    ],
)
def test_options_first(given: str, expected: str) -> None:
    assert options_first(given.split(), {"--data", "--set"}) == expected.split()
