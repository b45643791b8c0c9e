"""Training frameworks on the ``zmq`` backend: each module needs its framework (docs/frameworks.md)."""
