"""``zmqtrain schema``: the topology file's schema as JSON Schema."""

from __future__ import annotations

import json

from zmqtrain.topology.schema import Topology


def run_schema() -> int:
    """Print the schema and return the exit code 0."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Topology.model_json_schema()}
    print(json.dumps(schema, indent=2))
    return 0
