"""The reference of the topology file is what the schema says."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_topology_reference_is_up_to_date() -> None:
    document = runpy.run_path(str(DOCS / "make_topology.py"))["document"]()
    assert (DOCS / "topology.md").read_text() == document, "run `make docs`"
